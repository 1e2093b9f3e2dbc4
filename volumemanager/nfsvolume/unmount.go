package nfsvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
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

// unmount takes away what is mounted at a path, and the empty directory. Whether something
// is mounted there, and whether its server answers, is found out without asking the mount:
// who asks waits with it.
//
// It does not detach lazily (MNT_DETACH): whether what was written arrives would never be
// known, and the machine would keep a mount that nobody sees.
func (p *Plugin) unmount(ctx context.Context, path string) error {
	for {
		at, err := mount.OnPath(path)
		if err != nil {
			return err
		}
		if at == nil {
			p.answered(path)
			return mount.RemoveTarget(path)
		}
		if !mount.IsNFS(at) {
			return fmt.Errorf("%s is mounted at %s, and not by the volume manager: unmount it", at.Source, path)
		}
		if err := p.takeAway(ctx, at, path); err != nil {
			return err
		}
	}
}

func (p *Plugin) takeAway(ctx context.Context, at *mount.Entry, path string) error {
	if mount.Answers(ctx, at) {
		p.answered(path)
		return flush(ctx, path)
	}
	if left := p.Patience - p.silentFor(path); left > 0 {
		return fmt.Errorf("the server of %s does not answer, and may not have all that was written: it is waited for, and given up in %s", at.Source, left.Round(time.Second))
	}
	return mount.ForceUnmountNFS(ctx, path)
}

// silentFor is how long a path's server has been silent.
func (p *Plugin) silentFor(path string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent[path].IsZero() {
		p.silent[path] = time.Now()
	}
	return time.Since(p.silent[path])
}

func (p *Plugin) answered(path string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.silent, path)
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
	dir, err := open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return mount.SyncFilesystem(dir)
}

// open opens the root of a mount.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
}
