package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/testenv"
)

const diskClass = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: disk}
provisioner: csi.trivet.dev
parameters: {backend: disk, pool: disks, csi.storage.k8s.io/fstype: xfs}
`

// TestDisks: whole disks, one with a filesystem and one raw, are free again after their claims are
// removed.
func TestDisks(t *testing.T) {
	g := newGround(t)
	const size = 1100 << 20
	one, _, _ := testenv.Disk(t, size)
	other, _, _ := testenv.Disk(t, size)
	config := fmt.Sprintf("pools: [{name: disks, disks: {match: [%q, %q]}}]\n", one, other)
	must(t, os.WriteFile(filepath.Join(g.dir, "config.yaml"), []byte(config), 0o600))
	g.startDriver()
	t.Cleanup(g.end) // before the disks are removed
	g.put("classes", diskClass)
	claims := []string{claim("files", "disk", "1Gi", ""), claim("raw", "disk", "1Gi", ", volumeMode: Block")}
	g.put("claims", claims...)
	g.put("first", podOf("first", claimed("files"), claimed("raw")))
	for _, volume := range g.await("first") {
		write(t, volume.Path)
	}
	g.remove("first")
	g.gone("first")
	g.put("second", podOf("second", claimed("files"), claimed("raw")))
	for name, volume := range g.await("second") {
		wantWritten(t, name, volume.Path)
	}
	g.wantNothing()
	eventually(t, func() error {
		resp, err := g.control().GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"backend": "disk", "pool": "disks"}})
		if err == nil && resp.GetAvailableCapacity() < size {
			err = fmt.Errorf("the free disks have %d bytes", resp.GetAvailableCapacity())
		}
		return err
	})
}
