//go:build vm

package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/volumemanager"
)

const nfsClasses = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: nas}
provisioner: csi.trivet.dev
parameters: {backend: nfs, pool: nas}
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: nas-image}
provisioner: csi.trivet.dev
parameters: {backend: loop, pool: nas, csi.storage.k8s.io/fstype: ext4}
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: limited}
provisioner: csi.trivet.dev
parameters: {backend: local, pool: limited}
allowVolumeExpansion: true
`

const inlineVolume = "{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi}}}"

// TestNFS writes, expands, copies and deletes volumes on an export and on a filesystem with project
// quotas. It kills and restarts the manager while the volumes are in use.
func TestNFS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "volumes")
	m := newMachine(t)
	m.pool = filepath.Join(testenv.ProjectQuotas(t, "xfs", "1G"), "pool")
	config := fmt.Sprintf(`pools:
- {name: nas, overcommit: 100, nfs: {server: %s, export: %s, init: true}}
- {name: limited, directory: {path: %q}, quota: required, ephemeral: true}
`, s.Address(), export, m.pool)
	must(t, os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(config), 0o600))
	m.startDriver()
	t.Cleanup(m.end) // before the server is stopped
	m.put("classes", trivet+nfsClasses)
	all := []kind{
		{name: "directory", class: "nas", size: "16Mi", larger: "32Mi", unlimited: true},
		{name: "image", class: "nas-image", size: "64Mi", larger: "128Mi"},
		{name: "device", class: "nas-image", size: "16Mi", larger: "32Mi", more: ", volumeMode: Block"},
		{name: "limited", class: "limited", size: "16Mi", larger: "32Mi"},
	}
	first := m.fill(all, inlineVolume)
	m.killManager("first")
	m.grow(all, first)
	m.copies(all)
	m.deleteSnapshots()
	m.removeAll()
	must(t, m.checkPool(0))
	eventually(t, func() error {
		resp, err := m.controller().ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if err == nil && len(resp.GetEntries()) > 0 {
			err = fmt.Errorf("got volumes %v, want none", resp.GetEntries())
		}
		return err
	})
}

// killManager kills and restarts the manager, and checks the volumes of a pod.
func (m *machine) killManager(pod string) {
	m.t.Helper()
	m.manager.kill()
	m.startManager()
	for name, volume := range m.await(pod) {
		wantWritten(m.t, name, volume.Path)
	}
}

// TestNFSPlugins mounts directories of a server without a CSI driver, as an inline nfs volume, as a
// PersistentVolume with policy Recycle, and with a FlexVolume executable.
func TestNFSPlugins(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	kept, scrubbed := s.Export(t, "kept"), s.Export(t, "scrubbed")
	m := newMachine(t)
	m.pool = filepath.Join(t.TempDir(), "pool") // installFlex configures a pool in the same directory
	t.Cleanup(m.end)                            // before the server is stopped
	m.installFlex("nfs")
	m.put("volume", persistent("scrubbed", "1Gi", fmt.Sprintf("persistentVolumeReclaimPolicy: Recycle, nfs: {server: %s, path: %s}", s.Address(), scrubbed)))
	m.put("web", claim("scrubbed", `""`, "1Mi", ", volumeName: scrubbed"), podOf("web", claimed("scrubbed"),
		fmt.Sprintf("{name: inline, nfs: {server: %s, path: %s}}", s.Address(), kept),
		fmt.Sprintf("{name: flex, flexVolume: {driver: trivet/nfs, options: {server: %s, share: %s}}}", s.Address(), kept)))
	p := m.await("web")
	table := mountTable(t)
	for name, at := range map[string]string{"scrubbed": "kubernetes.io~nfs/scrubbed", "inline": "kubernetes.io~nfs/inline", "flex": "trivet~nfs/flex"} {
		path := filepath.Join(m.root, "pods/web/volumes", at)
		if p[name].Path != path || !isNFS(table, path) {
			t.Errorf("volume %s: got path %s, NFS mount %t; want an NFS mount at %s", name, p[name].Path, isNFS(table, path), path)
		}
		write(t, path)
	}
	for _, export := range []string{kept, scrubbed} {
		wantWritten(t, "the exported directory "+export, s.Dir(export))
	}
	m.killManager("web")

	m.remove("web")
	m.awaitRemoved("web")
	m.awaitStatus(func(status volumemanager.Status) error {
		if v := status.PersistentVolumes; len(v) != 1 || v[0].Phase != string(corev1.VolumeAvailable) {
			return fmt.Errorf("got PersistentVolumes %+v, want one in phase Available", v)
		}
		return nil
	})
	if left, err := os.ReadDir(s.Dir(scrubbed)); err != nil || len(left) > 0 {
		t.Errorf("recycled directory: got entries %v, error %v; want none", left, err)
	}
	wantWritten(t, "the exported directory kept", s.Dir(kept))
	m.removeAll()
	m.checkFlexClean()
}

// isNFS reports whether the mount table has an NFSv4 mount at a path.
func isNFS(table []mounted, path string) bool {
	for _, m := range table {
		if m.path == path && m.fsType == "nfs4" {
			return true
		}
	}
	return false
}

// TestHugePages mounts a volume of huge pages, which the test reserves.
func TestHugePages(t *testing.T) {
	const reserved = "/proc/sys/vm/nr_hugepages"
	before, err := os.ReadFile(reserved)
	must(t, err)
	must(t, os.WriteFile(reserved, []byte("4"), 0))
	t.Cleanup(func() { must(t, os.WriteFile(reserved, before, 0)) })
	m := newMachine(t)
	m.put("huge", hugePod)
	must(t, m.isHuge(m.await("huge")["huge"].Path))
	m.removeAll()
}
