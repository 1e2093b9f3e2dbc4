package sys_test

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
)

// TestNextDataEvicted: NextData finds data behind unwritten blocks that enter and leave the page cache during the call.
func TestNextDataEvicted(t *testing.T) {
	const data, end = 1 << 20, 2 << 20
	for _, fsType := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			f, err := os.Create(filepath.Join(testenv.Filesystem(t, fsType, "512M"), "file"))
			must(t, err)
			defer f.Close()
			must(t, unix.Fallocate(int(f.Fd()), 0, 0, end))
			_, err = f.WriteAt([]byte("data"), data)
			must(t, err)
			must(t, f.Sync())
			stop := keepEvicting(f)
			defer stop()
			for i := range 50000 {
				from, to, err := sys.NextData(f, 0, end)
				must(t, err)
				if from > data || to <= from {
					t.Fatalf("call %d: got the range from %d to %d, want one with data at or before %d", i, from, to, data)
				}
			}
		})
	}
}

// keepEvicting reads the first block of f into the page cache and removes it from there, repeatedly, until stop is
// called.
func keepEvicting(f *os.File) (stop func()) {
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for b := make([]byte, 1); ; {
			select {
			case <-done:
				return
			default:
				_, _ = f.ReadAt(b, 0)
				_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			}
		}
	})
	return func() { close(done); ended.Wait() }
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
