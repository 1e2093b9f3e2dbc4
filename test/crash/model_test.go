package crash

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/trivet-csi/trivet/backend/backendtest"
)

// check compares the actual loop devices, mounts, sizes and snapshots with the expected state.
func (c *co) check() error { return errors.Join(c.checkSnapshots(), c.checkVolume()) }

// checkVolume compares the actual devices, mounts and sizes with the expected state.
func (c *co) checkVolume() error {
	if c.kind.Has(backendtest.WholeDisk) {
		return c.checkDisk()
	}
	if c.kind.Has(backendtest.Logical) {
		return c.checkDevice()
	}
	if c.isLocal() {
		return errors.Join(c.checkTargetExists(), c.checkBound(c.staging(), c.staged, false), c.checkBound(c.target(), c.published, c.readOnly), c.checkLimit())
	}
	if c.kind.Has(backendtest.Directory) {
		return errors.Join(c.checkTargetExists(), c.checkMount(c.staging(), c.directory(), c.staged, false), c.checkMount(c.target(), c.directory(), c.published, c.readOnly))
	}
	device, err := c.checkDevices()
	errs := []error{err, c.checkTargetExists()}
	if !c.kind.Block() {
		errs = append(errs, c.checkMount(c.staging(), device, c.staged, false), c.checkMount(c.target(), device, c.published, c.readOnly))
	} else if c.published {
		errs = append(errs, c.checkNode(device))
	}
	if c.staged && c.resized {
		errs = append(errs, c.checkSizes(device))
	}
	return errors.Join(errs...)
}

// directory returns the mount source of a volume that is a directory on an export.
func (c *co) directory() string {
	if sub := c.class["subDir"]; sub != "" {
		return c.host.source(sub)
	}
	return c.host.source("volumes/" + c.name + "/data")
}

// checkDevices returns the volume's loop device, or an empty string. It fails unless the volume has one
// loop device while it is staged, and a second one on top while it is published as a read-only block
// volume.
func (c *co) checkDevices() (string, error) {
	image, err := c.attachedImage()
	if err != nil {
		return "", err
	}
	devices, err := loopsOn(image)
	if err != nil {
		return "", err
	}
	if !c.staged && c.host.shared() && image != "" {
		return "", fmt.Errorf("the volume is not staged, but the folder of its image is still mounted at %s", filepath.Dir(image))
	}
	if !c.staged {
		return "", wantCount("loop devices of the image", devices, 0)
	}
	if err := wantCount("loop devices of the image", devices, 1); err != nil {
		return "", err
	}
	if c.kind.Has(backendtest.Encrypted) {
		if devices[0], err = c.mappedNode(); err != nil {
			return "", err
		}
	}
	above, err := loopsOn(devices[0])
	if err != nil {
		return "", err
	}
	want := 0
	if c.kind.Block() && c.readOnly && c.published {
		want = 1
	}
	return devices[0], wantCount("read-only devices on "+devices[0], above, want)
}

// wantCount fails unless a list has a number of elements. what describes the elements in the plural.
func wantCount(what string, have []string, want int) error {
	if len(have) != want {
		return fmt.Errorf("got %d %s %q, want %d", len(have), what, have, want)
	}
	return nil
}

// checkTargetExists fails if the target is missing while the volume is published, or exists otherwise.
func (c *co) checkTargetExists() error {
	_, err := os.Lstat(c.target())
	if exists := err == nil; exists != c.published {
		return fmt.Errorf("got target %s exists: %t, want %t", c.target(), exists, c.published)
	}
	return nil
}

// checkMount fails unless a path has exactly one mount, of the volume's filesystem on a device, or no
// mount if mounted is false.
func (c *co) checkMount(path, device string, mounted, readOnly bool) error {
	m, err := mountAt(path, mounted)
	if m == nil {
		return err
	}
	if m.FSType != c.fsType() || m.Source != device {
		return fmt.Errorf("got %s on %s mounted at %s, want %s on %s", m.FSType, m.Source, path, c.fsType(), device)
	}
	return checkReadOnly(m, readOnly)
}

// fsType returns the filesystem type of the volume's mounts.
func (c *co) fsType() string { return cmp.Or(c.kind.FSType, "nfs4") }

// checkNode fails unless the target of a block volume has exactly one mount, which is the volume's
// device. For a read-only volume, it must be the read-only device on top of that device.
func (c *co) checkNode(device string) error {
	if _, err := mountAt(c.target(), true); err != nil {
		return err
	}
	if c.readOnly {
		var err error
		if device, err = c.readOnlyDevice(device); err != nil {
			return err
		}
	}
	same, err := sameDevice(c.target(), device)
	if err == nil && !same {
		err = fmt.Errorf("the target %s is not the device %s", c.target(), device)
	}
	return err
}

// readOnlyDevice returns the loop device on top of another one. It fails if the pod can write to it.
func (c *co) readOnlyDevice(below string) (string, error) {
	above, err := loopsOn(below)
	if err == nil {
		err = wantCount("read-only devices on "+below, above, 1)
	}
	if err == nil && c.write() == nil {
		err = fmt.Errorf("a write to %s succeeded, although the volume is published read-only", c.target())
	}
	if err != nil {
		return "", err
	}
	return above[0], nil
}

// sameDevice reports whether two paths are device nodes of the same block device.
func sameDevice(a, b string) (bool, error) {
	var sa, sb syscall.Stat_t
	err := errors.Join(syscall.Stat(a, &sa), syscall.Stat(b, &sb))
	node := sa.Mode&syscall.S_IFMT == syscall.S_IFBLK
	return node && sa.Rdev == sb.Rdev, err
}

// checkSizes fails unless the device has the recorded size, and the filesystem has grown by as many
// bytes as the volume. The metadata of a filesystem does not grow.
func (c *co) checkSizes(device string) error {
	recorded, err := c.capacity()
	if err != nil {
		return err
	}
	size, err := deviceSize(device)
	if err != nil {
		return err
	}
	if size != recorded {
		return fmt.Errorf("got %d bytes in %s, want the recorded size of %d", size, filepath.Base(device), recorded)
	}
	if c.kind.Block() {
		return nil
	}
	size, err = filesystemSize(c.staging())
	if c.initialSize == 0 {
		c.initialSize = size
	}
	if grown, want := size-c.initialSize, recorded-c.firstSize(); err == nil && grown != want {
		err = fmt.Errorf("got a filesystem that has grown by %d bytes, want %d", grown, want)
	}
	return err
}
