package blockdev_test

import (
	"context"
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

// stalled is an image on a disk that stops answering at its second fsync(2), the one of
// LOOP_CONFIGURE.
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The kernel frees the loop device a moment after its last close.
		err := retry.For(context.Background(), 5*time.Second, func() (bool, error) { return true, server.Unmount() })
		if err != nil {
			t.Error(err)
		}
	})
	f, err := os.OpenFile(filepath.Join(dir, "image"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestAttachBesideStalledDisk attaches other images while LOOP_CONFIGURE waits for the disk
// of one, each to a device of its own.
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
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // far more than it takes
	defer cancel()
	numbers := map[int]bool{}
	for range 3 {
		l, err := blockdev.AttachLoop(ctx, newImage(t, mib), config)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		numbers[l.Number] = true
	}
	if len(numbers) != 3 {
		t.Errorf("3 images have the devices %v", numbers)
	}
}
