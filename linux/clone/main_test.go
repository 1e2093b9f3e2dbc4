package clone_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const kib, mib, gib = int64(1) << 10, int64(1) << 20, int64(1) << 30

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// testFS is a type of filesystem under test, with its mount options.
type testFS struct {
	name, fsType string
	options      []string
	// reflink means that files can share blocks, compress that files are compressed, nocow that image sets
	// NOCOW.
	reflink, compress, nocow bool
}

var testFilesystems = []testFS{
	{name: "xfs", fsType: "xfs", reflink: true},
	{name: "btrfs", fsType: "btrfs", reflink: true},
	{name: "btrfs-nocow", fsType: "btrfs", reflink: true, nocow: true},
	{name: "btrfs-zstd", fsType: "btrfs", options: []string{"compress-force=zstd"}, reflink: true, compress: true},
	{name: "ext4", fsType: "ext4"},
}

// mount creates and mounts a filesystem, and returns the path of its mount point.
func (fsys testFS) mount(tb testing.TB, size string) string {
	tb.Helper()
	return filesystem(tb, fsys.fsType, size, fsys.options...)
}

// filesystem does the same as testenv.Filesystem with a disk in memory, because these tests sync often and need no
// durability.
func filesystem(tb testing.TB, fsType, size string, options ...string) string {
	tb.Helper()
	testenv.RequireRoot(tb)
	memory := tb.TempDir()
	must(tb, unix.Mount("tmpfs", memory, "tmpfs", 0, ""))
	// MNT_DETACH, because the loop device may keep its file open for a short time.
	tb.Cleanup(func() { must(tb, unix.Unmount(memory, unix.MNT_DETACH)) })
	image, dir := filepath.Join(memory, "disk"), mkdir(tb, memory, "mnt")
	testenv.Run(tb, "truncate", "-s", size, image)
	testenv.Mkfs(tb, fsType, image)
	testenv.Run(tb, "mount", "-t", fsType, "-o", strings.Join(append(options, "loop"), ","), image, dir)
	tb.Cleanup(func() { testenv.Run(tb, "umount", dir) })
	return dir
}

// eachFilesystem runs a test on each filesystem.
func eachFilesystem(t *testing.T, size string, test func(t *testing.T, fsys testFS, dir string)) {
	for _, fsys := range testFilesystems {
		t.Run(fsys.name, func(t *testing.T) { test(t, fsys, fsys.mount(t, size)) })
	}
}

// image creates an empty file, which is NOCOW if fsys.nocow is set.
func (fsys testFS) image(tb testing.TB, path string) *os.File {
	tb.Helper()
	f := create(tb, path)
	if fsys.nocow {
		testenv.Run(tb, "chattr", "+C", path)
	}
	return f
}

func create(tb testing.TB, path string) *os.File {
	tb.Helper()
	f, err := os.Create(path)
	must(tb, err)
	tb.Cleanup(func() { f.Close() })
	return f
}

func open(tb testing.TB, path string) *os.File {
	tb.Helper()
	f, err := os.Open(path)
	must(tb, err)
	tb.Cleanup(func() { f.Close() })
	return f
}

func mkdir(tb testing.TB, path ...string) string {
	tb.Helper()
	at := filepath.Join(path...)
	must(tb, os.Mkdir(at, 0o700))
	return at
}

func write(tb testing.TB, f *os.File, at int64, b []byte) {
	tb.Helper()
	_, err := f.WriteAt(b, at)
	must(tb, err)
}

// allocatedTo returns the number of bytes that are allocated to a file.
func allocatedTo(tb testing.TB, f *os.File) int64 {
	tb.Helper()
	var st unix.Stat_t
	must(tb, unix.Fstat(int(f.Fd()), &st))
	return st.Blocks * 512
}

// sharedExtents counts the shared extents and all extents of a file (filefrag(8)).
func sharedExtents(tb testing.TB, path string) (shared, all int) {
	tb.Helper()
	for line := range strings.Lines(testenv.Run(tb, "filefrag", "-v", path)) {
		if fields := strings.Fields(line); len(fields) > 0 && strings.HasSuffix(fields[0], ":") && strings.Contains(line, "..") {
			all++
			if strings.Contains(line, "shared") {
				shared++
			}
		}
	}
	return shared, all
}
