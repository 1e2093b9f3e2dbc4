package nfsvolume

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"
)

// recycling has a mount for each volume that is being scrubbed.
func (p *Plugin) recycling() string { return filepath.Join(p.host.Paths().Plugin(Name), "recycling") }

// own has one at a time scrub or unmount what is at a path.
func (p *Plugin) own(path string) (release func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.owned[path] {
		return nil, false
	}
	p.owned[path] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.owned, path)
	}, true
}

// sweepAgain is how soon what could not be unmounted is tried again.
const sweepAgain = 30 * time.Second

// Run unmounts what calls of Recycle have left that were cut off, as no other may come for
// their volumes. It returns when nothing is left, or ctx ended.
func (p *Plugin) Run(ctx context.Context) error {
	for {
		err := p.sweep(ctx)
		if err == nil {
			return nil
		}
		klog.FromContext(ctx).Error(err, "What is left of recycling cannot be unmounted yet", "again", sweepAgain)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(sweepAgain):
		}
	}
}

func (p *Plugin) sweep(ctx context.Context) error {
	left, err := os.ReadDir(p.recycling())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range left {
		at := filepath.Join(p.recycling(), e.Name())
		if release, ok := p.own(at); ok {
			err = errors.Join(err, p.unmount(ctx, at))
			release()
		}
	}
	return err
}
