//go:build vm

package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// powerRows contains the moments at which the power fails. The volume is not staged.
var powerRows = slices.Concat(
	at(row{call: create, kinds: groupXFS}, crashpoint.CreateImage, crashpoint.CreateBuilt, crashpoint.CreateDone),
	at(row{call: expand, kinds: groupXFS, used: true}, crashpoint.GrowImage),
	at(row{call: expand, kinds: groupRaw, used: true}, crashpoint.GrowFreed),
)

// TestGroupPower cuts the power at crash points: no write of the page cache reaches the physical volume after the driver
// was killed. A new driver finds the complete volume with its data, or none, and leaves nothing behind.
func TestGroupPower(t *testing.T) {
	for _, r := range powerRows {
		k := r.kinds[0]
		t.Run(r.name(k), func(t *testing.T) {
			disk := newFailingDisk(t)
			h := newHostWithGroup(t, k, &lvm.Group{VolumeGroup: disk.group})
			c := r.crash(t, h, k)
			disk.cutPower(t, h)
			must(t, h.start(""))
			must(t, c.do(r.call))
			c.finish(t)
		})
	}
}

// failingDisk is a disk that can lose all writes, with a volume group on it.
type failingDisk struct {
	name, group string // of the mapped device, and of the volume group
	disk        string
	sectors     string
}

// newFailingDisk creates a volume group on the last disk of the virtual machine.
func newFailingDisk(t *testing.T) *failingDisk {
	t.Helper()
	disks, err := filepath.Glob("/dev/vd[b-z]")
	if err != nil || len(disks) == 0 {
		t.Fatalf("got disks %q, %v, want at least one for a volume group", disks, err)
	}
	d := &failingDisk{name: "failing", group: "vg-power", disk: disks[len(disks)-1]}
	d.sectors = strings.TrimSpace(testenv.Run(t, "blockdev", "--getsz", d.disk))
	testenv.Run(t, "dmsetup", "create", d.name, "--table", d.table("linear", ""))
	t.Cleanup(func() { testenv.Run(t, "dmsetup", "remove", "--retry", d.name) })
	d.lvm(t, "vgcreate", "--yes", d.group, d.device())
	t.Cleanup(func() {
		d.lvm(t, "vgremove", "-ff", "--yes", d.group)
		d.lvm(t, "pvremove", "-ff", "--yes", d.device())
	})
	return d
}

func (d *failingDisk) device() string { return "/dev/mapper/" + d.name }

// lvm runs lvm(8), which must not find the physical volume a second time on the disk below.
func (d *failingDisk) lvm(t *testing.T, command string, args ...string) {
	t.Helper()
	filter := fmt.Sprintf(`devices{global_filter=["a|^%s$|","r|.*|"]}`, d.device())
	testenv.Run(t, "lvm", append([]string{command, "--config", filter}, args...)...)
}

// table returns a table for the mapped device.
func (d *failingDisk) table(target, options string) string {
	return fmt.Sprintf("0 %s %s %s 0%s", d.sectors, target, d.disk, options)
}

// replace replaces the table without writing back the page cache.
func (d *failingDisk) replace(t *testing.T, table string) {
	t.Helper()
	testenv.Run(t, "dmsetup", "suspend", "--nolockfs", d.name)
	testenv.Run(t, "dmsetup", "load", d.name, "--table", table)
	testenv.Run(t, "dmsetup", "resume", d.name)
}

// cutPower drops all writes from now on, removes what a reboot removes, and then makes the disk work again.
func (d *failingDisk) cutPower(t *testing.T, h *host) {
	t.Helper()
	d.replace(t, d.table("flakey", " 0 86400 1 drop_writes"))
	h.kill()
	must(t, clearLeftovers(h.dir, h.pool))
	d.lvm(t, "vgchange", "-an", d.group)
	must(t, os.RemoveAll(filepath.Dir(blockdev.NodePath("x"))))
	for _, device := range []string{d.device(), d.disk} {
		testenv.Run(t, "blockdev", "--flushbufs", device)
	}
	must(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0))
	d.replace(t, d.table("linear", ""))
	out, err := exec.Command("dmsetup", "ls").Output()
	if names := string(out); err != nil || strings.Contains(names, "vg--power") {
		t.Fatal(errors.Join(err, fmt.Errorf("got mapped devices %q after the power failure, want no logical volumes", names)))
	}
}
