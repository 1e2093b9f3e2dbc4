package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Info describes the file at a path.
type Info struct {
	Exists bool
	// IsMount means that the path is the root of a mount, which may be a file (statx(2),
	// STATX_ATTR_MOUNT_ROOT).
	IsMount bool
	// Mode is st_mode, with the type bits.
	Mode uint32
	// Dev is st_dev. Rdev is the device of a device node.
	Dev, Rdev uint64
	Ino       uint64
	// MountID is the ID of the mount in the mount table.
	MountID uint64
}

// IsDir reports whether the path is a directory. It is false for a symbolic link to a directory.
func (i Info) IsDir() bool { return i.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsBlock reports whether the path is a block device node.
func (i Info) IsBlock() bool { return i.Mode&unix.S_IFMT == unix.S_IFBLK }

// Inspect describes the file at a path. It does not follow a link at the end of the path and does not
// trigger an automount. It is no error if the path does not exist.
func Inspect(path string) (Info, error) {
	var st unix.Statx_t
	const flags, mask = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS | unix.STATX_MNT_ID
	err := unix.Statx(unix.AT_FDCWD, path, flags, mask, &st)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return Info{}, nil
	}
	if err != nil {
		return Info{}, &Error{Op: "statx", Target: path, Err: err}
	}
	return Info{
		Exists:  true,
		IsMount: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		Mode:    uint32(st.Mode),
		Dev:     unix.Mkdev(st.Dev_major, st.Dev_minor),
		Rdev:    unix.Mkdev(st.Rdev_major, st.Rdev_minor),
		Ino:     st.Ino,
		MountID: st.Mnt_id,
	}, nil
}

// Statfs is statfs(2), repeated when a signal interrupts it.
func Statfs(path string) (unix.Statfs_t, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(path, &st)
		if err == nil {
			return st, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return st, &Error{Op: "statfs", Target: path, Err: err}
		}
	}
}

// IsBroken reports whether the error of stat(2) or open(2) means that the filesystem is still mounted
// but broken.
func IsBroken(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && mountutils.IsCorruptedMnt(errno)
}

// IsTmpfs reports whether the result of statfs(2) is of a tmpfs.
func IsTmpfs(st *unix.Statfs_t) bool { return st.Type == unix.TMPFS_MAGIC }

// Entry is a line of the mount table.
type Entry = mountinfo.Info

// Table returns the entries of the mount table for which keep returns true. It takes 3 µs for each mount of
// the node, which is too long for frequent calls.
func Table(keep func(*Entry) bool) ([]*Entry, error) {
	return mountinfo.GetMounts(func(e *Entry) (skip, stop bool) { return !keep(e), false })
}

// wholeTable returns all entries of the mount table.
func wholeTable() ([]*Entry, error) { return Table(func(*Entry) bool { return true }) }

// OfDevice returns the mounts of the filesystem on a block device, and the bind mounts of
// its device node.
func OfDevice(device string) ([]*Entry, error) {
	return Table(func(e *Entry) bool { return IsOfDevice(e, device) })
}

// OpenMounted opens the root of the filesystem that is mounted from a block device; nil if the device is not mounted in this
// mount namespace.
func OpenMounted(device string) (*os.File, error) {
	mounts, err := OfDevice(device)
	if err != nil {
		return nil, err
	}
	for _, e := range mounts {
		if root := OpenShown(e); root != nil {
			return root, nil
		}
	}
	return nil, nil
}

// OpenAside opens the root of the filesystem that is mounted writable from a block device, on a mount of its own without
// a path, so that the open directory does not keep the filesystem's other mounts busy. The device stays in use until the
// directory is closed. It returns nil if the filesystem is not mounted writable in this mount namespace.
func OpenAside(device string) (*os.File, error) {
	mounts, err := OfDevice(device)
	if err != nil {
		return nil, err
	}
	for _, e := range mounts {
		if slices.Contains(strings.Split(e.VFSOptions, ","), "ro") {
			continue
		}
		if root := OpenShown(e); root != nil {
			defer root.Close()
			return openClone(root)
		}
	}
	return nil, nil
}

// openClone opens a directory on a new mount without a path.
func openClone(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, &Error{Op: "open_tree", Source: dir.Name(), Err: err}
	}
	clone := &Detached{fd: fd, source: dir.Name()}
	defer func() { _ = clone.Close() }()
	return clone.OpenRoot()
}

// OpenShown opens the root of a mount by its path. It returns nil if the path does not show the mount,
// for example because another mount covers it.
func OpenShown(e *Entry) *os.File {
	root, err := sys.OpenFile(e.Mountpoint, os.O_RDONLY)
	if err != nil {
		return nil
	}
	var st unix.Statx_t
	err = unix.Statx(int(root.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
	if err != nil || st.Mnt_id != uint64(e.ID) {
		root.Close()
		return nil
	}
	return root
}

// IsOfDevice reports whether a mount shows the filesystem on a block device, or is a bind mount of its
// device node.
func IsOfDevice(e *Entry, device string) bool {
	node := "/" + strings.TrimPrefix(device, "/dev/")
	inDev := e.FSType == "devtmpfs" || e.FSType == "tmpfs" // /dev of a host, or of a container
	return e.Source == device || e.Root == node && inDev ||
		e.FSType == "btrfs" && sameDevice(e.Source, device)
}

// sameDevice reports whether two device nodes belong to one device. The mount table may show another node of
// the device of a btrfs, because udev changes the node in the mount table.
func sameDevice(a, b string) bool {
	var one, other unix.Stat_t
	if unix.Stat(a, &one) != nil || unix.Stat(b, &other) != nil {
		return false
	}
	return one.Mode&unix.S_IFMT == unix.S_IFBLK && other.Mode&unix.S_IFMT == unix.S_IFBLK && one.Rdev == other.Rdev
}

// IsMountPoint reports whether a path is a mount point. It does not access the mounted filesystem,
// because its server may not respond. It does not follow a link at the end of the path.
func IsMountPoint(path string) (bool, error) {
	parent, err := sys.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer parent.Close()
	f, err := sys.Open(parent, filepath.Base(path), sys.OneMount, unix.O_PATH|unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EXDEV):
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	return false, f.Close()
}

// RemoveTarget removes an unmounted target, which is an empty directory or a file. It is no error if the
// target does not exist.
func RemoveTarget(path string) error {
	err := os.Remove(path) // unlink(2) or rmdir(2)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
