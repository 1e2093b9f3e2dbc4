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
)

// mountsAt lists the mounts at a path, of which the last hides the others.
func mountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return i.Mountpoint != path, false })
}

// mountAt returns the mount at a path. It fails unless there is exactly one if want is set,
// and none otherwise.
func mountAt(path string, want bool) (*mountinfo.Info, error) {
	mounts, err := mountsAt(path)
	switch {
	case err != nil:
		return nil, err
	case want && len(mounts) == 1:
		return mounts[0], nil
	case want || len(mounts) > 0:
		return nil, fmt.Errorf("%d mounts at %s, expected one: %t", len(mounts), path, want)
	}
	return nil, nil
}

// checkReadOnly fails unless a mount is read-only, or is not.
func checkReadOnly(m *mountinfo.Info, readOnly bool) error {
	if ro := strings.HasPrefix(m.Options, "ro"); ro != readOnly {
		return fmt.Errorf("%s is mounted %s, expected is read-only %t", m.Mountpoint, m.Options, readOnly)
	}
	return nil
}

// mounts lists the paths of the mounts that match.
func mounts(match func(*mountinfo.Info) bool) (paths []string, err error) {
	found, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return !match(i), false })
	for _, m := range found {
		paths = append(paths, m.Mountpoint)
	}
	return paths, err
}

// mountsBelow lists the mounts below a directory.
func mountsBelow(dir string) ([]string, error) {
	return mounts(func(i *mountinfo.Info) bool { return strings.HasPrefix(i.Mountpoint, dir+"/") })
}

// loops lists the loop devices whose backing file matches.
func loops(match func(file string) bool) (devices []string, err error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		// A device may be freed between the two reads.
		if on, err := os.ReadFile(f); err == nil && match(strings.TrimSpace(string(on))) {
			devices = append(devices, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return devices, err
}

// loopsOn lists the loop devices of a file, or of another loop device.
func loopsOn(file string) ([]string, error) { return loops(func(on string) bool { return on == file }) }

// loopsBelow lists the loop devices of the files below a directory, also of removed files. A
// device on top of another loop device is not listed.
func loopsBelow(dir string) ([]string, error) {
	return loops(func(on string) bool { return strings.HasPrefix(on, dir+"/") })
}

// leaks returns an error if a path below a directory is mounted or bound. Mounts in the
// directory allowed are no leaks.
func leaks(dir, allowed string) error {
	mounts, err := mountsBelow(dir)
	mounts = slices.DeleteFunc(mounts, func(at string) bool { return filepath.Dir(at) == allowed })
	devices, derr := loopsBelow(dir)
	if err = errors.Join(err, derr); err == nil && len(mounts)+len(devices) > 0 {
		err = fmt.Errorf("left behind: mounts %q, loop devices %q", mounts, devices)
	}
	return err
}

// deviceSize is the size of a block device in bytes.
func deviceSize(device string) (int64, error) {
	b, err := os.ReadFile("/sys/block/" + filepath.Base(device) + "/size")
	if err != nil {
		return 0, err
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return sectors * 512, err
}

// filesystemSize is the size in bytes of the filesystem at a path.
func filesystemSize(path string) (int64, error) {
	var st syscall.Statfs_t
	err := syscall.Statfs(path, &st)
	return int64(st.Blocks) * st.Frsize, err
}

// fsck checks the filesystem on an image with the filesystem's own tool, which changes nothing.
func fsck(image, fsType string) error {
	words := map[string][]string{
		"ext4":  {"e2fsck", "-fn"},
		"xfs":   {"xfs_repair", "-n", "-f"},
		"btrfs": {"btrfs", "check", "--readonly"},
	}[fsType]
	if words == nil {
		return nil
	}
	cmd := exec.Command(words[0], append(words[1:], image)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

// clearLeftovers removes what a failed test left: mounts below dir, and loop devices of the
// pool's images, upper devices first. An image on an export is busy until then, and so is its
// mount below dir.
func clearLeftovers(dir, pool string) error {
	err := unmountAll(dir)
	if serr := errors.Join(clearDevices(pool), clearDevices(dir)); err != nil || serr != nil {
		return errors.Join(serr, unmountAll(dir))
	}
	return nil
}

func unmountAll(dir string) error {
	mounts, err := mountsBelow(dir)
	for i := len(mounts) - 1; i >= 0; i-- {
		err = errors.Join(err, syscall.Unmount(mounts[i], 0))
	}
	return err
}

func clearDevices(dir string) error {
	below, err := loopsBelow(dir)
	for _, device := range below {
		above, aerr := loopsOn(device)
		err = errors.Join(err, aerr, detach(append(above, device)))
	}
	return err
}

func detach(devices []string) error {
	for _, device := range devices {
		out, err := exec.Command("losetup", "-d", device).CombinedOutput()
		if _, serr := os.Stat("/sys/block/" + filepath.Base(device) + "/loop/backing_file"); err != nil && serr == nil {
			return fmt.Errorf("losetup -d %s: %w: %s", device, err, out)
		}
	}
	return nil
}
