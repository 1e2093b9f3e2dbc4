package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/luks"
)

// diskOverhead is a size in bytes that is larger than the partition tables of a disk.
const diskOverhead = 4 << 20

// newDiskHost starts a driver with a pool of a disk, which a volume of the kind fits, and of other disks.
func newDiskHost(t *testing.T, k kind, others ...string) *host {
	t.Helper()
	h := &host{binary: crashing, dir: newDir(t), class: map[string]string{"backend": k.Backend()}, size: k.Size()}
	if k.Has(backendtest.Encrypted) {
		h.size += luks.DataOffset
	}
	h.pool = h.path("state/disks/default")
	h.disk, h.diskImage, _ = testenv.Disk(t, h.size+diskOverhead)
	t.Cleanup(func() { _ = os.Remove(h.deviceNode("pvc-1")) })
	h.begin(t, fmt.Sprintf("disks: {match: [%s]}", strings.Join(append(others, h.disk), ", ")), "")
	return h
}

// TestDiskKilledInClone kills the driver when it has copied a disk, but has not committed the new volume. The new disk is wiped.
func TestDiskKilledInClone(t *testing.T) {
	t.Parallel()
	k := disks[0]
	larger, _, _ := testenv.Disk(t, k.Size()+2*diskOverhead) // the source gets the smallest disk
	h := newDiskHost(t, k, larger)
	origin, err := newCO(h, "pvc-1", k)
	must(t, err)
	must(t, origin.do(create, controllerPublish, stage, publish, write))
	must(t, origin.do(unpublishAll...))
	must(t, h.stop())
	must(t, h.start(crashpoint.CreateBuilt))
	c, err := newCO(h, "pvc-2", k)
	must(t, err)
	c.cloned = origin.id
	row{call: create, point: crashpoint.CreateBuilt}.reach(t, c)
	must(t, h.start(""))
	origin.finish(t)
	must(t, wantBlank(larger))
}

// deviceNode returns the path of the device node that a volume has while it is attached. It is empty if
// the pool does not exist yet.
func (h *host) deviceNode(name string) string {
	uuid, err := testenv.PoolUUID(h.pool)
	if err != nil {
		return ""
	}
	return blockdev.NodePath(h.poolName() + "." + uuid[:8] + "." + name)
}

// checkDisk compares the disk and its mounts with the expected state.
func (c *co) checkDisk() error {
	err := c.checkDevice()
	if c.created {
		err = errors.Join(err, c.host.checkMark())
	}
	return err
}

// checkMark fails unless the disk has the complete mark of the driver.
func (h *host) checkMark() error {
	found, err := blockdev.FindDisks([]string{h.disk})
	if err != nil {
		return err
	}
	if m, err := found[0].Mark(); err != nil || !m.Complete || m.Damaged {
		return fmt.Errorf("got mark %+v and error %w on the disk of %d bytes, want a complete and undamaged mark", m, err, found[0].Size)
	}
	return nil
}

// checkDeviceSize fails unless the device has the recorded size and the filesystem fills it.
func (c *co) checkDeviceSize(node string) error {
	recorded, err := c.capacity()
	if err != nil {
		return err
	}
	f, err := os.Open(node)
	if err != nil {
		return err
	}
	defer f.Close()
	if size, err := blockdev.Size(f); err != nil || size != recorded {
		return fmt.Errorf("got %d bytes and error %w for %s, want %d bytes", size, err, node, recorded)
	}
	have, err := filesystemSize(c.staging())
	const overhead = 80 << 20 // bytes of the filesystem's metadata, mostly its log
	if err == nil && have < recorded-overhead {
		err = fmt.Errorf("got a filesystem of %d bytes, want at least %d", have, recorded-overhead)
	}
	return err
}

// enlarge grows the disk to the size that an expanded volume needs.
func (h *host) enlarge() error {
	size := h.size + growth + diskOverhead
	if err := os.Truncate(h.diskImage, size); err != nil {
		return err
	}
	h.room = blockdev.Room(size, 512) // 512 is the sector size in bytes
	if out, err := exec.Command("losetup", "-c", h.disk).CombinedOutput(); err != nil {
		return fmt.Errorf("losetup -c: %w: %s", err, out)
	}
	return nil
}

// wantBlank fails if a disk has a mark or data.
func wantBlank(disk string) error {
	found, err := blockdev.FindDisks([]string{disk})
	if err != nil {
		return err
	}
	if f := found[0].Inspect(); f.Reason != blockdev.DiskFree {
		return fmt.Errorf("got state %s of %s (%s), want %s", f.Reason, filepath.Base(disk), f.Detail, blockdev.DiskFree)
	}
	return nil
}
