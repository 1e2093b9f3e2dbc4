package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// diskOverhead is more than the partition tables of a disk take, in bytes.
const diskOverhead = 4 << 20

// newDiskHost starts a driver with a pool of one disk.
func newDiskHost(t *testing.T, k kind, armed crashpoint.Point) *host {
	t.Helper()
	h := &host{binary: crashing, dir: t.TempDir(), class: map[string]string{"backend": k.Backend()}, size: k.Size()}
	h.pool = h.path("state/disks/default")
	h.disk, h.diskImage, _ = testenv.Disk(t, h.size+diskOverhead)
	t.Cleanup(func() { _ = os.Remove(h.diskNode("pvc-1")) })
	h.begin(t, fmt.Sprintf("disks: {match: [%q]}", h.disk), armed)
	return h
}

// diskNode is the device node of a volume while it is attached.
func (h *host) diskNode(name string) string {
	uuid, err := h.poolUUID()
	if err != nil {
		return ""
	}
	return blockdev.PartitionPath(h.poolName() + "." + uuid[:8] + "." + name)
}

// checkDisk compares the disk and its mounts with the expected state.
func (c *co) checkDisk() error {
	node := c.host.diskNode(c.name)
	_, missing := os.Stat(node)
	errs := []error{c.checkTargetExists(), c.checkMount(c.staging(), node, c.staged, false), c.checkMount(c.target(), node, c.published, c.readOnly)}
	if there := missing == nil; there != c.staged {
		errs = append(errs, fmt.Errorf("%s exists: %t, staged: %t", node, there, c.staged))
	}
	if c.created {
		errs = append(errs, c.host.checkMark())
	}
	if c.staged && c.follows {
		errs = append(errs, c.checkDiskSize(node))
	}
	return errors.Join(errs...)
}

// checkMark fails unless the disk is claimed.
func (h *host) checkMark() error {
	found, err := blockdev.FindDisks([]string{h.disk})
	if err != nil {
		return err
	}
	if m, err := found[0].Mark(); err != nil || !m.Complete || m.Damaged {
		return fmt.Errorf("the disk of %d bytes has mark %+v: %w", found[0].Size, m, err)
	}
	return nil
}

func (c *co) checkDiskSize(node string) error {
	promised, err := c.capacity()
	if err != nil {
		return err
	}
	f, err := os.Open(node)
	if err != nil {
		return err
	}
	defer f.Close()
	if size, err := blockdev.Size(f); err != nil || size != promised {
		return fmt.Errorf("%s has %d bytes, the driver promised %d: %w", node, size, promised, err)
	}
	have, err := filesystemSize(c.staging())
	const overhead = 80 << 20 // mostly the log
	if err == nil && have < promised-overhead {
		err = fmt.Errorf("the filesystem has %d bytes of %d", have, promised)
	}
	return err
}

// enlarge makes the disk as large as an expanded volume needs.
func (h *host) enlarge() error {
	size := h.size + growth + diskOverhead
	if err := os.Truncate(h.diskImage, size); err != nil {
		return err
	}
	h.room = blockdev.Room(size, 512)
	if out, err := exec.Command("losetup", "-c", h.disk).CombinedOutput(); err != nil {
		return fmt.Errorf("losetup -c: %w: %s", err, out)
	}
	return nil
}

// blank fails if the disk has a mark or data.
func (h *host) blank() error {
	found, err := blockdev.FindDisks([]string{h.disk})
	if err != nil {
		return err
	}
	if f := found[0].Inspect(); f.Reason != blockdev.DiskFree {
		return fmt.Errorf("%s is %s: %s", filepath.Base(h.disk), f.Reason, f.Detail)
	}
	return nil
}
