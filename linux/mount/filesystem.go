package mount

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Detached is a mounted filesystem that has no path yet. If it is closed, or the process
// dies, before MoveTo, the kernel unmounts it.
type Detached struct {
	fd     int
	source string
	fsType string
}

// Filesystem mounts the filesystem on a device without showing it anywhere. Errors are
// *Error with the messages of the kernel; ErrBadOption if it refused an option.
func Filesystem(device, fsType string, o Options) (*Detached, error) {
	fail := func(op string, fsfd int, err error) (*Detached, error) {
		e := &Error{Op: op, Source: device, FSType: fsType, Err: err}
		if fsfd >= 0 {
			e.Log = kernelLog(fsfd)
		}
		return nil, e
	}
	fsfd, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fail("fsopen", -1, err)
	}
	defer unix.Close(fsfd)
	if err := configure(fsfd, device, o); err != nil {
		return fail("mount", fsfd, err)
	}
	if fsType == "xfs" { // copies of an image have the same UUID, of which the kernel mounts only one (xfs(5))
		if err := unix.FsconfigSetFlag(fsfd, "nouuid"); err != nil {
			return fail("mount", fsfd, err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		if len(o.Data) > 0 && errors.Is(err, unix.EINVAL) {
			err = errors.Join(ErrBadOption, err)
		}
		return fail("mount", fsfd, err)
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, int(o.Attr))
	if err != nil {
		return fail("fsmount", fsfd, err)
	}
	return &Detached{fd: fd, source: device, fsType: fsType}, nil
}

func configure(fsfd int, device string, o Options) error {
	if err := unix.FsconfigSetString(fsfd, "source", device); err != nil {
		return err
	}
	if o.IsReadOnly() {
		if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
			return err
		}
	}
	for _, word := range o.Data {
		key, value, hasValue := strings.Cut(word, "=")
		var err error
		if hasValue {
			err = unix.FsconfigSetString(fsfd, key, value)
		} else {
			err = unix.FsconfigSetFlag(fsfd, key)
		}
		if err != nil {
			return errors.Join(ErrBadOption, err)
		}
	}
	return nil
}

// kernelLog reads the messages of a filesystem context.
func kernelLog(fsfd int) string {
	var lines []string
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(fsfd, buf)
		if err != nil || n <= 0 { // ENODATA: no more
			return strings.Join(lines, "; ")
		}
		line := strings.TrimSpace(string(buf[:n]))
		if len(line) > 2 && line[1] == ' ' { // the first letter is the severity: "e text"
			line = line[2:]
		}
		lines = append(lines, line)
	}
}

// OpenRoot opens the root directory of the filesystem, for ioctls.
func (d *Detached) OpenRoot() (*os.File, error) {
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &Error{Op: "open root", Source: d.source, FSType: d.fsType, Err: err}
	}
	return os.NewFile(uintptr(fd), d.source), nil
}

// MoveTo shows the mount at target.
func (d *Detached) MoveTo(target string) error {
	if err := unix.MoveMount(d.fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &Error{Op: "move_mount", Source: d.source, Target: target, FSType: d.fsType, Err: err}
	}
	return nil
}

// Close releases the mount; one that was not moved is unmounted.
func (d *Detached) Close() error { return unix.Close(d.fd) }

// SyncFilesystem makes durable what was written to the filesystem of an open directory
// (syncfs(2)).
func SyncFilesystem(dir *os.File) error {
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return &Error{Op: "syncfs", Target: dir.Name(), Err: err}
	}
	return nil
}
