package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// nodesDir contains device nodes of volumes in use. The caller chooses their names, because the kernel reuses the name
// of a removed device for the next one. The nodes stay when a device is removed, so that its mounts can be found. A
// reboot removes the nodes, which are on devtmpfs, and the mounts.
const nodesDir = "/dev/trivet"

// NodePath returns the path of a device node in nodesDir.
func NodePath(node string) string { return filepath.Join(nodesDir, node) }

// IsNodePath reports whether a path can be a result of NodePath, possibly in another mount
// namespace.
func IsNodePath(path string) bool {
	return filepath.Base(filepath.Dir(path)) == filepath.Base(nodesDir)
}

// MakeNode creates a block device node in nodesDir with a device number. It replaces an existing node of another device.
func MakeNode(node string, number uint64) error {
	path := NodePath(node)
	if current, err := NodeNumber(path); err == nil && current == number {
		return nil
	}
	if err := os.MkdirAll(nodesDir, 0o755); err != nil {
		return err
	}
	if err := RemoveNode(node); err != nil {
		return err
	}
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(number)); err != nil {
		return fmt.Errorf("mknod %s: %w: give the driver the host's /dev", path, err)
	}
	return nil
}

// RemoveNode removes a device node in nodesDir. It is no error if the node does not exist.
func RemoveNode(node string) error {
	if err := os.Remove(NodePath(node)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// NodeNumber returns the device number of the node of a block device. The error is fs.ErrNotExist if the node does
// not exist, and unix.ENOTBLK if path is another file.
func NodeNumber(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, fmt.Errorf("%s: %w", path, unix.ENOTBLK)
	}
	return st.Rdev, nil
}

// WholeNumber returns the device number of the node of a block device. For a partition it returns the number of the disk, because
// the kernel limits I/O only on whole devices.
func WholeNumber(path string) (uint64, error) {
	number, err := NodeNumber(path)
	if err != nil {
		return 0, err
	}
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number)))
	if err != nil {
		return 0, err
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); errors.Is(err, fs.ErrNotExist) {
		return number, nil
	}
	return readDev(filepath.Join(filepath.Dir(dir), "dev"))
}

// OpenNode opens a device node in nodesDir for reading.
func OpenNode(node string) (*os.File, error) { return os.Open(NodePath(node)) }
