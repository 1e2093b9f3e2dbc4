package blockdev

import (
	"errors"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestReplaced: a Disk does not open another disk that has got its device number, also on kernels without sequence
// numbers.
func TestReplaced(t *testing.T) {
	for name, before := range map[string]func(*Disk){
		"by its sequence number": func(*Disk) {},
		"before Linux 5.15":      func(d *Disk) { d.seq = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			found := replacedDisk(t)
			before(&found)
			if c, err := found.Claim(t.Context()); !errors.Is(err, ErrDiskGone) {
				t.Errorf("claimed %+v: %v", c, err)
			}
			if _, err := found.Mark(); !errors.Is(err, ErrDiskGone) {
				t.Errorf("read: %v", err)
			}
		})
	}
}

// replacedDisk returns a Disk whose device number belongs to another disk now.
func replacedDisk(t *testing.T) Disk {
	t.Helper()
	for {
		device, image, pull := testenv.Disk(t, 16*mib)
		disks, err := FindDisks([]string{device})
		if err != nil || len(disks) != 1 {
			t.Fatal(disks, err)
		}
		pull()
		if err := os.WriteFile(image+"-2", make([]byte, 16*mib), 0o600); err != nil {
			t.Fatal(err)
		}
		if testenv.PlugIn(t, image+"-2") == device {
			return disks[0]
		}
		// Another program uses the device: try the next one.
	}
}
