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

func fsGroup(id int64) plugins.MounterArgs { return plugins.MounterArgs{FSGroup: &id} }

// attributes are the owner, group and mode of a file.
type attributes struct{ uid, gid, mode uint32 }

func attributesOf(t *testing.T, path string) attributes {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	return attributes{st.Uid, st.Gid, st.Mode & 0o7777}
}

func (want attributes) check(t *testing.T, path string) {
	t.Helper()
	if got := attributesOf(t, path); got != want {
		t.Errorf("%s: got %d:%d, mode %o; want %d:%d, mode %o", path, got.uid, got.gid, got.mode, want.uid, want.gid, want.mode)
	}
}

// TestSet: Set changes the group and the mode of files of all types. It changes neither the target of a link
// nor the files of another mount.
func TestSet(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	outside := dir + "/outside"
	volume := dir + "/volume"
	must(t, os.MkdirAll(volume+"/sub", 0o700))
	must(t, os.WriteFile(outside, nil, 0o600))
	must(t, os.WriteFile(volume+"/sub/file", nil, 0o600))
	must(t, os.WriteFile(volume+"/program", nil, 0o700))
	must(t, os.Chmod(volume+"/program", 0o700|os.ModeSetuid))
	must(t, os.Chown(volume+"/sub/file", 7, 7))
	must(t, os.Symlink(outside, volume+"/link"))
	must(t, syscall.Mkfifo(volume+"/pipe", 0o600))
	must(t, syscall.Mknod(volume+"/socket", syscall.S_IFSOCK|0o600, 0))
	must(t, syscall.Mknod(volume+"/null", syscall.S_IFCHR|0o600, 0x103))
	must(t, os.Mkdir(volume+"/mounted", 0o700))
	testenv.Run(t, "mount", "-t", "tmpfs", "-o", "mode=0700", "none", volume+"/mounted")
	t.Cleanup(func() { testenv.Run(t, "umount", volume+"/mounted") })

	must(t, ownership.Set(t.Context(), volume, plugins.MounterArgs{}))
	attributes{0, 0, 0o700}.check(t, volume+"/sub")

	for range 2 {
		must(t, ownership.Set(t.Context(), volume, fsGroup(4711)))
		attributes{0, 4711, 0o2770}.check(t, volume)
		attributes{0, 4711, 0o2770}.check(t, volume+"/sub")
		attributes{7, 4711, 0o660}.check(t, volume+"/sub/file")
		attributes{0, 4711, 0o4760}.check(t, volume+"/program")
		for _, special := range []string{"pipe", "socket", "null"} {
			attributes{0, 4711, 0o660}.check(t, volume+"/"+special)
		}
		attributes{0, 4711, 0o777}.check(t, volume+"/link")
		attributes{0, 0, 0o600}.check(t, outside)
		attributes{0, 0, 0o700}.check(t, volume+"/mounted")
	}
}

// TestOnRootMismatch: with policy OnRootMismatch, Set changes files only if the root differs. An
// interrupted call does not change the root.
func TestOnRootMismatch(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	args := fsGroup(4711)
	args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ownership.Set(ctx, dir, args); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: got error %v, want %v", err, context.Canceled)
	}
	if attributesOf(t, dir).gid == 4711 {
		t.Error("the root was changed before its content")
	}

	must(t, ownership.Set(t.Context(), dir, args))
	attributes{0, 4711, 0o660}.check(t, dir+"/file")
	must(t, os.Chmod(dir+"/file", 0o600))
	must(t, ownership.Set(t.Context(), dir, args))
	attributes{0, 4711, 0o600}.check(t, dir+"/file")
	args.FSGroupChangePolicy = corev1.FSGroupChangeAlways
	must(t, ownership.Set(t.Context(), dir, args))
	attributes{0, 4711, 0o660}.check(t, dir+"/file")
}

// TestSetLink: Set refuses a volume whose path is a symbolic link.
func TestSetLink(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Symlink(t.TempDir(), dir+"/link"))
	if err := ownership.Set(t.Context(), dir+"/link", fsGroup(4711)); err == nil {
		t.Error("Set of a symbolic link: got no error")
	}
}
