//go:build vm

package local_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
)

// TestRealDisks is TestDisks for disks of other drivers, which the virtual machine has;
// its kernel reads partition tables by itself.
func TestRealDisks(t *testing.T) {
	const pool = backendtest.DiskPool
	for name, glob := range map[string]string{"nvme": "/dev/nvme?n1", "scsi": "/dev/sd?", "virtio": "/dev/vd[b-z]"} {
		t.Run(name, func(t *testing.T) {
			target := backendtest.Target{
				New:   local.New,
				Disks: func(tb testing.TB) []string { tb.Helper(); return []string{glob} },
				Kinds: []backendtest.Kind{{FSType: "ext4", Pool: pool}, {FSType: "xfs", Pool: pool}, {Pool: pool}},
			}
			if name == "scsi" {
				target.Pull = pullSCSI
			}
			backendtest.Run(t, target)
		})
	}
}

// pullSCSI takes a SCSI disk away, and brings it back.
func pullSCSI(tb testing.TB, disk string) (back func()) {
	tb.Helper()
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0); err != nil {
			tb.Error(err)
		}
	}
	device, err := filepath.EvalSymlinks("/sys/block/" + disk + "/device")
	if err != nil {
		tb.Fatal(err)
	}
	host := strings.Split(filepath.Base(device), ":")[0]
	write(device+"/delete", "1")
	return func() { write("/sys/class/scsi_host/host"+host+"/scan", "- - -") }
}
