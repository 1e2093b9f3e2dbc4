package local_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestDisks(t *testing.T) {
	const pool = backendtest.DiskPool
	backendtest.Run(t, backendtest.Target{
		New: local.New, Disks: backendtest.LoopDisks(4), Growing: backendtest.GrowingLoop, Plug: testenv.PlugIn,
		Kinds: []backendtest.Kind{{FSType: "ext4", Pool: pool}, {FSType: "xfs", Pool: pool}, {FSType: "btrfs", Pool: pool}, {Pool: pool}},
	})
}

func TestMain(m *testing.M) { backendtest.Main(m, local.New) }

func TestConformance(t *testing.T) {
	target := backendtest.Target{New: local.New, Kinds: []backendtest.Kind{{FSType: "dir"}}}
	t.Run("unlimited", func(t *testing.T) {
		target.Filesystem = func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "ext4", size) }
		backendtest.Run(t, target)
	})
	t.Run("btrfs", func(t *testing.T) {
		target.Filesystem = testenv.SimpleQuotas
		target.Limits = &backendtest.Limits{
			Off: func(tb testing.TB, path string) { testenv.SwitchQuotas(tb, path, false) },
			On:  func(tb testing.TB, path string) { testenv.SwitchQuotas(tb, path, true) },
		}
		backendtest.Run(t, target)
	})
}
