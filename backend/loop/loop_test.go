package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { backendtest.Main(m, loop.New) }

var kinds = []backendtest.Kind{{FSType: "ext4"}, {FSType: "xfs"}, {FSType: "btrfs"}, {}}

func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Target{New: loop.New, Kinds: kinds})
}

// TestSnapshots has a pool that shares no blocks, and two that do.
func TestSnapshots(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			backendtest.RunSnapshots(t, backendtest.Target{
				New: loop.New, Kinds: kinds, Thorough: fsType == "xfs",
				Filesystem: func(tb testing.TB, size string) string { return testenv.Filesystem(tb, fsType, size) },
			})
		})
	}
}
