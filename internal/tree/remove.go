package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrMounted means: something is mounted there, and was left alone.
var ErrMounted = errors.New("something is mounted there: unmount it")

// Remove removes a name from an open directory, with all that is in it if it is a
// directory. It is no error if there is none. Links are removed, not followed, and where
// something is mounted nothing is removed (ErrMounted). What cannot be removed is passed
// over; the error is that of the first.
func Remove(ctx context.Context, dir *os.File, name string) error {
	node, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EXDEV):
		err = ErrMounted
	case err == nil:
		defer node.Close()
		err = removeNode(ctx, dir, name, node)
	}
	if err != nil {
		return fmt.Errorf("removing %s/%s: %w", dir.Name(), name, err)
	}
	return nil
}

func removeNode(ctx context.Context, dir *os.File, name string, node *os.File) error {
	info, err := node.Stat()
	if err != nil {
		return err
	}
	if info.IsDir() {
		if err := Empty(ctx, node); err != nil {
			return err
		}
	}
	return remove(&Entry{Dir: dir, Name: name, Node: node, Info: info})
}

// Empty removes all that is in an open directory, as Remove does, and not the directory.
func Empty(ctx context.Context, dir *os.File) error {
	for {
		var seen, removed int
		var failed error
		err := Walk(ctx, dir, func(e *Entry) error {
			seen++
			if err := remove(e); err == nil {
				removed++
			} else if failed == nil {
				failed = fmt.Errorf("%q: %w", e.Name, err)
			}
			return nil
		})
		if err != nil || seen == 0 {
			return err
		}
		if removed == 0 {
			return failed
		}
		// A listing may have missed some while others were removed (readdir(3)).
	}
}

// remove removes one: a directory is empty by then.
func remove(e *Entry) error {
	if e.Mounted() {
		return ErrMounted
	}
	err := e.unlink()
	if errors.Is(err, unix.EPERM) && release(e) {
		err = e.unlink()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (e *Entry) unlink() error {
	flags := 0
	if e.Info.IsDir() {
		flags = unix.AT_REMOVEDIR
	}
	return os.NewSyscallError("unlinkat", unix.Unlinkat(int(e.Dir.Fd()), e.Name, flags))
}

// release takes the attributes immutable and append-only (chattr(1)) from a file or
// directory, and from the directory that has it: each keeps it from being removed.
func release(e *Entry) (changed bool) {
	changed = mayChange(int(e.Dir.Fd()))
	if !e.Info.IsDir() && !e.Info.Mode().IsRegular() { // opening a device or a pipe does something else
		return changed
	}
	fd, err := unix.Open(self(e.Node), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return changed
	}
	defer unix.Close(fd)
	return mayChange(fd) || changed
}

// mayChange takes the attributes from what is open, and tells whether it had any
// (ioctl_iflags(2)).
func mayChange(fd int) bool {
	const fixed = 0x10 | 0x20 // FS_IMMUTABLE_FL, FS_APPEND_FL (linux/fs.h)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	return err == nil && flags&fixed != 0 && unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags&^fixed) == nil
}
