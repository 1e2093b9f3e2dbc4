package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/quota"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// maxDepth is how many folders deep a tree is followed, with a descriptor each.
	// What lies deeper is moved up into the trash first.
	maxDepth = 64
	// deepDir is what has lain deeper, in a folder of the trash that has nothing else.
	deepDir = "deep"
)

// removeTree removes name from an open directory, and all below it but what is on
// another filesystem: where something is mounted nothing is removed. Links are
// removed, not followed. What cannot be removed is passed over; the error is that of
// the first. It stops when ctx ends.
func (p *Pool) removeTree(ctx context.Context, dir *os.File, name string) error {
	err := p.insist(dir, name, func() error { return p.removeAny(ctx, dir, name, 0) })
	if err != nil {
		return fmt.Errorf("removing from the pool: %s/%s: %w", dir.Name(), name, err)
	}
	return nil
}

// removeFolder is removeTree for what may well be an empty folder: then a server need
// not be asked what is in it.
func (p *Pool) removeFolder(ctx context.Context, dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err == nil {
		return nil
	}
	return p.removeTree(ctx, dir, name)
}

func (p *Pool) removeAny(ctx context.Context, dir *os.File, name string, depth int) error {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if errors.Is(err, unix.EISDIR) {
		return p.removeDir(ctx, dir, name, depth)
	}
	return orGone(err)
}

// orGone is err, or nil if it says that there is nothing any more.
func orGone(err error) error {
	if err == nil || isGone(err) {
		return nil
	}
	return err
}

func (p *Pool) removeDir(ctx context.Context, dir *os.File, name string, depth int) error {
	if depth == maxDepth {
		return orGone(p.removeDeep(dir, name))
	}
	sub, err := openDirBeneath(dir, name)
	if err != nil {
		return orGone(err)
	}
	defer sub.Close()
	for {
		removed, failed := p.empty(ctx, sub, depth+1)
		err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
		if err == nil || isGone(err) {
			return nil
		}
		if failed != nil {
			return failed
		}
		if removed == 0 { // nothing was added since, either
			return &os.PathError{Op: "rmdir", Path: name, Err: err}
		}
		if _, err := sub.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

// removeDeep leaves a directory to the reaper. What is in it is a tenant's, and not to be
// read as what the driver has in a folder of the trash: so it gets one around it.
func (p *Pool) removeDeep(dir *os.File, name string) error {
	entry := "deep." + NewUUID()
	if err := unix.Mkdirat(int(p.trash.Fd()), entry, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: p.trash.Name() + "/" + entry, Err: err}
	}
	defer p.reapLater(entry)
	folder, err := openDirBeneath(p.trash, entry)
	if err != nil {
		return err
	}
	defer folder.Close()
	return renameat(dir, name, folder, deepDir)
}

// empty removes what is in a directory. Listing goes on while names vanish, so one
// pass may miss some (readdir(3)).
func (p *Pool) empty(ctx context.Context, dir *os.File, depth int) (removed int, failed error) {
	for {
		entries, err := dir.ReadDir(1024)
		if errors.Is(err, io.EOF) {
			return removed, failed
		}
		if err != nil {
			return removed, orGone(errors.Join(failed, err))
		}
		for _, e := range entries {
			if ctx.Err() != nil {
				return removed, ctx.Err()
			}
			if err := p.removeEntry(ctx, dir, e, depth); err == nil {
				removed++
			} else if failed == nil {
				failed = err
			}
		}
	}
}

// removeEntry removes one. A subvolume of btrfs that is read-only, or deeper than a rename
// out of it goes, is destroyed. What is immutable in one that is read-only is EPERM first.
func (p *Pool) removeEntry(ctx context.Context, dir *os.File, e os.DirEntry, depth int) error {
	remove := p.removeAny
	if e.IsDir() {
		remove = p.removeDir
	}
	err := p.insist(dir, e.Name(), func() error { return remove(ctx, dir, e.Name(), depth) })
	kept := errors.Is(err, unix.EROFS) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EXDEV)
	if kept && e.IsDir() && !p.Shared() && p.destroy(dir, e.Name()) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", e.Name(), err)
	}
	return nil
}

// insist removes name from a directory, and makes the directory writable if it is not:
// to a server that maps root away its owner is as good as any other.
func (p *Pool) insist(dir *os.File, name string, remove func() error) error {
	err := remove()
	if errors.Is(err, unix.EACCES) && dir.Chmod(0o700) == nil {
		err = remove()
	}
	if errors.Is(err, unix.EPERM) && !p.Shared() {
		changed := mayChange(int(dir.Fd()))
		if release(dir, name) || changed {
			err = remove()
		}
	}
	return err
}

// destroy removes a directory that its filesystem can destroy at once.
func (p *Pool) destroy(dir *os.File, name string) (done bool) {
	err := p.withQuota(func(fs *quota.FS) (err error) {
		done, err = fs.RemoveDir(dir, name)
		return err
	})
	return err == nil && done
}

// release takes the attributes immutable and append-only (chattr(1)) from a file or
// directory in another: either keeps it from being removed and renamed.
func release(dir *os.File, name string) (changed bool) {
	st, err := statBeneath(dir, name)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false // opening a device or a pipe does something else
	}
	fd, err := openat2(dir, name, unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return mayChange(fd)
}

// mayChange takes the attributes from what is open, and tells whether it had any
// (ioctl_iflags(2)).
func mayChange(fd int) bool {
	const fixed = 0x10 | 0x20 // FS_IMMUTABLE_FL, FS_APPEND_FL (linux/fs.h)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	return err == nil && flags&fixed != 0 && unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags&^fixed) == nil
}

// openDirBeneath opens a directory in another: no link, and nothing that is mounted
// there.
func openDirBeneath(dir *os.File, name string) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	f, err := openBeneath(dir, name, how)
	if errors.Is(err, unix.EACCES) && chmodBeneath(dir, name, how) == nil {
		f, err = openBeneath(dir, name, how)
	}
	if errors.Is(err, unix.EXDEV) {
		return nil, volume.Errorf(volume.ErrPrecondition, "%s/%s is on another filesystem than its pool: unmount what is mounted there", dir.Name(), name)
	}
	return f, err
}

func chmodBeneath(dir *os.File, name string, how unix.OpenHow) error {
	how.Flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	f, err := openBeneath(dir, name, how)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.Chmod("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), 0o700)
}
