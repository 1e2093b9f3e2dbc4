package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// maxDepth is how many folders deep a tree is followed, with a descriptor each.
// What lies deeper is moved up into the trash first.
const maxDepth = 64

// removeTree removes name from an open directory, and all below it but what is on
// another filesystem: where something is mounted nothing is removed. Links are
// removed, not followed. What cannot be removed is passed over; the error is that of
// the first. It stops when ctx ends.
func (p *Pool) removeTree(ctx context.Context, dir *os.File, name string) error {
	err := p.removeAny(ctx, dir, name, 0)
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
		if err := renameat(dir, name, p.trash, "deep."+NewUUID()); err != nil {
			return orGone(err)
		}
		notify(p.reaper.wake)
		return nil
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

// removeEntry removes one, and makes the directory writable if it is not: to a
// server that maps root away its owner is as good as any other.
func (p *Pool) removeEntry(ctx context.Context, dir *os.File, e os.DirEntry, depth int) error {
	remove := p.removeAny
	if e.IsDir() {
		remove = p.removeDir
	}
	err := remove(ctx, dir, e.Name(), depth)
	if errors.Is(err, unix.EACCES) && dir.Chmod(0o700) == nil {
		err = remove(ctx, dir, e.Name(), depth)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", e.Name(), err)
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
