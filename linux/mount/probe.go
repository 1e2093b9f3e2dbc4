package mount

import "golang.org/x/sys/unix"

// Probe makes the system calls of a bind mount on a temporary detached copy of the root mount, and begins to mount a
// filesystem. An error is the reason why this process cannot mount.
func Probe() error {
	fail := func(op string, err error) error { return &Error{Op: op, Source: "/", Err: err} }
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fail("open_tree", err)
	}
	defer unix.Close(fd)
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, mountAttr(unix.MOUNT_ATTR_RDONLY)); err != nil {
		return fail("mount_setattr", err)
	}
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fail("fsopen", err)
	}
	return unix.Close(fsfd)
}

// At returns the mount that contains a path. It follows symbolic links.
func At(path string) (*Entry, error) {
	at, err := Inspect(path + "/.")
	if err != nil {
		return nil, err
	}
	entries, err := Table(func(e *Entry) bool { return uint64(e.ID) == at.MountID })
	if err == nil && len(entries) != 1 {
		err = &Error{Op: "finding the mount of", Target: path, Err: unix.ENOENT}
	}
	if err != nil {
		return nil, err
	}
	return entries[0], nil
}
