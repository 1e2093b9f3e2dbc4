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
	d := scripted(t, `echo '{"status":"Not supported"}'; exit 1`)
	d.servers.Patience = time.Hour
	path := filepath.Join(t.TempDir(), "volume")
	showNFS(t, mount.NFS{Server: server.Address(), Path: export, Options: []string{"nosharecache"}}, path)
	beside := filepath.Join(t.TempDir(), "beside")
	must(t, os.Mkdir(beside, 0o700))
	must(t, mount.Bind(path, beside, mount.Options{}))
	server.Link().CutWriting(t, filepath.Join(path, "dirty"))

	must(t, d.takeDown(t.Context(), "unmount", beside)) // no data is lost
	plugintest.WantError(t, d.takeDown(t.Context(), "unmount", path), "does not answer")
	if plugintest.MountAt(t, path) == nil {
		t.Error("the volume was unmounted within the patience")
	}
	d.servers.Patience = 0
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		err := d.takeDown(t.Context(), "unmount", path)
		return err != nil, err
	}))
	plugintest.WantMissing(t, path)
	server.Link().Restore(t)
}

func showNFS(t *testing.T, n mount.NFS, path string) {
	t.Helper()
	must(t, os.Mkdir(path, 0o700))
	made, _, err := mount.MountNFS(context.Background(), n, 0)
	must(t, err)
	must(t, made.MoveTo(path))
	must(t, made.Close())
}
