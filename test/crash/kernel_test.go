package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"

	"github.com/trivet-csi/trivet/linux/blockdev"
)

// mountsAt returns the mounts at a path. The last one hides the others.
func mountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return i.Mountpoint != path, false })
}

// mountAt returns the mount at a path. If mounted is true, it fails unless the path has exactly one
// mount. Otherwise, it returns nil, and fails if the path has a mount.
func mountAt(path string, mounted bool) (*mountinfo.Info, error) {
	mounts, err := mountsAt(path)
	switch {
	case err != nil:
		return nil, err
	case mounted && len(mounts) == 1:
		return mounts[0], nil
	case mounted || len(mounts) > 0:
		return nil, fmt.Errorf("got %d mounts at %s, want exactly one: %t, want none: %t", len(mounts), path, mounted, !mounted)
	}
	return nil, nil
}

// checkReadOnly fails if a mount is read-only and readOnly is false, or the reverse.
func checkReadOnly(m *mountinfo.Info, readOnly bool) error {
	if ro := strings.HasPrefix(m.Options, "ro"); ro != readOnly {
		return fmt.Errorf("got mount options %s at %s, want read-only: %t", m.Options, m.Mountpoint, readOnly)
	}
	return nil
}

// mounts returns the mount points of the mounts that match.
func mounts(match func(*mountinfo.Info) bool) (paths []string, err error) {
	found, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return !match(i), false })
	for _, m := range found {
		paths = append(paths, m.Mountpoint)
	}
	return paths, err
}

// mountsBelow returns the mount points below a directory.
func mountsBelow(dir string) ([]string, error) {
	return mounts(func(i *mountinfo.Info) bool { return strings.HasPrefix(i.Mountpoint, dir+"/") })
}

// loops returns the loop devices whose backing file matches.
func loops(match func(file string) bool) (devices []string, err error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		// The device may have been freed since the Glob.
		if backing, err := os.ReadFile(f); err == nil && match(strings.TrimSpace(string(backing))) {
			devices = append(devices, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return devices, err
}

// loopsOn returns the loop devices whose backing file is a file or another loop device.
func loopsOn(file string) ([]string, error) {
	return loops(func(backing string) bool { return backing == file })
}

// loopsBelow returns the loop devices whose backing file is or was below a directory. It does not
// return loop devices on top of other loop devices.
func loopsBelow(dir string) ([]string, error) {
	return loops(func(backing string) bool { return strings.HasPrefix(backing, dir+"/") })
}

// leaks fails if a mount point or the backing file of a loop device is below a directory. It ignores
// mount points directly in the directory allowed.
func leaks(dir, allowed string) error {
	mounts, err := mountsBelow(dir)
	mounts = slices.DeleteFunc(mounts, func(at string) bool { return filepath.Dir(at) == allowed })
	devices, derr := loopsBelow(dir)
	if err = errors.Join(err, derr); err == nil && len(mounts)+len(devices) > 0 {
		err = fmt.Errorf("got mounts %q and loop devices %q below %s, want none", mounts, devices, dir)
	}
	return err
}

// deviceSize returns the size of a block device in bytes.
func deviceSize(device string) (int64, error) {
	name, err := blockdev.KernelName(device)
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile("/sys/class/block/" + name + "/size")
	if err != nil {
		return 0, err
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return sectors * 512, err
}

// filesystemSize returns the size in bytes of the filesystem at a path.
func filesystemSize(path string) (int64, error) {
	var st syscall.Statfs_t
	err := syscall.Statfs(path, &st)
	return int64(st.Blocks) * st.Frsize, err
}

// clearLeftovers removes mounts below dir and loop devices whose backing files are in dir or pool,
// which a failed test has left. It unmounts a second time, because a loop device keeps the mount of
// its backing file busy.
func clearLeftovers(dir, pool string) error {
	err := unmountAll(dir)
	if serr := errors.Join(clearDevices(pool), clearDevices(dir)); err != nil || serr != nil {
		return errors.Join(serr, unmountAll(dir))
	}
	return nil
}

// unmountAll unmounts all mounts below a directory, the last one first.
func unmountAll(dir string) error {
	mounts, err := mountsBelow(dir)
	for i := len(mounts) - 1; i >= 0; i-- {
		err = errors.Join(err, syscall.Unmount(mounts[i], 0))
	}
	return err
}

// clearDevices frees the loop devices below a directory, and before each the devices on top of it.
func clearDevices(dir string) error {
	below, err := loopsBelow(dir)
	for _, device := range below {
		above, aerr := loopsOn(device)
		err = errors.Join(err, aerr, freeLoops(append(above, device)))
	}
	return err
}

// freeLoops frees loop devices. It ignores devices that the kernel has freed in the meantime.
func freeLoops(devices []string) error {
	for _, device := range devices {
		out, err := exec.Command("losetup", "-d", device).CombinedOutput()
		if _, serr := os.Stat("/sys/block/" + filepath.Base(device) + "/loop/backing_file"); err != nil && serr == nil {
			return fmt.Errorf("losetup -d %s: %w: %s", device, err, out)
		}
	}
	return nil
}
