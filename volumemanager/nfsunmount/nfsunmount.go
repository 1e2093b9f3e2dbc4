package nfsunmount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/trivet-csi/trivet/mount"
)

// flushWithin is how long one call waits for a server that answers, and is slow. The work
// goes on, and the next call joins it.
const flushWithin = 30 * time.Second

// flushing are the mounts that are being flushed and unmounted, by path: a thread that
// waits for a server cannot be called off, so there is one at most for each.
var flushing singleflight.Group

// Unmounter takes NFS mounts away. Its methods are safe for concurrent use.
type Unmounter struct {
	// Patience is how long a server may be silent before a mount is given up: what was
	// written and not flushed is lost then.
	Patience time.Duration

	mu sync.Mutex
	// silent has since when servers were found silent, by the path that waits for them.
	silent map[string]time.Time
}

// New makes one whose Patience is two minutes.
func New() *Unmounter { return &Unmounter{Patience: 2 * time.Minute, silent: map[string]time.Time{}} }

// Unmount takes away the NFS mounts at a path, one over the other, and returns what is
// mounted there then, which is no NFS mount; nil if nothing is. It returns once the server
// has what was written. A server that is silent for longer than Patience is given up
// (mount.ForceUnmountNFS): until then, and if another call has to wait for it, that is an
// error. Whether something is mounted there, and whether its server answers, is found out
// without asking the mount: who asks waits with it.
//
// It does not detach lazily (MNT_DETACH): whether what was written arrives would never be
// known, and the machine would keep a mount that nobody sees.
func (u *Unmounter) Unmount(ctx context.Context, path string) (*mount.Entry, error) {
	for {
		at, err := mount.OnPath(path)
		if err != nil {
			return nil, err
		}
		if at == nil || !mount.IsNFS(at) {
			u.answered(path)
			return at, nil
		}
		if err := u.takeAway(ctx, at, path); err != nil {
			return nil, err
		}
	}
}

func (u *Unmounter) takeAway(ctx context.Context, at *mount.Entry, path string) error {
	if mount.Answers(ctx, at) {
		u.answered(path)
		return flush(ctx, path)
	}
	beside, err := mount.Beside(at)
	if err != nil {
		return err
	}
	if len(beside) > 0 { // nothing is lost with this one, and force would have the calls of others fail
		return mount.Unmount(path)
	}
	if left := u.Patience - u.silentFor(path); left > 0 {
		return fmt.Errorf("the server of %s does not answer, and may not have all that was written: it is waited for, and given up in %s", at.Source, left.Round(time.Second))
	}
	return mount.ForceUnmountNFS(ctx, path)
}

// silentFor is how long a path's server has been silent.
func (u *Unmounter) silentFor(path string) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.silent[path].IsZero() {
		u.silent[path] = time.Now()
	}
	return time.Since(u.silent[path])
}

func (u *Unmounter) answered(path string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.silent, path)
}

// flush unmounts with what was written on the server. It is written while the mount still
// stands: an unmount that waits for the server could not be repeated.
func flush(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, flushWithin)
	defer cancel()
	done := flushing.DoChan(path, func() (any, error) {
		// A server that does not know the directory any more takes nothing, now or later.
		if err := syncMount(path); err != nil && !errors.Is(err, syscall.ESTALE) {
			return nil, fmt.Errorf("what was written is not on the server yet: %w", err)
		}
		return nil, mount.Unmount(path)
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("what was written to %s is not on its server yet: it goes on: %w", path, ctx.Err())
	}
}

func syncMount(path string) error {
	dir, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return mount.SyncFilesystem(dir)
}
