package background

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
)

// numberOf returns the number of a device node.
func numberOf(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return number(st.Rdev)
}

// open opens a file or a device until the test ends.
func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// disksAt returns the names of the disks below a path, sorted.
func disksAt(t *testing.T, path string) []string {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	return slices.Sorted(slices.Values(disksBelow(f)))
}

// mount mounts a filesystem until unmount is called.
func mount(t *testing.T, args ...string) (dir string, unmount func()) {
	t.Helper()
	dir = t.TempDir()
	testenv.Run(t, "mount", append(args, dir)...)
	return dir, func() { testenv.Run(t, "umount", dir) }
}

// TestDisks: a device, its partition and the files on it have the budget of the device, and a filesystem on two devices that of both.
func TestDisks(t *testing.T) {
	first, _, _ := testenv.Disk(t, 512<<20)
	second, _, _ := testenv.Disk(t, 512<<20)
	one := []string{numberOf(t, first)}
	two := slices.Sorted(slices.Values([]string{numberOf(t, first), numberOf(t, second)}))
	want := func(path string, want []string) {
		t.Helper()
		if got := disksAt(t, path); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", path, got, want)
		}
	}
	want(first, one)

	disk := open(t, first, os.O_RDWR)
	must(t, sys.AddPartition(disk, 1, 1<<20, 16<<20))
	want(first+"p1", one)
	must(t, sys.DeletePartition(disk, 1))
	must(t, disk.Close())

	testenv.Run(t, "mkfs.ext4", "-q", first)
	dir, unmount := mount(t, first)
	want(dir, one)
	unmount()

	testenv.Run(t, "mkfs.btrfs", "-qf", first, second)
	dir, unmount = mount(t, first)
	testenv.Run(t, "btrfs", "subvolume", "create", filepath.Join(dir, "subvolume"))
	want(dir, two)
	want(filepath.Join(dir, "subvolume"), two)
	unmount()

	dir, unmount = mount(t, "-t", "tmpfs", "tmpfs")
	var st unix.Stat_t
	must(t, unix.Stat(dir, &st))
	want(dir, []string{number(st.Dev)})
	unmount()
	if got := btrfsDisks("unknown"); !slices.Equal(got, []string{"unknown"}) {
		t.Errorf("a btrfs whose devices are not known: got %v, want its UUID", got)
	}
}

// TestShared: two tasks on one disk share its budget, and one on another disk does not.
func TestShared(t *testing.T) {
	a, _, _ := testenv.Disk(t, 1<<20)
	b, _, _ := testenv.Disk(t, 1<<20)
	first, second, other := On(Piece, open(t, a, os.O_RDONLY)), On(2*Piece, open(t, a, os.O_RDONLY)), On(Piece, open(t, b, os.O_RDONLY))
	if first.shares[0].disk != second.shares[0].disk || first.shares[0].disk == other.shares[0].disk {
		t.Error("two tasks on one disk do not share its budget, or tasks on different disks share it")
	}
	both := On(Piece, open(t, b, os.O_RDONLY), open(t, a, os.O_RDONLY), open(t, a, os.O_RDONLY))
	if len(both.shares) != 2 {
		t.Errorf("a task on two disks has %d, want 2", len(both.shares))
	}
}

// TestWriterError: an error of writing back that a Writer gets is not hidden from a later sync of the file.
func TestWriterError(t *testing.T) {
	full := testenv.Filesystem(t, "ext4", "16M")
	image := filepath.Join(full, "image")
	testenv.Run(t, "truncate", "-s", "64M", image)
	device := open(t, testenv.PlugIn(t, image), os.O_RDWR)
	w, err := On(1<<40, device).Writer(device)
	must(t, err)
	defer w.Close()
	if _, err := w.Budget.WriteAt(t.Context(), w, make([]byte, 32<<20), 0); err == nil {
		t.Error("writing 32 MiB to a device with less space returned no error")
	}
	if err := device.Sync(); err == nil {
		t.Error("the sync of the device after the failed write returned no error")
	}
}

// TestPieces: a file is read and written in pieces, and completely.
func TestPieces(t *testing.T) {
	f := open(t, filepath.Join(t.TempDir(), "file"), os.O_CREATE|os.O_RDWR)
	content := make([]byte, 3*Piece+1000)
	for i := range content {
		content[i] = byte(i / 1000)
	}
	w, err := On(4*Piece, f).Writer(f)
	must(t, err)
	defer w.Close()
	w.Budget.shares = []share{{disk: busyDisk()}}
	began := time.Now()
	n, err := w.Budget.WriteAt(t.Context(), w, content, 500)
	must(t, err)
	got := make([]byte, len(content))
	m, err := w.Budget.ReadAt(t.Context(), f, got, 500)
	must(t, err)
	if n != len(content) || m != len(content) || !slices.Equal(got, content) {
		t.Errorf("wrote %d and read %d bytes, want %d that are the same", n, m, len(content))
	}
	if took := time.Since(began); took < 1500*time.Millisecond {
		t.Errorf("took %v, want 1.5 s for the rests after 6 whole pieces", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := w.Budget.WriteAt(ctx, w, content, 0); n != 0 || err == nil {
		t.Errorf("after the end of the context: wrote %d bytes, %v", n, err)
	}
}

// priorityAt is an io.ReaderAt that stores the I/O priority of the calling thread.
type priorityAt uintptr

func (p *priorityAt) ReadAt(b []byte, _ int64) (int, error) {
	const whoProcess = 1 // with 0, the calling thread (linux/ioprio.h)
	got, _, _ := unix.Syscall(unix.SYS_IOPRIO_GET, whoProcess, 0, 0)
	*p = priorityAt(got)
	return len(b), nil
}

// TestIdle: reads, and writes to a device, have the idle I/O priority, and writes to a file have not.
func TestIdle(t *testing.T) {
	const idle = 3 << 13 // linux/ioprio.h
	var got priorityAt
	path, _, _ := testenv.Disk(t, 1<<20)
	device, file := open(t, path, os.O_RDWR), open(t, filepath.Join(t.TempDir(), "file"), os.O_CREATE|os.O_RDWR)
	b := On(1<<40, device)
	_, err := b.ReadAt(t.Context(), &got, make([]byte, 1), 0)
	must(t, err)
	if got != idle {
		t.Errorf("a read has the priority %#x, want %#x", got, idle)
	}
	for _, to := range []*os.File{device, file} {
		w, err := b.Writer(to)
		must(t, err)
		defer w.Close()
		must(t, w.withPriority(func() error {
			_, err := got.ReadAt(nil, 0)
			return err
		}))
		if (got == idle) != (to == device) {
			t.Errorf("a write to %s has the priority %#x", to.Name(), got)
		}
	}
}

// TestRequests: the requests for a disk are counted. If the kernel does not count them, that is detected.
func TestRequests(t *testing.T) {
	path, _, _ := testenv.Disk(t, 4<<20)
	device := open(t, path, os.O_RDWR)
	countRequests := func(value string) {
		must(t, os.WriteFile("/sys/dev/block/"+numberOf(t, path)+"/queue/iostats", []byte(value), 0))
	}
	count := func() uint64 {
		t.Helper()
		must(t, device.Sync())
		n, _, _ := requestsOf(numberOf(t, path))
		return n
	}
	before := count()
	_, err := device.WriteAt(make([]byte, 4096), 0)
	must(t, err)
	if after := count(); after <= before {
		t.Errorf("got %d requests before a write, and %d after it", before, after)
	}
	if _, _, ok := requestsOf(numberOf(t, path)); !ok {
		t.Error("the requests of a disk are not counted")
	}
	countRequests("0")
	t.Cleanup(func() { countRequests("1") }) // the next test may get the same loop device
	if _, _, ok := requestsOf(numberOf(t, path)); ok {
		t.Error("the requests of a disk without statistics are counted")
	}
	if _, _, ok := requestsOf("unknown"); ok {
		t.Error("the requests of an unknown disk are counted")
	}
}
