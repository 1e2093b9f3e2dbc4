package mount

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/mountflags"
)

// Detached is a mounted filesystem that has no path yet. The kernel unmounts it if it is closed, or the
// process dies, before MoveTo.
type Detached struct {
	fd     int
	source string
	fsType string
}

// Filesystem mounts the filesystem on a device without a path. The error is an *Error with the messages of the
// kernel, and wraps ErrBadOption, ErrBadContext or ErrOtherContext if the kernel refused an option.
func Filesystem(device, fsType string, o Options) (*Detached, error) {
	hasOptions := len(o.FilesystemFlags()) > 0
	if fsType == "xfs" { // copies of an image have the same UUID, and without nouuid the kernel mounts only one (xfs(5))
		o.Data = append(slices.Clone(o.Data), "nouuid")
	}
	return detached(device, fsType, o, func(err error) error {
		if !errors.Is(err, unix.EINVAL) {
			return err
		}
		if other := otherContext(device, fsType, o.Context); other != nil {
			return fmt.Errorf("%w (%w)", other, err)
		}
		switch {
		case !hasOptions: // some options are checked only now
			return err
		case fsType == "btrfs" && o.Context != "":
			return fmt.Errorf("%w: Linux 6.1 accepts no SELinux context for btrfs (%w)", ErrBadContext, err)
		}
		return errors.Join(ErrBadOption, err)
	})
}

// detached mounts a filesystem without a path. explain adds the reason to the error of the mount.
func detached(source, fsType string, o Options, explain func(error) error) (*Detached, error) {
	fsfd, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, &Error{Op: "fsopen", Source: source, FSType: fsType, Err: err}
	}
	defer unix.Close(fsfd)
	fail := func(op string, err error) (*Detached, error) {
		return nil, &Error{Op: op, Source: source, FSType: fsType, Log: kernelLog(fsfd), Err: err}
	}
	if o.Context != "" {
		if _, err := CanonicalContext(o.Context); err != nil {
			return fail("mount", err)
		}
	}
	if err := configure(fsfd, source, o); err != nil {
		return fail("mount", err)
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fail("mount", explain(err))
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, int(o.Attr))
	if err != nil {
		return fail("fsmount", err)
	}
	return &Detached{fd: fd, source: source, fsType: fsType}, nil
}

// configure sets the source and the options of a filesystem context (fsconfig(2)).
func configure(fsfd int, source string, o Options) error {
	if err := unix.FsconfigSetString(fsfd, "source", source); err != nil {
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
	if o.Context == "" {
		return nil
	}
	// Unlike mount(2), fsconfig(2) accepts no quotes around a context with commas.
	if err := unix.FsconfigSetString(fsfd, mountflags.Context, o.Context); err != nil {
		return errors.Join(ErrBadOption, err)
	}
	return nil
}

// kernelLog reads the messages of a filesystem context.
func kernelLog(fsfd int) string {
	var lines []string
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(fsfd, buf)
		if err != nil || n <= 0 { // ENODATA after the last message
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

// MoveTo moves the mount to target.
func (d *Detached) MoveTo(target string) error {
	if err := unix.MoveMount(d.fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &Error{Op: "move_mount", Source: d.source, Target: target, FSType: d.fsType, Err: err}
	}
	return nil
}

// Close releases the mount. A mount that was not moved is unmounted.
func (d *Detached) Close() error { return unix.Close(d.fd) }

// SyncFilesystem makes all writes to the filesystem of an open directory durable (syncfs(2)).
func SyncFilesystem(dir *os.File) error {
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return &Error{Op: "syncfs", Target: dir.Name(), Err: err}
	}
	return nil
}
