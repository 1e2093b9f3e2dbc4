package mount_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestMakeBeneath: a new directory has its mode from the beginning, independent of the umask, and an existing one
// keeps its mode.
func TestMakeBeneath(t *testing.T) {
	testenv.RequireRoot(t)
	const mode = 0o777 | fs.ModeSetgid | fs.ModeSticky
	path := t.TempDir()
	must(t, os.Chmod(path, mode))
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	for i := range 500 {
		at := filepath.Join(path, strconv.Itoa(i))
		var watching sync.WaitGroup
		watching.Go(func() {
			for {
				info, err := os.Lstat(at)
				if err == nil {
					if info.Mode() != mode|fs.ModeDir {
						t.Errorf("got mode %v during MakeBeneath, want %v", info.Mode(), mode|fs.ModeDir)
					}
					return
				}
			}
		})
		made, err := mount.MakeBeneath(dir, strconv.Itoa(i), mode)
		must(t, err)
		made.Close()
		watching.Wait()
		if t.Failed() {
			return
		}
	}
	must(t, os.Chmod(path, 0o700)) // so that new directories do not inherit set-group-ID
	made, err := mount.MakeBeneath(dir, "other", mode)
	must(t, err)
	defer made.Close()
	if info, err := made.Stat(); err != nil || info.Mode() != mode|fs.ModeDir {
		t.Errorf("new directory: got %v, %v, want mode %v", info, err, mode|fs.ModeDir)
	}
	again, err := mount.MakeBeneath(dir, "other", 0o700)
	must(t, err)
	defer again.Close()
	if info, err := again.Stat(); err != nil || info.Mode() != mode|fs.ModeDir {
		t.Errorf("existing directory: got %v, %v, want unchanged mode %v", info, err, mode|fs.ModeDir)
	}
}
