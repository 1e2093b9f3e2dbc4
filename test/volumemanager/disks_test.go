package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestDisks writes to two volumes that are whole disks, one with a filesystem and one raw. After their
// claims are removed, the disks are free again.
func TestDisks(t *testing.T) { testDisks(t, "") }

// testDisks is TestDisks for a class with more parameters.
func testDisks(t *testing.T, more string) {
	m := newMachine(t)
	const size = 1100 << 20
	one, _, _ := testenv.Disk(t, size)
	other, _, _ := testenv.Disk(t, size)
	config := fmt.Sprintf("pools: [{name: disks, disks: {match: [%q, %q]}}]\n", one, other)
	must(t, os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(config), 0o600))
	m.startDriver()
	t.Cleanup(m.end) // before the disks are removed
	m.put("classes", class("disk", "backend: disk, pool: disks, csi.storage.k8s.io/fstype: xfs"+more), passphraseSecret)
	claims := []string{claim("files", "disk", "1Gi", ""), claim("raw", "disk", "1Gi", ", volumeMode: Block")}
	m.put("claims", claims...)
	m.put("first", podOf("first", claimed("files"), claimed("raw")))
	for _, volume := range m.await("first") {
		write(t, volume.Path)
	}
	m.remove("first")
	m.awaitRemoved("first")
	m.put("second", podOf("second", claimed("files"), claimed("raw")))
	for name, volume := range m.await("second") {
		wantWritten(t, name, volume.Path)
	}
	m.removeAll()
	eventually(t, func() error {
		resp, err := m.controller().GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"backend": "disk", "pool": "disks"}})
		if err == nil && resp.GetAvailableCapacity() < size {
			err = fmt.Errorf("available capacity: got %d, want at least %d", resp.GetAvailableCapacity(), size)
		}
		return err
	})
}
