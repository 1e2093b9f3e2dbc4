//go:build vm

package flexvolume

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestNFSSilent: the plugin unmounts a volume of an unreachable server for a driver without the call
// unmount, and no call hangs.
func TestNFSSilent(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	export := server.Export(t, "tank")
	d := scriptDriver(t, `echo '{"status":"Not supported"}'; exit 1`)
	d.nfsUnmounter.Patience = time.Hour
	path := filepath.Join(t.TempDir(), "volume")
	mountNFS(t, mount.NFS{Server: server.Address(), Path: export, Options: []string{"nosharecache"}}, path)
	second := filepath.Join(t.TempDir(), "second")
	must(t, os.Mkdir(second, 0o700))
	must(t, mount.Bind(path, second, mount.Options{}))
	server.Link().CutWriting(t, filepath.Join(path, "dirty"))

	must(t, d.takeDown(t.Context(), "unmount", second)) // the other mount of the volume keeps its data
	plugintest.WantError(t, d.takeDown(t.Context(), "unmount", path), "does not answer")
	if plugintest.MountAt(t, path) == nil {
		t.Error("the volume was unmounted before NFSUnmounter.Patience had passed")
	}
	d.nfsUnmounter.Patience = 0
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		err := d.takeDown(t.Context(), "unmount", path)
		return err != nil, err
	}))
	plugintest.WantMissing(t, path)
	server.Link().Restore(t)
}

// mountNFS creates a directory and mounts an export at it.
func mountNFS(t *testing.T, n mount.NFS, path string) {
	t.Helper()
	must(t, os.Mkdir(path, 0o700))
	detached, _, err := mount.MountNFS(context.Background(), n, 0)
	must(t, err)
	must(t, detached.MoveTo(path))
	must(t, detached.Close())
}
