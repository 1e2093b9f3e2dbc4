package blockdev_test

import (
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// TestHasFilesystem: a device has a filesystem only if it has its signature, and no signature of another format.
func TestHasFilesystem(t *testing.T) {
	type want struct {
		ok    bool
		found string
	}
	check := func(what, fsType, path string, want want) {
		t.Helper()
		ok, found, err := blockdev.HasFilesystem(copyImage(t, path), fsType)
		if err != nil || ok != want.ok || found != want.found {
			t.Errorf("%s: got %t, %q, %v, want %+v", what, ok, found, err, want)
		}
	}
	for fsType, name := range map[string]string{"ext4": "an ext2, ext3 or ext4", "xfs": "an xfs", "btrfs": "a btrfs"} {
		f := newImage(t, 400*mib)
		check("a blank image", fsType, f.Name(), want{})
		testenv.Run(t, "mkfs."+fsType, "-q", f.Name())
		for _, other := range []string{"ext4", "xfs", "btrfs"} {
			check(fsType+" as "+other, other, f.Name(), want{other == fsType, name})
		}
		_, err := f.WriteAt([]byte("\xfc\x4e\x2b\xa9"), 400*mib-65536) // the superblock of a RAID
		must(t, err)
		check("a RAID with "+fsType, fsType, f.Name(), want{false, "a member of an md RAID and " + name})
	}
}
