package blockdev_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// newImage creates an image without data.
func newImage(tb testing.TB, size int64) *os.File {
	tb.Helper()
	f, err := os.Create(filepath.Join(tb.TempDir(), "image"))
	must(tb, err)
	tb.Cleanup(func() { must(tb, f.Close()) })
	must(tb, f.Truncate(size))
	return f
}

// newFilesystem creates a filesystem on a new image.
func newFilesystem(t *testing.T, fsType string, size int64, options ...string) *os.File {
	t.Helper()
	f := newImage(t, size)
	spec := blockdev.FormatSpec{FSType: fsType, SectorSize: 4096, Options: options}
	must(t, blockdev.NewFormatter().Format(t.Context(), f, spec))
	return f
}

const mib, gib = int64(1) << 20, int64(1) << 30

// field returns the rest of the line after name.
func field(t *testing.T, text, name string) string {
	t.Helper()
	_, rest, ok := strings.Cut(text, name)
	if !ok {
		t.Fatalf("%q is missing in %s", name, text)
	}
	value, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(value)
}

// TestFormatLarge: for devices that are too large for a template, mkfs creates the same filesystem.
func TestFormatLarge(t *testing.T) {
	f := newFilesystem(t, "ext4", 17*gib, "-m", "1")
	info := testenv.Run(t, "dumpe2fs", "-h", f.Name())
	if field(t, info, "Block size:") != "4096" || field(t, info, "Reserved block count:") == "0" {
		t.Errorf("got %s, want blocks of 4096 bytes and reserved blocks", info)
	}
}

// TestFormatBesideLostDevice: Format does not fail if the mount table contains a loop device that is not
// bound, as when another process has just detached it.
func TestFormatBesideLostDevice(t *testing.T) {
	testenv.RequireRoot(t)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(t, err)
	t.Cleanup(func() { must(t, control.Close()) })
	number := 256 // mkfs.btrfs accepts a smaller number as a loop device
	for err = unix.EEXIST; errors.Is(err, unix.EEXIST); {
		number--
		err = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number)
	}
	must(t, err)
	t.Cleanup(func() { must(t, unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)) })
	dir := t.TempDir()
	must(t, unix.Mount(blockdev.LoopPath(number), dir, "tmpfs", 0, ""))
	unmount := sync.OnceValue(func() error { return unix.Unmount(dir, 0) })
	t.Cleanup(func() { must(t, unmount()) })
	const mountedFor = 300 * time.Millisecond
	began := time.Now()
	time.AfterFunc(mountedFor, func() { _ = unmount() })

	newFilesystem(t, "btrfs", 128*mib)
	if time.Since(began) < mountedFor {
		t.Error("setup: mkfs.btrfs did not fail because of the device")
	}
}

// TestFormatStale: old data on a device does not become part of the filesystem.
func TestFormatStale(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			f := newImage(t, 400*mib)
			_, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 300<<20), 16*mib)
			must(t, err)
			must(t, blockdev.EraseIncomplete(f))
			must(t, blockdev.RequireNoSignature(f))
			must(t, blockdev.NewFormatter().Format(t.Context(), f, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096, Stale: true}))
			dir := t.TempDir()
			testenv.Run(t, "mount", "-o", "loop", f.Name(), dir)
			t.Cleanup(func() { testenv.Run(t, "umount", dir) })
			for i := range 2000 {
				must(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), bytes.Repeat([]byte{1}, 5000), 0o644))
			}
			testenv.Run(t, "umount", dir)
			must(t, testenv.Fsck(fsType, f.Name()))
			testenv.Run(t, "mount", "-o", "loop", f.Name(), dir)
		})
	}
}

// TestFormatOptions: the options of mkfs take effect.
func TestFormatOptions(t *testing.T) {
	f := newFilesystem(t, "ext4", gib, "-N", "1024")
	if got := field(t, testenv.Run(t, "dumpe2fs", "-h", f.Name()), "Inode count:"); got != "1024" {
		t.Errorf("got %s inodes, want 1024", got)
	}
}

// TestCheckOptions: only options that fit the filesystem and its size, and name no other file, are accepted.
func TestCheckOptions(t *testing.T) {
	for _, tc := range []struct {
		fsType, words string
		ok            bool
	}{
		{"ext4", "", true},
		{"ext4", "-i 8192 -m 2.5", true},
		{"xfs", "-i size=512 -m reflink=0", true},
		{"btrfs", "-m single -n 16384", true},
		{"ext4", "-i 0001", false},
		{"ext4", "-i 99999999", false},
		{"ext4", "-N 1048576", true},
		{"ext4", "-N 1048577", false},
		{"", "-i 8192", false}, // a raw device
		{"ext4", "-b 1024", false},
		{"ext4", "-J device=/dev/sda1", false},
		{"ext4", "-E discard", false},
		{"ext4", "-m", false},
		{"ext4", "-m 100", false},
		{"ext4", "-i 8192; rm", false},
		{"xfs", "-d file=1,name=/etc/passwd", false},
		{"xfs", "-i size=512,maxpct=1", false},
		{"btrfs", "-r /etc", false},
		{"btrfs", "-m single /dev/sda x", false},
	} {
		if err := blockdev.CheckOptions(tc.fsType, strings.Fields(tc.words), gib); (err == nil) != tc.ok {
			t.Errorf("%s %q: got %v, want valid %t", tc.fsType, tc.words, err, tc.ok)
		}
	}
}

// TestRequireBlank: holes, zeros and unwritten blocks are blank. The error for any other content contains its offset.
func TestRequireBlank(t *testing.T) {
	f := newImage(t, gib)
	must(t, blockdev.RequireBlank(f))
	_, err := f.WriteAt(make([]byte, mib), 7*mib)
	must(t, err)
	must(t, blockdev.RequireBlank(f))
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, gib))
	must(t, blockdev.RequireBlank(f))
	for _, at := range []int64{0, 7*mib + 3, gib - 1} {
		_, err := f.WriteAt([]byte{0xff}, at)
		must(t, err)
		if err := blockdev.RequireBlank(f); !errors.Is(err, blockdev.ErrNotBlank) || !strings.Contains(err.Error(), "byte "+strconv.FormatInt(at, 10)) {
			t.Errorf("an image with data at byte %d: got %v, want %v", at, err, blockdev.ErrNotBlank)
		}
		_, err = f.WriteAt([]byte{0}, at)
		must(t, err)
	}
	closed, err := os.Open(f.Name())
	must(t, err)
	must(t, closed.Close())
	if err := blockdev.RequireBlank(closed); err == nil || errors.Is(err, blockdev.ErrNotBlank) {
		t.Errorf("a file that cannot be read: got %v, want another error than %v", err, blockdev.ErrNotBlank)
	}
}

// TestWipe: WipeImage removes the content of an image, and keeps its blocks allocated only if requested.
func TestWipe(t *testing.T) {
	for _, keep := range []bool{false, true} {
		f := newImage(t, 64*mib)
		must(t, blockdev.Resize(f, 64*mib, keep))
		_, err := f.WriteAt([]byte("something"), 5*mib)
		must(t, err)
		must(t, blockdev.WipeImage(f, keep))
		must(t, blockdev.RequireBlank(f))
		var st unix.Stat_t
		must(t, unix.Fstat(int(f.Fd()), &st))
		if allocated := st.Blocks * 512; (allocated >= 64*mib) != keep || st.Size != 64*mib {
			t.Errorf("keepAllocated %t: got %d bytes allocated of %d, want all of %d only if keepAllocated is set", keep, allocated, st.Size, 64*mib)
		}
	}
}

// discardLimit returns discard_max_bytes of a loop device, which is 0 if discards are disabled.
func discardLimit(t *testing.T, l *blockdev.Loop) string {
	t.Helper()
	b, err := os.ReadFile("/sys/block/loop" + strconv.Itoa(l.Number) + "/queue/discard_max_bytes")
	must(t, err)
	return strings.TrimSpace(string(b))
}

// attach binds an image to a loop device.
func attach(t *testing.T, f *os.File, c blockdev.LoopConfig) *blockdev.Loop {
	t.Helper()
	l, err := blockdev.AttachLoop(t.Context(), f, c)
	must(t, err)
	return l
}

// TestLoop: a loop device has the requested configuration, grows with its image, and keeps the lock on the image
// until it is detached.
func TestLoop(t *testing.T) {
	testenv.RequireRoot(t)
	f := newImage(t, 64*mib)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	l := attach(t, f, blockdev.LoopConfig{SectorSize: 512, Tag: "trivet:test"})
	status, err := l.Status()
	if err != nil || status.Tag != "trivet:test" || !status.DirectIO || status.ReadOnly || status.AutoClear {
		t.Errorf("got status %+v, %v, want the tag, direct I/O and no other flag", status, err)
	}
	must(t, f.Truncate(96*mib))
	must(t, blockdev.GrowLoop(l.Number, 96*mib))
	if size, err := blockdev.Size(l.File()); size != 96*mib || err != nil {
		t.Errorf("the device after GrowLoop: got %d bytes, %v, want %d", size, err, 96*mib)
	}
	if size, err := os.ReadFile("/sys/block/loop" + strconv.Itoa(l.Number) + "/queue/logical_block_size"); strings.TrimSpace(string(size)) != "512" || err != nil {
		t.Errorf("got sector size %s, %v, want 512", size, err)
	}
	must(t, blockdev.Probe(l.Number))
	// The device keeps the lock until it is detached.
	other, err := os.OpenFile(f.Name(), os.O_RDWR, 0)
	must(t, err)
	defer other.Close()
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("locking an attached image again: got %v, want EWOULDBLOCK", err)
	}
	number := l.Number
	must(t, l.Close())
	must(t, blockdev.DetachLoop(t.Context(), number, "trivet:test"))
	if blockdev.Bound(number) {
		t.Error("the detached device is still bound")
	}
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_UN))
	must(t, unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	if tag, err := blockdev.LoopTag(number); tag == "trivet:test" {
		t.Errorf("LoopTag of the detached device: got %q, %v, want no tag", tag, err)
	}
}

// TestAutoClear: a device with AutoClear is freed when it is closed.
func TestAutoClear(t *testing.T) {
	testenv.RequireRoot(t)
	l := attach(t, newImage(t, 64*mib), blockdev.LoopConfig{SectorSize: 4096, Tag: "trivet:auto", AutoClear: true})
	seq := blockdev.DiskSeq(l.Number)
	must(t, l.Close())
	must(t, blockdev.AwaitFree(t.Context(), l.Number, seq))
}

// TestDetachInUse: DetachLoop does not change a device that a process has open.
func TestDetachInUse(t *testing.T) {
	testenv.RequireRoot(t)
	const tag = "trivet:used"
	user := attach(t, newImage(t, 64*mib), blockdev.LoopConfig{SectorSize: 4096, Tag: tag})
	if err := blockdev.DetachLoop(t.Context(), user.Number, tag); !errors.Is(err, blockdev.ErrDeviceBusy) {
		t.Errorf("detaching an open device: got %v, want %v", err, blockdev.ErrDeviceBusy)
	}
	if status, err := user.Status(); err != nil || status.AutoClear || status.Tag != tag {
		t.Errorf("the device after the failed DetachLoop: got %+v, %v, want it unchanged", status, err)
	}
	must(t, blockdev.DetachLoop(t.Context(), user.Number, "trivet:another"))
	if !blockdev.Bound(user.Number) {
		t.Error("DetachLoop freed a device with another tag")
	}
	must(t, user.Close())
	must(t, blockdev.DetachLoop(t.Context(), user.Number, tag))
	if blockdev.Bound(user.Number) {
		t.Error("the device is still bound after DetachLoop")
	}
	must(t, blockdev.DetachLoop(t.Context(), user.Number, tag))
}

// TestDiscardsEnabled: an image without KeepAllocated never gets a device whose discards were disabled for
// another image.
func TestDiscardsEnabled(t *testing.T) {
	testenv.RequireRoot(t)
	limit := func(keep bool) string {
		l := attach(t, newImage(t, 64*mib), blockdev.LoopConfig{SectorSize: 4096, Tag: "trivet:discard", KeepAllocated: keep})
		limit := discardLimit(t, l)
		must(t, l.Close())
		must(t, blockdev.DetachLoop(t.Context(), l.Number, "trivet:discard"))
		return limit
	}
	for range 3 {
		if got := limit(true); got != "0" {
			t.Errorf("KeepAllocated: got discard_max_bytes %s, want 0", got)
		}
		if got := limit(false); got == "0" {
			t.Error("without KeepAllocated: got discard_max_bytes 0, want more")
		}
	}
}

// TestRecover: RecoverLoop completes an interrupted AttachLoop, and does not change a device with another tag.
func TestRecover(t *testing.T) {
	testenv.RequireRoot(t)
	const tag = "trivet:recover"
	l := attach(t, newImage(t, 64*mib), blockdev.LoopConfig{SectorSize: 4096, Tag: tag, AutoClear: true})
	if ok, err := blockdev.RecoverLoop(l.Number, "trivet:another", true); ok || err != nil {
		t.Errorf("RecoverLoop with another tag: got %t, %v, want false", ok, err)
	}
	if status, err := l.Status(); err != nil || !status.AutoClear {
		t.Errorf("RecoverLoop with another tag changed the device: got %+v, %v, want AutoClear", status, err)
	}
	if ok, err := blockdev.RecoverLoop(l.Number, tag, true); !ok || err != nil {
		t.Errorf("RecoverLoop with the tag of the device: got %t, %v, want true", ok, err)
	}
	must(t, l.Close())
	if limit := discardLimit(t, l); !blockdev.Bound(l.Number) || limit != "0" {
		t.Errorf("the recovered device after Close: got bound %t, discard_max_bytes %s, want true and 0", blockdev.Bound(l.Number), limit)
	}
	must(t, blockdev.DetachLoop(t.Context(), l.Number, tag))
	if ok, err := blockdev.RecoverLoop(l.Number, tag, false); ok || err != nil {
		t.Errorf("RecoverLoop of a free device: got %t, %v, want false", ok, err)
	}
}

// TestLongTag: AttachLoop refuses a tag that the kernel would truncate.
func TestLongTag(t *testing.T) {
	if _, err := blockdev.AttachLoop(t.Context(), newImage(t, mib), blockdev.LoopConfig{SectorSize: 4096, Tag: strings.Repeat("x", 64)}); err == nil {
		t.Error("AttachLoop with a tag of 64 bytes: got no error, want one")
	}
}
