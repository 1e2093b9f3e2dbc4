//go:build vm

package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
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
`

// TestNFS: directories and images of an export, under the manager, which is killed
// meanwhile.
func TestNFS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "volumes")
	g := newGround(t)
	config := fmt.Sprintf("pools: [{name: nas, overcommit: 100, nfs: {server: %s, export: %s, init: true}}]\n", s.Address(), export)
	must(t, os.WriteFile(filepath.Join(g.dir, "config.yaml"), []byte(config), 0o600))
	g.startDriver()
	t.Cleanup(g.end) // before the server goes
	g.put("classes", nfsClasses)
	kinds := []kind{
		{"directory", "nas", "16Mi", "32Mi", ""},
		{"image", "nas-image", "64Mi", "128Mi", ""},
		{"device", "nas-image", "16Mi", "32Mi", ", volumeMode: Block"},
	}
	var sources, grown, names []string
	for _, k := range kinds {
		sources, grown = append(sources, claim(k.name, k.class, k.size, k.more)), append(grown, claim(k.name, k.class, k.larger, k.more))
		names = append(names, k.name)
	}
	g.put("claims", sources...)
	g.put("first", podOf("first", claimsOf(names)...))
	first := g.await("first")
	for _, k := range kinds {
		write(t, first[k.name].Path)
	}
	g.manager.kill()
	g.startManager()
	for name, volume := range g.await("first") {
		wantWritten(t, name, volume.Path)
	}
	g.put("claims", grown...)
	for _, k := range kinds {
		g.claimHas(k.name, k.larger)
	}
	g.remove("first", "claims")
	g.gone("first")
	eventually(t, func() error {
		resp, err := g.control().ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if err == nil && len(resp.GetEntries()) > 0 { // what is mounted, end looks at
			err = fmt.Errorf("the pool has %v", resp.GetEntries())
		}
		return err
	})
}
