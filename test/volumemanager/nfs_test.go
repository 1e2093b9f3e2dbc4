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
// quotas. It kills the manager meanwhile.
func TestNFS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "volumes")
	g := newGround(t)
	g.pool = filepath.Join(testenv.ProjectQuotas(t, "xfs", "1G"), "pool")
	config := fmt.Sprintf(`pools:
- {name: nas, overcommit: 100, nfs: {server: %s, export: %s, init: true}}
- {name: limited, directory: {path: %q}, quota: required, ephemeral: true}
`, s.Address(), export, g.pool)
	must(t, os.WriteFile(filepath.Join(g.dir, "config.yaml"), []byte(config), 0o600))
	g.startDriver()
	t.Cleanup(g.end) // before the server is stopped
	g.put("classes", trivet+nfsClasses)
	all := []kind{
		{name: "directory", class: "nas", size: "16Mi", larger: "32Mi", unlimited: true},
		{name: "image", class: "nas-image", size: "64Mi", larger: "128Mi"},
		{name: "device", class: "nas-image", size: "16Mi", larger: "32Mi", more: ", volumeMode: Block"},
		{name: "limited", class: "limited", size: "16Mi", larger: "32Mi"},
	}
	first := g.fill(all, inlineVolume)
	g.killManager("first")
	g.grow(all, first)
	g.copies(all)
	g.dropSnapshots()
	g.wantNothing()
	must(t, g.poolHas(0))
	eventually(t, func() error {
		resp, err := g.control().ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if err == nil && len(resp.GetEntries()) > 0 {
			err = fmt.Errorf("the pools have %v", resp.GetEntries())
		}
		return err
	})
}

// killManager restarts the manager with SIGKILL, and checks the volumes of a pod.
func (g *ground) killManager(pod string) {
	g.t.Helper()
	g.manager.kill()
	g.startManager()
	for name, volume := range g.await(pod) {
		wantWritten(g.t, name, volume.Path)
	}
}

// TestNFSPlugins mounts directories of a server without a CSI driver: as a volume of the pod, as a
// recycled PersistentVolume, and with a FlexVolume executable.
func TestNFSPlugins(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	kept, scrubbed := s.Export(t, "kept"), s.Export(t, "scrubbed")
	g := newGround(t)
	g.pool = filepath.Join(t.TempDir(), "pool") // installFlex configures a pool in the same directory
	t.Cleanup(g.end)                            // before the server is stopped
	g.installFlex("nfs")
	g.put("volume", persistent("scrubbed", "1Gi", fmt.Sprintf("persistentVolumeReclaimPolicy: Recycle, nfs: {server: %s, path: %s}", s.Address(), scrubbed)))
	g.put("web", claim("scrubbed", `""`, "1Mi", ", volumeName: scrubbed"), podOf("web", claimed("scrubbed"),
		fmt.Sprintf("{name: inline, nfs: {server: %s, path: %s}}", s.Address(), kept),
		fmt.Sprintf("{name: flex, flexVolume: {driver: trivet/nfs, options: {server: %s, share: %s}}}", s.Address(), kept)))
	p := g.await("web")
	table := mountTable(t)
	for name, at := range map[string]string{"scrubbed": "kubernetes.io~nfs/scrubbed", "inline": "kubernetes.io~nfs/inline", "flex": "trivet~nfs/flex"} {
		path := filepath.Join(g.root, "pods/web/volumes", at)
		if p[name].Path != path || !isNFS(table, path) {
			t.Errorf("%s is at %s, want nfs at %s", name, p[name].Path, path)
		}
		write(t, path)
	}
	for _, export := range []string{kept, scrubbed} {
		wantWritten(t, "the server's "+export, s.Dir(export))
	}
	g.killManager("web")

	g.remove("web")
	g.gone("web")
	g.holds(func(status volumemanager.Status) error {
		if v := status.PersistentVolumes; len(v) != 1 || v[0].Phase != string(corev1.VolumeAvailable) {
			return fmt.Errorf("the recycled volume: %+v", v)
		}
		return nil
	})
	if left, err := os.ReadDir(s.Dir(scrubbed)); err != nil || len(left) > 0 {
		t.Errorf("the recycled directory has %v, %v", left, err)
	}
	wantWritten(t, "the server's directory", s.Dir(kept))
	g.wantNothing()
	g.wantFlexClean()
}

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
	g := newGround(t)
	g.put("huge", huge)
	must(t, g.isHuge(g.await("huge")["huge"].Path))
	g.wantNothing()
}
