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

// stalled is an image on a disk that stops responding at the second fsync(2), which LOOP_CONFIGURE makes.
type stalled struct {
	fs.MemRegularFile
	syncs          atomic.Int32
	reached, until chan struct{}
}

func (s *stalled) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	if s.syncs.Add(1) == 2 {
		close(s.reached)
		<-s.until
	}
	return 0
}

// open mounts a FUSE filesystem with the image, until the test ends.
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

// TestAttachBesideStalledDisk: while LOOP_CONFIGURE waits for the disk of one image, other images are attached, each to
// its own device.
func TestAttachBesideStalledDisk(t *testing.T) {
	testenv.RequireRoot(t)
	s := &stalled{reached: make(chan struct{}), until: make(chan struct{})}
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
		close(s.until)
		t.Logf("the stalled image: %v", <-attached)
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
		t.Errorf("3 images have the devices %v", numbers)
	}
}

// TestRenamedImage grows a device whose image was renamed, while another file has the old name.
func TestRenamedImage(t *testing.T) {
	testenv.RequireRoot(t)
	f := newImage(t, 64*mib)
	l := attach(t, f, blockdev.LoopConfig{SectorSize: 4096, AutoClear: true})
	defer l.Close()
	renamed := f.Name() + ".renamed"
	must(t, os.Rename(f.Name(), renamed))
	must(t, os.WriteFile(f.Name(), nil, 0o600))
	must(t, os.Truncate(renamed, 96*mib))
	for _, size := range []int64{64 * mib, 96 * mib} { // the device is not smaller than 64 MiB
		must(t, blockdev.GrowLoop(l.Number, size))
		if current, err := blockdev.Size(l.File()); current != size || err != nil {
			t.Errorf("the device has %d bytes: %v, want %d", current, err, size)
		}
	}
	bound, err := blockdev.BoundLoops(func(file string) bool { return file == renamed })
	if err != nil || len(bound) != 1 || bound[0] != (blockdev.BoundLoop{Number: l.Number}) {
		t.Errorf("bound to %s: %+v, %v", renamed, bound, err)
	}
}

// TestLoopTags: a read-only device is attached once, is found by other processes, and is freed unless it is mounted.
func TestLoopTags(t *testing.T) {
	testenv.RequireRoot(t)
	const tag = "trivet:tags"
	f := newImage(t, 64*mib)
	testenv.Run(t, "mkfs.ext4", "-q", "-b", "4096", f.Name())
	ours := func(file string) bool { return file == f.Name() }
	t.Cleanup(func() { must(t, blockdev.NewLoopTags(ours).Detach(context.Background(), tag)) })
	tags, late := blockdev.NewLoopTags(ours), blockdev.NewLoopTags(ours)
	if number, ok, err := late.FindKnown(tag); ok || err != nil {
		t.Fatalf("found %d: %v", number, err)
	}
	attached, err := tags.AttachReadOnly(t.Context(), tag, 4096, func() (*os.File, error) { return os.Open(f.Name()) })
	must(t, err)
	device := attached.Node()
	again, err := tags.AttachReadOnly(t.Context(), tag, 4096, func() (*os.File, error) { return nil, os.ErrInvalid })
	if err != nil || again.Node() != device {
		t.Errorf("attached again: %s, %v, want %s", again, err, device)
	}
	if _, ok, err := late.FindKnown(tag); ok || err != nil {
		t.Errorf("found the device of another process: %v", err)
	}
	if number, ok, err := late.Find(tag); blockdev.LoopPath(number) != device || !ok || err != nil {
		t.Errorf("found %d, %t: %v, want %s", number, ok, err, device)
	}
	dir := t.TempDir()
	must(t, syscall.Mount(device, dir, "ext4", syscall.MS_RDONLY, "noload"))
	t.Cleanup(func() { _ = syscall.Unmount(dir, 0) })
	must(t, late.DetachUnmounted(t.Context(), tag))
	if err := late.Detach(t.Context(), tag); !errors.Is(err, blockdev.ErrDeviceMounted) {
		t.Errorf("detaching a mounted device: %v", err)
	}
	must(t, syscall.Unmount(dir, 0))
	must(t, late.DetachUnmounted(t.Context(), tag))
	if _, ok, err := tags.Find(tag); ok || err != nil {
		t.Errorf("the device is still attached: %v", err)
	}
}
