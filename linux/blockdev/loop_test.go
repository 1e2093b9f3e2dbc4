package blockdev_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// stalled is an image on a filesystem that stops responding at the first fsync(2), which LOOP_CONFIGURE
// makes. The filesystem closes reached when it stops responding, and continues when resume is closed.
type stalled struct {
	fs.MemRegularFile
	syncs           atomic.Int32
	reached, resume chan struct{}
}

// Fsync implements fs.NodeFsyncer.
func (s *stalled) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	if s.syncs.Add(1) == 1 {
		close(s.reached)
		<-s.resume
	}
	return 0
}

// open mounts a FUSE filesystem that contains the image, and opens the image. The filesystem is unmounted at the end
// of the test.
func (s *stalled) open(t *testing.T) *os.File {
	t.Helper()
	s.Data, s.Attr.Mode = make([]byte, mib), 0o600
	dir, root := t.TempDir(), &fs.Inode{}
	server, err := fs.Mount(dir, root, &fs.Options{
		MountOptions: fuse.MountOptions{DirectMountStrict: true},
		OnAdd: func(ctx context.Context) {
			root.AddChild("image", root.NewPersistentInode(ctx, s, fs.StableAttr{Mode: syscall.S_IFREG}), true)
		},
	})
	must(t, err)
	t.Cleanup(func() {
		// The kernel frees the loop device a short time after its last close.
		must(t, retry.For(context.Background(), 5*time.Second, func() (bool, error) { return true, server.Unmount() }))
	})
	f, err := os.OpenFile(filepath.Join(dir, "image"), os.O_RDWR, 0)
	must(t, err)
	return f
}

// TestAttachBesideStalledDisk: while LOOP_CONFIGURE waits for the filesystem of one image, other images are
// attached, each to its own device.
func TestAttachBesideStalledDisk(t *testing.T) {
	testenv.RequireRoot(t)
	s := &stalled{reached: make(chan struct{}), resume: make(chan struct{})}
	image := s.open(t)
	config := blockdev.LoopConfig{SectorSize: 4096, AutoClear: true}
	attached := make(chan error)
	go func() {
		l, err := blockdev.AttachLoop(context.Background(), image, config)
		if err == nil {
			err = l.Close()
		}
		attached <- err
	}()
	defer func() {
		close(s.resume)
		t.Logf("attaching the stalled image: %v", <-attached)
		_ = image.Close()
	}()
	<-s.reached
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // much longer than necessary
	defer cancel()
	numbers := map[int]bool{}
	for range 3 {
		l, err := blockdev.AttachLoop(ctx, newImage(t, mib), config)
		must(t, err)
		defer l.Close()
		numbers[l.Number] = true
	}
	if len(numbers) != 3 {
		t.Errorf("got devices %v for 3 images, want 3 different ones", numbers)
	}
}

// TestRenamedImage: GrowLoop grows a device whose image was renamed, even if another file has the old name.
func TestRenamedImage(t *testing.T) {
	testenv.RequireRoot(t)
	f := newImage(t, 64*mib)
	l := attach(t, f, blockdev.LoopConfig{SectorSize: 4096, AutoClear: true})
	defer l.Close()
	renamed := f.Name() + ".renamed"
	must(t, os.Rename(f.Name(), renamed))
	must(t, os.WriteFile(f.Name(), nil, 0o600))
	must(t, os.Truncate(renamed, 96*mib))
	for _, size := range []int64{64 * mib, 96 * mib} { // the first call does nothing, because the device has 64 MiB
		must(t, blockdev.GrowLoop(l.Number, size))
		if current, err := blockdev.Size(l.File()); current != size || err != nil {
			t.Errorf("GrowLoop: got a device of %d bytes, %v, want %d", current, err, size)
		}
	}
	bound, err := blockdev.BoundLoops(func(file string) bool { return file == renamed })
	if err != nil || len(bound) != 1 || bound[0] != (blockdev.BoundLoop{Number: l.Number}) {
		t.Errorf("devices of %s: got %+v, %v, want device %d", renamed, bound, err, l.Number)
	}
}

// TestLoopTags: AttachReadOnly attaches a device once, and other processes find the device and detach it
// unless it is mounted. otherProcess represents another process.
func TestLoopTags(t *testing.T) {
	testenv.RequireRoot(t)
	const tag = "trivet:tags"
	f := newImage(t, 64*mib)
	testenv.Run(t, "mkfs.ext4", "-q", "-b", "4096", f.Name())
	ours := func(file string) bool { return file == f.Name() }
	t.Cleanup(func() { must(t, blockdev.NewLoopTags(ours).Detach(context.Background(), tag)) })
	tags, otherProcess := blockdev.NewLoopTags(ours), blockdev.NewLoopTags(ours)
	if number, ok, err := otherProcess.FindKnown(tag); ok || err != nil {
		t.Fatalf("FindKnown before the device is attached: got device %d, %v, want none", number, err)
	}
	attached, err := tags.AttachReadOnly(t.Context(), tag, 4096, func() (*os.File, error) { return os.Open(f.Name()) })
	must(t, err)
	device := attached.Node()
	again, err := tags.AttachReadOnly(t.Context(), tag, 4096, func() (*os.File, error) { return nil, os.ErrInvalid })
	if err != nil || again.Node() != device {
		t.Errorf("second AttachReadOnly: got %s, %v, want %s", again, err, device)
	}
	if _, ok, err := otherProcess.FindKnown(tag); ok || err != nil {
		t.Errorf("FindKnown in the other process: got the device, %v, want none because it does not scan again", err)
	}
	began := time.Now()
	if number, ok, err := otherProcess.Find(tag); blockdev.LoopPath(number) != device || !ok || err != nil {
		t.Errorf("Find in the other process: got device %d, %t, %v, want %s", number, ok, err, device)
	}
	dir := t.TempDir()
	must(t, syscall.Mount(device, dir, "ext4", syscall.MS_RDONLY, "noload"))
	t.Cleanup(func() { _ = syscall.Unmount(dir, 0) })
	must(t, otherProcess.DetachUnmounted(t.Context(), tag))
	if err := otherProcess.Detach(t.Context(), tag); !errors.Is(err, blockdev.ErrDeviceMounted) {
		t.Errorf("detaching a mounted device: got %v, want %v", err, blockdev.ErrDeviceMounted)
	}
	must(t, syscall.Unmount(dir, 0))
	must(t, otherProcess.DetachUnmounted(t.Context(), tag))
	if _, ok, err := tags.Find(tag); ok || err != nil {
		t.Errorf("Find after the device was detached: got %t, %v, want false", ok, err)
	}
	// Another image gets the same device, so that the cached device of the tag has another tag.
	other := newImage(t, 64*mib)
	reused, err := blockdev.AttachLoop(t.Context(), other, blockdev.LoopConfig{SectorSize: 4096, Tag: "trivet:other", AutoClear: true})
	must(t, err)
	defer reused.Close()
	_, err = tags.AttachReadOnly(t.Context(), tag, 4096, func() (*os.File, error) { return os.Open(f.Name()) })
	must(t, err)
	if _, ok, err := otherProcess.FindSince(tag, began); !ok || err != nil {
		t.Errorf("FindSince with a cached device that has another tag now: got %t, %v, want true", ok, err)
	}
	otherProcess.Forget(tag)
	if _, ok, err := otherProcess.FindSince(tag, began); ok || err != nil {
		t.Errorf("FindSince an earlier time than that of the last scan: got %t, %v, want false, because it does not scan again", ok, err)
	}
	if _, ok, err := otherProcess.FindSince(tag, time.Now()); !ok || err != nil {
		t.Errorf("FindSince a later time than that of the last scan: got %t, %v, want true", ok, err)
	}
}
