//go:build vm

package local_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestProjectConformance runs the conformance tests on filesystems with project quotas.
func TestProjectConformance(t *testing.T) { targets.Run(t, "directories-xfs", "directories-ext4") }

// TestProjectTransfer: a directory that was received from another node has the limit of its volume.
func TestProjectTransfer(t *testing.T) {
	for _, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			const size, written = 64 << 20, 8 << 20
			dirs := []string{testenv.ProjectQuotas(t, fsType, "1G"), testenv.ProjectQuotas(t, fsType, "1G")}
			c := backendtest.StartCluster(t, dirs, local.Kind)
			tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.Directories()[0].Capability(backendtest.CapabilityOf("").GetAccessMode().GetMode()), Class: map[string]string{"backend": local.Name}}
			source := tr.Create(t, 0, "v", size, nil)
			source.Publish(t)
			source.Write(t, bytes.Repeat([]byte{1}, written), 0)
			source.Unpublish(t)
			dir := filepath.Join(dirs[0], "volumes", "v", "data")
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			received := tr.Create(t, 1, "n", size, source.Source())
			received.Publish(t)
			received.CheckLimited(t, size, written)
		})
	}
}
