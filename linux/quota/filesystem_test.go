package quota

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// disk is an image with a filesystem that can be mounted.
type disk struct {
	// image is the path of the image, and at the path of the mount point.
	image, at string
	// options are mount options.
	options []string
	mounted bool
}

// newDisk creates an image with a filesystem, and does not mount it.
func newDisk(t *testing.T, fsType, size string, options ...string) *disk {
	t.Helper()
	testenv.RequireRoot(t)
	base := t.TempDir()
	d := &disk{image: filepath.Join(base, "disk"), at: filepath.Join(base, "mnt"), options: append([]string{"loop"}, options...)}
	testenv.Run(t, "truncate", "-s", size, d.image)
	testenv.Mkfs(t, fsType, d.image)
	must(t, os.Mkdir(d.at, 0o755))
	return d
}

func (d *disk) mount(t *testing.T) {
	t.Helper()
	testenv.Run(t, "mount", "-o", strings.Join(d.options, ","), d.image, d.at)
	d.mounted = true
	t.Cleanup(func() { d.unmount(t) })
}

func (d *disk) unmount(t *testing.T) {
	t.Helper()
	if d.mounted {
		testenv.Run(t, "umount", d.at)
		d.mounted = false
	}
}

// testFS is a mounted filesystem under test. dir is its root directory.
type testFS struct {
	fs   *FS
	dir  *os.File
	path string
}

// openFS opens the filesystem that is mounted at a path.
func openFS(t *testing.T, path string) *testFS {
	t.Helper()
	dir, err := os.Open(path)
	must(t, err)
	f, err := Open(dir)
	must(t, err)
	fsys := &testFS{fs: f, dir: dir, path: path}
	t.Cleanup(fsys.close)
	return fsys
}

// openKind opens a filesystem and requires that it limits directories by kind.
func openKind(t *testing.T, kind Kind, path string) *testFS {
	t.Helper()
	fsys := openFS(t, path)
	if fsys.fs.Kind() != kind {
		t.Fatalf("%s has kind %q (%s), want %q", path, fsys.fs.Kind(), fsys.fs.Why(), kind)
	}
	must(t, fsys.fs.Check())
	return fsys
}

func (fsys *testFS) close() {
	fsys.dir.Close()
	_ = fsys.fs.Close()
}

// noneTaken is the argument taken of Allocate if no ID is recorded.
func noneTaken(uint64) bool { return false }

// createLimited creates a directory with a limit, in which all users may write.
func (fsys *testFS) createLimited(t *testing.T, name string, l Limit) (path string, id uint64) {
	t.Helper()
	dir := fsys.create(t, name)
	defer dir.Close() // the kernel frees no space of a directory that is open
	id, err := fsys.fs.Allocate(dir, l, noneTaken)
	must(t, err)
	must(t, dir.Chmod(0o777))
	return dir.Name(), id
}

// create creates a directory without a limit.
func (fsys *testFS) create(t *testing.T, name string) *os.File {
	t.Helper()
	must(t, fsys.fs.MakeDir(fsys.dir, name))
	dir, err := os.Open(filepath.Join(fsys.path, name))
	must(t, err)
	t.Cleanup(func() { dir.Close() })
	return dir
}

func (fsys *testFS) usage(t *testing.T, id uint64) Usage {
	t.Helper()
	u, err := fsys.fs.Usage(id)
	must(t, err)
	return u
}

// idOf returns the ID of a directory.
func (fsys *testFS) idOf(t *testing.T, name string) uint64 {
	t.Helper()
	dir, err := os.Open(filepath.Join(fsys.path, name))
	must(t, err)
	defer dir.Close()
	id, err := fsys.fs.ID(dir)
	must(t, err)
	return id
}

// remove removes a directory by RemoveDir on btrfs, and by os.RemoveAll on other filesystems.
func (fsys *testFS) remove(t *testing.T, name string) {
	t.Helper()
	done, err := fsys.fs.RemoveDir(fsys.dir, name)
	must(t, err)
	if done != (fsys.fs.Kind() == Btrfs) {
		t.Errorf("RemoveDir of %s: got done %t on filesystem kind %q", name, done, fsys.fs.Kind())
	}
	if !done {
		must(t, os.RemoveAll(filepath.Join(fsys.path, name)))
	}
}

// btrfsIocSync is BTRFS_IOC_SYNC, which commits the running transaction.
const btrfsIocSync = 0x9408 // _IO(0x94, 8)

// release releases an ID. It retries, because the filesystem frees removed data in the background.
func (fsys *testFS) release(t *testing.T, id uint64) {
	t.Helper()
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		if fsys.fs.Kind() == Btrfs { // otherwise the next commit is up to 30 seconds later
			rawIoctl(t, fsys.dir, btrfsIocSync, nil)
		}
		err := fsys.fs.Release(id)
		return errors.Is(err, ErrBusy), err
	}))
}

// The users that write. Each is a prefix of a command, which the user runs.
var (
	asRoot   []string
	asNobody = []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}
	// asLimitedRoot has no CAP_SYS_RESOURCE, because ext4 does not limit processes that have it.
	asLimitedRoot = []string{"setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"}
)

// fill writes a file until a write fails because of the limit, and returns the size of the file. It writes blocks of 64 KiB and
// then of 4 KiB, because ext4 of newer kernels (7.3, not 6.1) writes no part of a block that exceeds the limit.
func fill(t *testing.T, path string, as []string) int64 {
	t.Helper()
	writeToLimit(t, path, as, "bs=64k", "conv=fsync")
	writeToLimit(t, path, as, "bs=4k", "oflag=append", "conv=notrunc,fsync")
	st, err := os.Stat(path)
	must(t, err)
	return st.Size()
}

// writeToLimit writes a file with operands of dd(1) until a write fails because of the limit.
func writeToLimit(t *testing.T, path string, as []string, operands ...string) {
	t.Helper()
	words := slices.Concat(as, []string{"dd", "if=/dev/zero", "of=" + filepath.Base(path)}, operands)
	c := exec.Command(words[0], words[1:]...)
	c.Dir = filepath.Dir(path) // the user nobody has no permission for the parent directories
	c.Env = append(os.Environ(), "LC_ALL=C")
	out, err := c.CombinedOutput()
	full := strings.Contains(string(out), "Disk quota exceeded") || strings.Contains(string(out), "No space left on device")
	if err == nil || !full {
		t.Fatalf("%q: got %v with output %s, want an error because of the limit", words, err, out)
	}
}

const mib = 1 << 20

// testWriter: writes fail at the limit, and succeed after the limit was raised. slack is the maximum number of bytes
// that the filesystem itself uses.
func testWriter(t *testing.T, fsys *testFS, as []string, slack int64) {
	const limit, grown = 16 * mib, 24 * mib
	path, id := fsys.createLimited(t, "writer", Limit{Bytes: limit})
	_, beside := fsys.createLimited(t, "beside", Limit{Bytes: limit})
	before := fsys.usage(t, beside)
	check := func(size, limit int64) {
		t.Helper()
		if size > limit || size < limit-slack {
			t.Errorf("wrote %d bytes, want at most the limit %d and at least %d", size, limit, limit-slack)
		}
		if u := fsys.usage(t, id); u.Limit.Bytes != limit || u.Bytes > limit || u.Bytes < limit-slack {
			t.Errorf("got usage %+v, want limit %d and between %d and %d bytes", u, limit, limit-slack, limit)
		}
	}
	first := fill(t, filepath.Join(path, "first"), as)
	check(first, limit)
	must(t, fsys.fs.Set(id, Limit{Bytes: grown}))
	check(first+fill(t, filepath.Join(path, "second"), as), grown)
	if after := fsys.usage(t, beside); after != before {
		t.Errorf("usage of the other directory: got %+v, want %+v", after, before)
	}
	for name, id := range map[string]uint64{"writer": id, "beside": beside} {
		fsys.remove(t, name)
		fsys.release(t, id)
	}
}

// testParallel: parallel calls of Allocate return different IDs.
func testParallel(t *testing.T, fsys *testFS) {
	const n = 32
	dirs := make([]*os.File, n)
	for i := range dirs {
		dirs[i] = fsys.create(t, "parallel"+string(rune('A'+i)))
	}
	ids, errs := make([]uint64, n), make([]error, n)
	var all sync.WaitGroup
	for i, dir := range dirs {
		all.Go(func() { ids[i], errs[i] = fsys.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken) })
	}
	all.Wait()
	must(t, errors.Join(errs...))
	of := map[uint64]string{}
	for i, id := range ids {
		name := filepath.Base(dirs[i].Name())
		if id == 0 || of[id] != "" {
			t.Errorf("%s got ID %d, which is 0 or the ID of %q", name, id, of[id])
		}
		of[id] = name
		if got := fsys.idOf(t, name); got != id {
			t.Errorf("ID of %s: got %d, want %d", name, got, id)
		}
		dirs[i].Close()
	}
	for id, name := range of {
		fsys.remove(t, name)
		fsys.release(t, id)
	}
}

// testRelease: an ID can be released when no data counts towards it. A removed file counts until it is closed.
func testRelease(t *testing.T, fsys *testFS) {
	path, id := fsys.createLimited(t, "released", Limit{Bytes: 16 * mib})
	f, err := os.Create(filepath.Join(path, "file"))
	must(t, err)
	defer f.Close()
	_, err = f.Write(make([]byte, mib))
	must(t, errors.Join(err, f.Sync()))
	requireBusy := func(when string) {
		t.Helper()
		if err := fsys.fs.Release(id); !errors.Is(err, ErrBusy) {
			t.Errorf("Release %s: got %v, want %v", when, err, ErrBusy)
		}
	}
	requireBusy("with a file")
	fsys.remove(t, "released")
	must(t, unix.Syncfs(int(fsys.dir.Fd())))
	requireBusy("with a removed file that is open")
	f.Close()
	fsys.release(t, id)
	if u := fsys.usage(t, id); u != (Usage{}) {
		t.Errorf("usage of the released ID: got %+v, want none", u)
	}
	must(t, fsys.fs.Release(id))
}

// testDurable: limits are in force after a crash. crash simulates the crash, and leaves the disk ready to be mounted.
func testDurable(t *testing.T, d *disk, fsys *testFS, crash func()) {
	_, allocated := fsys.createLimited(t, "allocated", Limit{Bytes: 16 * mib})
	_, grown := fsys.createLimited(t, "grown", Limit{Bytes: 16 * mib})
	must(t, fsys.fs.Set(grown, Limit{Bytes: 24 * mib}))
	kind := fsys.fs.Kind()
	crash()
	d.mount(t)
	fsys = openKind(t, kind, d.at)
	for name, want := range map[string]struct {
		id    uint64
		bytes int64
	}{"allocated": {allocated, 16 * mib}, "grown": {grown, 24 * mib}} {
		if id := fsys.idOf(t, name); id != want.id {
			t.Errorf("ID of %s: got %d, want %d", name, id, want.id)
		}
		if u := fsys.usage(t, want.id); u.Limit.Bytes != want.bytes {
			t.Errorf("usage of %s: got %+v, want a limit of %d bytes", name, u, want.bytes)
		}
	}
}

// requireNone requires that a filesystem does not limit directories, and that Why contains the remedy.
func requireNone(t *testing.T, path, remedy string) {
	t.Helper()
	fsys := openFS(t, path)
	if fsys.fs.Kind() != None || !strings.Contains(fsys.fs.Why(), remedy) {
		t.Errorf("%s: got kind %q because of %q, want no kind and the remedy %q", path, fsys.fs.Kind(), fsys.fs.Why(), remedy)
	}
	if err := fsys.fs.Check(); err == nil || err.Error() != fsys.fs.Why() {
		t.Errorf("Check: got %v, want %q", err, fsys.fs.Why())
	}
	dir := fsys.create(t, "unlimited")
	if id, err := fsys.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error", id)
	}
	if id := fsys.idOf(t, "unlimited"); id != 0 {
		t.Errorf("got ID %d, want 0", id)
	}
	must(t, fsys.fs.Release(minProject))
	if done, err := fsys.fs.RemoveDir(fsys.dir, "unlimited"); done != (fsys.fs.subvolumes != nil) || err != nil {
		t.Errorf("RemoveDir: got %t, %v, want %t", done, err, fsys.fs.subvolumes != nil)
	}
}

// rawIoctl calls ioctl(2) for requests that only tests use.
func rawIoctl(t *testing.T, f *os.File, request uint, arg unsafe.Pointer) {
	t.Helper()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg)); errno != 0 {
		t.Fatalf("ioctl %#x on %s: %v", request, f.Name(), errno)
	}
}
