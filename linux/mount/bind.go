package mount

import (
	"golang.org/x/sys/unix"
)

// Bind mounts source, a directory or a file, at target, with the attributes in o and the attributes of
// the mount that contains source. The target never shows the source without them.
func Bind(source, target string, o Options) error {
	return bindTree(unix.AT_FDCWD, source, unix.AT_SYMLINK_NOFOLLOW, source, target, o)
}

// bindTree binds the file or directory that dir and path identify (open_tree(2)). source is its name in errors.
func bindTree(dir int, path string, flags uint, source, target string, o Options) error {
	fail := func(op string, err error) error {
		return &Error{Op: op, Source: source, Target: target, Err: err}
	}
	fd, err := unix.OpenTree(dir, path, flags|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fail("open_tree", err)
	}
	defer unix.Close(fd)
	if o.Attr != 0 {
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, mountAttr(o.Attr)); err != nil {
			return fail("mount_setattr", err)
		}
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fail("move_mount", err)
	}
	return nil
}

// mountAttr returns the argument of mount_setattr(2) that sets attributes. The attributes for the access time are an
// enumeration, whose old value must be cleared in the same call (mount_setattr(2)).
func mountAttr(attr uint64) *unix.MountAttr {
	a := &unix.MountAttr{Attr_set: attr}
	if attr&(unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME) != 0 {
		a.Attr_clr = unix.MOUNT_ATTR__ATIME
	}
	return a
}
