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

// check compares the actual state with the expected one: loop devices, mounts, sizes,
// snapshots.
func (c *co) check() error { return errors.Join(c.checkSnapshots(), c.checkVolume()) }

func (c *co) checkVolume() error {
	if c.kind.Has(backendtest.WholeDisk) {
		return c.checkDisk()
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
	if c.staged && c.follows {
		errs = append(errs, c.checkSizes(device))
	}
	return errors.Join(errs...)
}

// directory is the source of the mounts of a directory of an export.
func (c *co) directory() string {
	if sub := c.class["subDir"]; sub != "" {
		return c.host.source(sub)
	}
	return c.host.source("volumes/" + c.name + "/data")
}

// checkDevices finds the volume's loop device. There is one while the volume is staged, and
// one on top of it while the volume is published raw and read-only.
func (c *co) checkDevices() (string, error) {
	image, err := c.attachedImage()
	if err != nil {
		return "", err
	}
	own, err := loopsOn(image)
	if err != nil {
		return "", err
	}
	if !c.staged && c.host.shared() && image != "" {
		return "", fmt.Errorf("the image's folder is still mounted at %s", filepath.Dir(image))
	}
	if !c.staged {
		return "", wantCount("loop devices of the image", own, 0)
	}
	if err := wantCount("loop devices of the image", own, 1); err != nil {
		return "", err
	}
	above, err := loopsOn(own[0])
	if err != nil {
		return "", err
	}
	want := 0
	if c.kind.Block() && c.readOnly && c.published {
		want = 1
	}
	return own[0], wantCount("read-only devices on "+own[0], above, want)
}

func wantCount(what string, have []string, want int) error {
	if len(have) != want {
		return fmt.Errorf("%d %s %q, expected %d", len(have), what, have, want)
	}
	return nil
}

// checkTargetExists fails unless the target exists exactly while the volume is published.
func (c *co) checkTargetExists() error {
	_, err := os.Lstat(c.target())
	if there := err == nil; there != c.published {
		return fmt.Errorf("target %s exists: %t, published: %t", c.target(), there, c.published)
	}
	return nil
}

// checkMount fails unless a path has exactly one mount of the volume's filesystem, or none.
func (c *co) checkMount(path, device string, want, readOnly bool) error {
	m, err := mountAt(path, want)
	if m == nil {
		return err
	}
	if m.FSType != c.fsType() || m.Source != device {
		return fmt.Errorf("%s has %s on %s, expected is %s on %s", path, m.FSType, m.Source, c.fsType(), device)
	}
	return checkReadOnly(m, readOnly)
}

// fsType is the type of the volume's mounts.
func (c *co) fsType() string { return cmp.Or(c.kind.FSType, "nfs4") }

// checkNode fails unless the target of a raw volume has exactly one mount: of its device, or
// of the read-only device on top.
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
		err = fmt.Errorf("%s is not %s", c.target(), device)
	}
	return err
}

// readOnlyDevice finds the device on top, and fails if it can be written.
func (c *co) readOnlyDevice(below string) (string, error) {
	above, err := loopsOn(below)
	if err == nil {
		err = wantCount("read-only devices on "+below, above, 1)
	}
	if err == nil && c.write() == nil {
		err = fmt.Errorf("%s was published read-only and can be written to", c.target())
	}
	if err != nil {
		return "", err
	}
	return above[0], nil
}

func sameDevice(a, b string) (bool, error) {
	var sa, sb syscall.Stat_t
	err := errors.Join(syscall.Stat(a, &sa), syscall.Stat(b, &sb))
	node := sa.Mode&syscall.S_IFMT == syscall.S_IFBLK
	return node && sa.Rdev == sb.Rdev, err
}

// checkSizes fails unless the device has the promised size and the filesystem has grown as
// much. The overhead of a filesystem does not grow.
func (c *co) checkSizes(device string) error {
	promised, err := c.capacity()
	if err != nil {
		return err
	}
	size, err := deviceSize(device)
	if err != nil {
		return err
	}
	if size != promised {
		return fmt.Errorf("%s has %d bytes, the driver promised %d", filepath.Base(device), size, promised)
	}
	if c.kind.Block() {
		return nil
	}
	size, err = filesystemSize(c.staging())
	if c.base == 0 {
		c.base = size
	}
	if grown, want := size-c.base, promised-c.firstSize(); err == nil && grown != want {
		err = fmt.Errorf("the filesystem has grown by %d bytes, expected are %d", grown, want)
	}
	return err
}
