package local_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// TestTransfer: a snapshot and a volume are created on other nodes with all that a local copy keeps, also on another type of
// filesystem. A volume on btrfs can be in use meanwhile.
func TestTransfer(t *testing.T) {
	for _, from := range []string{"xfs", "btrfs"} {
		t.Run(from, func(t *testing.T) {
			dirs := []string{testenv.Filesystem(t, from, "2G"), testenv.Filesystem(t, from, "2G")}
			if from != "btrfs" { // it has flags that the others do not have
				dirs = append(dirs, testenv.Filesystem(t, "btrfs", "2G"), testenv.Filesystem(t, "ext4", "2G"))
			}
			c := backendtest.StartCluster(t, dirs, local.Kind)
			tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.Directories()[0].Capability(backendtest.CapabilityOf("").GetAccessMode().GetMode()), Class: map[string]string{"backend": local.Name}}
			source := tr.Create(t, 0, "v", 512<<20, nil)
			data := func(node int, name string) string { return filepath.Join(dirs[node], "volumes", name, "data") }
			if from == "btrfs" {
				source.Publish(t)
			}
			treetest.Make(t, data(0, "v"), 3)
			snapshot := tr.Snapshot(t, source, "s")
			for node := 1; node < len(dirs); node++ {
				for name, content := range map[string]*backendtest.NodeVolume{
					"snapshot": tr.Create(t, node, fmt.Sprintf("s-%d", node), 512<<20, snapshot),
					"volume":   tr.Create(t, node, fmt.Sprintf("v-%d", node), 512<<20, source.Source()),
				} {
					to := data(node, fmt.Sprintf("%c-%d", name[0], node))
					treetest.Compare(t, data(0, "v"), to)
					content.Publish(t)
					content.Unpublish(t)
				}
			}
		})
	}
}
