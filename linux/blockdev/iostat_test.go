package blockdev_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/linux/blockdev"
)

// TestIOStat: the counters of a device are read by its path and by a link to it, which disks.match may contain.
func TestIOStat(t *testing.T) {
	d, _ := newDisk(t)
	must(t, os.WriteFile(d.Path, make([]byte, 1<<20), 0o600))
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(d.Path, link))
	for _, path := range []string{d.Path, link} {
		if s, err := blockdev.ReadIOStat(path); err != nil || s.WrittenBytes < 1<<20 {
			t.Errorf("%s: got %+v, %v, want at least 1 MiB written", path, s, err)
		}
	}
}
