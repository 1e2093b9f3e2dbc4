package csi

import (
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestMountpoints: a call returns no mount table from before the call, although concurrent calls share
// readings.
func TestMountpoints(t *testing.T) {
	testenv.RequireRoot(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var s mountTable
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			path := filepath.Join(dir, strconv.Itoa(i))
			if err := unix.Mkdir(path, 0o700); err != nil {
				t.Error(err)
				return
			}
			for range 25 {
				if err := unix.Mount("memory", path, "tmpfs", 0, ""); err != nil {
					t.Error(err)
					return
				}
				before, err := s.mounted(path)
				if err := unix.Unmount(path, 0); err != nil {
					t.Error(err)
					return
				}
				after, errAfter := s.mounted(path)
				if !before || after || err != nil || errAfter != nil {
					t.Errorf("got mounted %v, %v after mount, want true; got mounted %v, %v after unmount, want false", before, err, after, errAfter)
				}
			}
		})
	}
	all.Wait()
}
