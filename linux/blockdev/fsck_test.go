package blockdev_test

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// TestCheckCopyOfBtrfs: the checksums of data are verified.
func TestCheckCopyOfBtrfs(t *testing.T) {
	testenv.RequireRoot(t)
	f := newFilesystem(t, "btrfs", 200*mib)
	dir, unmount := mountImage(t, "btrfs", f.Name())
	data := make([]byte, mib)
	_, _ = rand.Read(data)
	writeSynced(t, filepath.Join(dir, "data"), data)
	unmount()
	check := func(image *os.File) string {
		t.Helper()
		device := attach(t, image, blockdev.LoopConfig{SectorSize: 4096, AutoClear: true})
		defer device.Close()
		found, err := blockdev.CheckCopy(t.Context(), device.File(), "btrfs", nil)
		must(t, err)
		return found
	}
	if found := check(copyImage(t, f.Name())); found != "" {
		t.Errorf("got %q, want no errors", found)
	}
	damaged := copyImage(t, f.Name())
	all, err := os.ReadFile(damaged.Name())
	must(t, err)
	_, err = damaged.WriteAt([]byte{data[0] + 1}, int64(bytes.Index(all, data[:4096])))
	must(t, err)
	if found := check(damaged); !strings.Contains(found, "expected csum") {
		t.Errorf("got %q, want the expected checksum of a block", found)
	}
	superblock := copyImage(t, f.Name())
	_, err = superblock.WriteAt([]byte{all[65536] + 1}, 65536)
	must(t, err)
	if found := check(superblock); !strings.Contains(found, "no superblock") {
		t.Errorf("got %q of a damaged superblock, want that it is not valid", found)
	}
}
