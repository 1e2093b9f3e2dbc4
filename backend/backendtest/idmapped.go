package backendtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// firstID is the user and group on the node that is 0 in the user namespace of the tests.
const firstID = 100_000

// testIDMapped: a container runtime can map the users of a published volume for a pod with hostUsers: false, also of a
// subPath and of a read-only volume. The files keep the users that the pod sees, and fsGroup applies. The kernel refuses
// that for directories on NFS.
func testIDMapped(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	readOnly := filepath.Join(filepath.Dir(l.target), "read-only")
	must(t, l.publishAt(t.Context(), readOnly, true))
	t.Cleanup(func() { must(t, l.unpublishAt(context.Background(), readOnly)) })
	const user, fsGroup = 1000, 2000
	sub := filepath.Join(l.target, "sub")
	must(t, os.Mkdir(sub, 0o755))
	for _, dir := range []string{l.target, sub} { // as the kubelet does for fsGroup
		must(t, os.Chown(dir, -1, fsGroup))
		must(t, os.Chmod(dir, 0o775|os.ModeSetgid))
	}
	namespace := userNamespace(t)
	if kind.Has(Shared | Directory) {
		if err := mountMapped(l.target, t.TempDir(), namespace); !errors.Is(err, unix.EINVAL) {
			t.Errorf("mapping the users of a directory on NFS: got %v, want EINVAL", err)
		}
		return
	}
	touch := func(dir string) (string, error) {
		words := []string{"setpriv", "--reuid", strconv.Itoa(firstID + user), "--regid", strconv.Itoa(firstID + fsGroup), "--clear-groups", "touch", "file"}
		return testenv.Output(dir, words...)
	}
	for _, dir := range []string{l.target, sub} {
		at := mapped(t, dir, namespace)
		if out, err := touch(at); err != nil {
			t.Errorf("creating a file as a user of the namespace in %s: %v\n%s", dir, err, out)
			continue
		}
		wantOwnedBy(t, filepath.Join(at, "file"), firstID+user, firstID+fsGroup)
		wantOwnedBy(t, filepath.Join(dir, "file"), user, fsGroup)
	}
	if out, err := touch(mapped(t, readOnly, namespace)); err == nil || !strings.Contains(out, "Read-only file system") {
		t.Errorf("changing a file in a read-only volume: got %v, %q; want a read-only filesystem", err, out)
	}
}

// userNamespace returns a user namespace in which the users and groups from 0 are those from firstID.
func userNamespace(t *testing.T) *os.File {
	t.Helper()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: firstID, Size: 1 << 16}}
	cmd := exec.Command("cat") // it has the namespace until its input ends
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	input, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	must(t, errors.Join(err, input.Close(), cmd.Wait()))
	t.Cleanup(func() { _ = namespace.Close() })
	return namespace
}

// mapped mounts a directory with the users of a user namespace until the test ends, and returns the mount point.
func mapped(t *testing.T, dir string, namespace *os.File) string {
	t.Helper()
	at := t.TempDir()
	must(t, mountMapped(dir, at, namespace))
	t.Cleanup(func() { must(t, unix.Unmount(at, 0)) })
	return at
}

// mountMapped mounts a directory at a path with the users of a user namespace, as a container runtime does.
func mountMapped(dir, at string, namespace *os.File) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(fd)
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(namespace.Fd())}); err != nil {
		return os.NewSyscallError("mount_setattr", err)
	}
	return os.NewSyscallError("move_mount", unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// wantOwnedBy fails the test unless a file has an owner and a group.
func wantOwnedBy(t *testing.T, path string, uid, gid uint32) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Uid != uid || st.Gid != gid {
		t.Errorf("got owner %d:%d of %s, want %d:%d", st.Uid, st.Gid, path, uid, gid)
	}
}
