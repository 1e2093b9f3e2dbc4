package ownership_test

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ofGroup(id int64) plugins.MounterArgs { return plugins.MounterArgs{FSGroup: &id} }

// look is the owner, the group and the mode of what stands at a path.
type look struct {
	uid, gid uint32
	mode     uint32
}

func lookAt(t *testing.T, path string) look {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	return look{st.Uid, st.Gid, st.Mode & 0o7777}
}

func (l look) want(t *testing.T, path string) {
	t.Helper()
	if have := lookAt(t, path); have != l {
		t.Errorf("%s has owner %d:%d and mode %o, not %d:%d and %o", path, have.uid, have.gid, have.mode, l.uid, l.gid, l.mode)
	}
}

func TestSet(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	outside := dir + "/outside"
	volume := dir + "/volume"
	must(t, os.MkdirAll(volume+"/sub", 0o700))
	must(t, os.WriteFile(outside, nil, 0o600))
	must(t, os.WriteFile(volume+"/sub/file", nil, 0o600))
	must(t, os.WriteFile(volume+"/program", nil, 0o700))
	must(t, os.Chmod(volume+"/program", 0o4700|os.ModeSetuid))
	must(t, os.Chown(volume+"/sub/file", 7, 7))
	must(t, os.Symlink(outside, volume+"/link"))
	must(t, syscall.Mkfifo(volume+"/pipe", 0o600))
	must(t, syscall.Mknod(volume+"/socket", syscall.S_IFSOCK|0o600, 0))
	must(t, syscall.Mknod(volume+"/null", syscall.S_IFCHR|0o600, 0x103))
	must(t, os.Mkdir(volume+"/mounted", 0o700))
	testenv.Run(t, "mount", "-t", "tmpfs", "-o", "mode=0700", "none", volume+"/mounted")
	t.Cleanup(func() { testenv.Run(t, "umount", volume+"/mounted") })

	must(t, ownership.Set(t.Context(), volume, plugins.MounterArgs{}))
	look{0, 0, 0o700}.want(t, volume+"/sub")

	for range 2 {
		must(t, ownership.Set(t.Context(), volume, ofGroup(4711)))
		look{0, 4711, 0o2770}.want(t, volume)
		look{0, 4711, 0o2770}.want(t, volume+"/sub")
		look{7, 4711, 0o660}.want(t, volume+"/sub/file")
		look{0, 4711, 0o4760}.want(t, volume+"/program")
		for _, special := range []string{"pipe", "socket", "null"} {
			look{0, 4711, 0o660}.want(t, volume+"/"+special)
		}
		look{0, 4711, 0o777}.want(t, volume+"/link")
		look{0, 0, 0o600}.want(t, outside)
		look{0, 0, 0o700}.want(t, volume+"/mounted")
	}
}

// TestOnRootMismatch: a call that was cut off leaves the root wrong, and the next one does
// all of it.
func TestOnRootMismatch(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	args := ofGroup(4711)
	args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ownership.Set(ctx, dir, args); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	if lookAt(t, dir).gid == 4711 {
		t.Error("the root was changed before what is in it")
	}

	must(t, ownership.Set(t.Context(), dir, args))
	look{0, 4711, 0o660}.want(t, dir+"/file")
	must(t, os.Chmod(dir+"/file", 0o600))
	must(t, ownership.Set(t.Context(), dir, args))
	look{0, 4711, 0o600}.want(t, dir+"/file")
	args.FSGroupChangePolicy = corev1.FSGroupChangeAlways
	must(t, ownership.Set(t.Context(), dir, args))
	look{0, 4711, 0o660}.want(t, dir+"/file")
}

func TestSetLink(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Symlink(t.TempDir(), dir+"/link"))
	if err := ownership.Set(t.Context(), dir+"/link", ofGroup(4711)); err == nil {
		t.Error("a link was followed")
	}
}
