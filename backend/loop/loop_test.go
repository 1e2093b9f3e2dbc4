package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
)

func TestMain(m *testing.M) { backendtest.Main(m, loop.New) }

func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Target{
		New:   loop.New,
		Kinds: []backendtest.Kind{{FSType: "ext4"}, {FSType: "xfs"}, {FSType: "btrfs"}, {}},
	})
}
