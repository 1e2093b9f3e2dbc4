package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
)

const (
	// idleWithin is how long a mount may stay busy that nothing uses: a call for its
	// usage, or a process that was just killed, may still have it open.
	idleWithin = 100 * time.Millisecond
	// abortedWithin is how long a mount may stay busy once the calls of its users fail.
	abortedWithin = 10 * time.Second
	// flushWithin is how long one call of NFSUnmounter waits for a server that answers
	// slowly. The flush continues, and the next call joins it.
	flushWithin = 30 * time.Second
)

// Unmount removes the mount at path without following a link there. The filesystem stays
// mounted if it has other mounts.
func Unmount(path string) error {
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
		return &Error{Op: "umount2", Target: path, Err: err}
	}
	return nil
}

// UnmountIdle is Unmount for a path that nothing should use. It retries on EBUSY for idleWithin.
func UnmountIdle(ctx context.Context, path string) error {
	return retry.For(ctx, idleWithin, func() (bool, error) {
		err := Unmount(path)
		return errors.Is(err, unix.EBUSY), err
	})
}

// UnmountBusy is UnmountIdle for a mount whose storage is on a server. While the path is
// busy, abandon gives up the server, and exactly one other mount shows the filesystem,
// abort makes the calls fail that wait for the server, until its context ends. With more
// mounts, others would wait for the server too.
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

// UnmountAborting unmounts the filesystem of a device whose storage is on a server, and
// has the writes fail that the unmount waits for if abandon gives up the server. abort
// does that until its context ends or the device is free.
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

// Aborting runs a step that waits for storage which does not answer, and abort, which
// makes fail what the step waits for, until its context ends or there is nothing left to
// abort. In that case the step is not waited for if done says that it had its effect.
func Aborting(ctx context.Context, abort, step func(context.Context) error, done func() bool) error {
	until, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	aborted, stepped := make(chan struct{}), make(chan error, 1)
	go func() { defer close(aborted); _ = abort(until) }() // the step reports how it ended
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

// flushing holds the flushes in progress by path: a thread that waits for a server cannot be
// interrupted, so each path has at most one.
var flushing singleflight.Group

// flush returns when the server of an NFS mount has all that was written, or when ctx ends
// (ErrNotWritten): the flush then continues, and the next call joins it. It does not unmount:
// when a call has ended, another one may have mounted or published the volume again.
func flush(ctx context.Context, path string) error {
	path = filepath.Clean(path)
	done := flushing.DoChan(path, func() (any, error) {
		// A server that does not know the directory any more accepts nothing, now or later.
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

func syncMount(path string) error {
	dir, err := os.OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return SyncFilesystem(dir)
}

// NFSUnmounter unmounts NFS mounts whose servers may be silent. Its methods are safe for
// concurrent use.
type NFSUnmounter struct {
	// Patience is how long a server may be silent before a mount is given up, and with it
	// what was written and not flushed.
	Patience time.Duration

	mu sync.Mutex
	// silent has since when servers have been silent, by the path of the mount.
	silent map[string]time.Time
}

// NewNFSUnmounter makes an unmounter whose Patience is two minutes.
func NewNFSUnmounter() *NFSUnmounter {
	return &NFSUnmounter{Patience: 2 * time.Minute, silent: map[string]time.Time{}}
}

// Unmount removes the NFS mounts at a path, one over the other, and returns what is
// mounted there then, which is no NFS mount; nil if nothing is. It returns once the server
// has what was written. A server that is silent for longer than Patience is given up
// (ForceUnmountNFS); before that the call fails. The mount itself is not asked whether its
// server answers: that call would wait with it.
//
// There is no lazy unmount (MNT_DETACH): it would not tell whether what was written
// arrives, and the machine would keep a mount without a path.
func (u *NFSUnmounter) Unmount(ctx context.Context, path string) (*Entry, error) {
	for {
		at, err := OnPath(path)
		if err != nil {
			return nil, err
		}
		if at == nil || !IsNFS(at) {
			u.answered(path)
			return at, nil
		}
		if err := u.unmount(ctx, at, path); err != nil {
			return nil, err
		}
	}
}

func (u *NFSUnmounter) unmount(ctx context.Context, at *Entry, path string) error {
	if Answers(ctx, at) {
		u.answered(path)
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
	if len(beside) > 0 { // nothing is lost with this mount, and force would fail the calls of others
		return Unmount(path)
	}
	if left := u.Patience - u.silentFor(path); left > 0 {
		return fmt.Errorf("the server of %s does not answer, and may not have all that was written: it is given up in %s", at.Source, left.Round(time.Second))
	}
	return ForceUnmountNFS(ctx, path)
}

// silentFor is how long the server of a path has been silent.
func (u *NFSUnmounter) silentFor(path string) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.silent[path].IsZero() {
		u.silent[path] = time.Now()
	}
	return time.Since(u.silent[path])
}

func (u *NFSUnmounter) answered(path string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.silent, path)
}
