package blockdev

import (
	"errors"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestReplaced: a Disk does not open another disk that has its device number now, even on kernels without
// sequence numbers.
func TestReplaced(t *testing.T) {
	for name, prepare := range map[string]func(*Disk){
		"with sequence numbers":    func(*Disk) {},
		"without sequence numbers": func(d *Disk) { d.seq = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			found := replacedDisk(t)
			prepare(&found)
			if c, err := found.Claim(t.Context()); !errors.Is(err, ErrDiskGone) {
				t.Errorf("Claim: got %+v, %v, want %v", c, err, ErrDiskGone)
			}
			if _, err := found.Mark(); !errors.Is(err, ErrDiskGone) {
				t.Errorf("Mark: got %v, want %v", err, ErrDiskGone)
			}
		})
	}
}

// replacedDisk returns a Disk that was removed and whose device number another disk has now.
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
