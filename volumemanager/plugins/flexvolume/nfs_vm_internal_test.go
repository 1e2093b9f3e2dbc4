//go:build vm

package flexvolume

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestNFSSilent: what a driver has mounted from a server that is silent, and leaves to
// others to unmount, goes, and nothing hangs.
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

	must(t, d.takeDown(t.Context(), "unmount", beside)) // which loses nothing
	if err := d.takeDown(t.Context(), "unmount", path); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("within the patience: %v", err)
	}
	if at, err := mount.OnPath(path); at == nil || err != nil {
		t.Errorf("it was given up: %v", err)
	}
	d.servers.Patience = 0
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		err := d.takeDown(t.Context(), "unmount", path)
		return err != nil, err
	}))
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
