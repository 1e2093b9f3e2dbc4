package mount

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	// idleWithin is the time for which an unused mount may stay busy, because a call that reads its usage, or
	// a process that was just killed, may still have the mount open.
	idleWithin = 100 * time.Millisecond
	// abortedWithin is the time for which a mount may stay busy while the I/O calls of its users are aborted.
	abortedWithin = 10 * time.Second
	// flushWithin is the time for which one call of NFSUnmounter waits for a slow server. The
	// flush continues, and the next call joins it.
	flushWithin = 30 * time.Second
)

// Unmount removes the mount at path, and does not follow a symbolic link at path. The filesystem
// stays mounted if it has other mounts.
func Unmount(path string) error {
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
		return &Error{Op: "umount2", Target: path, Err: err}
	}
	return nil
}

// UnmountIdle does the same as Unmount for an unused path. It retries on EBUSY for idleWithin.
func UnmountIdle(ctx context.Context, path string) error {
	return retry.For(ctx, idleWithin, func() (bool, error) {
		err := Unmount(path)
		return errors.Is(err, unix.EBUSY), err
	})
}

// UnmountBusy does the same as UnmountIdle for a mount whose storage is on a server. If the path stays busy and
// abandon returns true, abort makes the I/O calls fail that wait for the server, until its context ends. abort is
// called only if the filesystem has exactly one other mount, at the path beside, because with more mounts the calls
// of other users would fail, too.
func UnmountBusy(ctx context.Context, path string, abandon Abandon, abort func(ctx context.Context, beside string) error) error {
	busy := UnmountIdle(ctx, path)
	if !errors.Is(busy, unix.EBUSY) {
		return busy
	}
	e, err := OnPath(path)
	if err != nil || e == nil {
		return errors.Join(busy, err)
	}
	if force, err := abandonMount(ctx, e, abandon); err != nil || !force {
		return busy
	}
	beside, err := Beside(e)
	if err != nil || len(beside) != 1 {
		return errors.Join(busy, err)
	}
	return Aborting(ctx,
		func(ctx context.Context) error { return abort(ctx, beside[0]) },
		func(ctx context.Context) error {
			return retry.For(ctx, abortedWithin, func() (bool, error) {
				err := UnmountIdle(ctx, path)
				return errors.Is(err, unix.EBUSY), err
			})
		},
		func() bool { return false })
}

// UnmountAborting unmounts the filesystem of a device whose storage is on a server. If abandon returns true,
// abort makes the writes fail that the unmount waits for, until its context ends or the device is unused.
func UnmountAborting(ctx context.Context, path string, abandon Abandon, abort func(context.Context) error) error {
	e, err := OnPath(path)
	if err != nil || e == nil {
		return err
	}
	force, err := abandonMount(ctx, e, abandon)
	if err != nil {
		return err
	}
	unmount := func(ctx context.Context) error { return UnmountIdle(ctx, path) }
	if !force {
		return unmount(ctx)
	}
	return Aborting(ctx, abort, unmount, func() bool {
		now, err := OnPath(path)
		return err == nil && (now == nil || now.ID != e.ID)
	})
}

// Aborting runs step and abort concurrently. step waits for storage that does not respond. abort makes the I/O
// calls fail that step waits for, until its context ends or no such calls remain. If abort returns first and
// done reports that step has taken effect, Aborting does not wait for step.
func Aborting(ctx context.Context, abort, step func(context.Context) error, done func() bool) error {
	until, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	aborted, stepped := make(chan struct{}), make(chan error, 1)
	go func() { defer close(aborted); _ = abort(until) }() // only the error of step is returned
	go func() { stepped <- step(ctx) }()
	select {
	case err := <-stepped:
		stop()
		<-aborted
		return err
	case <-aborted:
		if done() {
			return nil
		}
		return <-stepped
	}
}

// flushing holds the flushes in progress by path. A path has at most one flush, because a thread that
// waits for a server cannot be interrupted.
var flushing singleflight.Group

// flush returns when the server of an NFS mount has all writes, or when ctx ends (ErrNotWritten). In the
// latter case the flush continues, and the next call joins it. The continued flush does not unmount, because
// another call may have mounted or published the volume again.
func flush(ctx context.Context, path string) error {
	path = filepath.Clean(path)
	done := flushing.DoChan(path, func() (any, error) {
		// ESTALE is no error, because a server without the directory never accepts the writes.
		if err := syncMount(path); err != nil && !errors.Is(err, unix.ESTALE) {
			return nil, fmt.Errorf("%w: %w", ErrNotWritten, err)
		}
		return nil, nil
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("%w: writing to the server of %s continues: %w", ErrNotWritten, path, ctx.Err())
	}
}

// syncMount writes the dirty pages of the mount at path.
func syncMount(path string) error {
	dir, err := sys.OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer dir.Close()
	return SyncFilesystem(dir)
}

// NFSUnmounter unmounts NFS mounts whose servers may not respond. Its methods are safe for concurrent
// use.
type NFSUnmounter struct {
	// Patience is the time for which a server must not respond before its mount is unmounted by force. Writes
	// that the server has not received are then lost.
	Patience time.Duration

	mu sync.Mutex
	// silentSince holds the time at which a server was first found not to respond, by the path of the mount.
	silentSince map[string]time.Time
}

// NewNFSUnmounter returns an unmounter whose Patience is two minutes.
func NewNFSUnmounter() *NFSUnmounter {
	return &NFSUnmounter{Patience: 2 * time.Minute, silentSince: map[string]time.Time{}}
}

// Unmount removes all NFS mounts at a path. It returns the remaining mount at the path, which is not an NFS
// mount, or nil. If the server responds, Unmount waits until the server has all writes. If the server does not
// respond, Unmount fails until Patience has passed, and then unmounts by force (ForceUnmountNFS). Unmount does
// not check the server through the mount, because that check would block, too.
//
// Unmount does not unmount lazily (MNT_DETACH), because a lazy unmount does not report whether the writes
// reach the server, and leaves a mount without a path.
func (u *NFSUnmounter) Unmount(ctx context.Context, path string) (*Entry, error) {
	for {
		at, err := OnPath(path)
		if err != nil {
			return nil, err
		}
		if at == nil || !IsNFS(at) {
			u.setAnswered(path)
			return at, nil
		}
		if err := u.unmount(ctx, at, path); err != nil {
			return nil, err
		}
	}
}

// unmount removes the NFS mount at, which is the topmost at path.
func (u *NFSUnmounter) unmount(ctx context.Context, at *Entry, path string) error {
	if Answers(ctx, at) {
		u.setAnswered(path)
		ctx, cancel := context.WithTimeout(ctx, flushWithin)
		defer cancel()
		if err := flush(ctx, path); err != nil {
			return err
		}
		return UnmountIdle(ctx, path)
	}
	beside, err := Beside(at)
	if err != nil {
		return err
	}
	if len(beside) > 0 { // the other mounts keep the dirty pages, and MNT_FORCE would make their calls fail
		return Unmount(path)
	}
	if left := u.Patience - u.silentFor(path); left > 0 {
		return fmt.Errorf("the server of %s does not answer, and may not have all writes: the mount will be removed by force in %s",
			at.Source, left.Round(time.Second))
	}
	return ForceUnmountNFS(ctx, path)
}

// silentFor returns the time for which the server of a path has not responded.
func (u *NFSUnmounter) silentFor(path string) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.silentSince[path].IsZero() {
		u.silentSince[path] = time.Now()
	}
	return time.Since(u.silentSince[path])
}

// setAnswered forgets since when the server of a path has not responded.
func (u *NFSUnmounter) setAnswered(path string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.silentSince, path)
}
