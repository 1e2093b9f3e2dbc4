package nfsvolume

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// recycling returns the directory with a mount for each volume that is being recycled.
func (p *Plugin) recycling() string { return filepath.Join(p.host.Paths().Plugin(Name), "recycling") }

// acquire reserves the mount at a path for the caller. ok is false while another caller holds the
// reservation.
func (p *Plugin) acquire(path string) (release func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy[path] {
		return nil, false
	}
	p.busy[path] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.busy, path)
	}, true
}

// sweepInterval is the interval between attempts to unmount.
const sweepInterval = 30 * time.Second

// Run unmounts the mounts that interrupted calls of Recycle have left, because Recycle may not be called
// again for their volumes. It returns when no mount is left, or when ctx ends.
func (p *Plugin) Run(ctx context.Context) error {
	for {
		err := p.sweep(ctx)
		if err == nil {
			return nil
		}
		klog.FromContext(ctx).Error(err, "Mounts of interrupted recycling cannot be unmounted yet", "retryAfter", sweepInterval)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(sweepInterval):
		}
	}
}

// sweep unmounts the mounts for recycling that no call uses.
func (p *Plugin) sweep(ctx context.Context) error {
	left, err := plugins.Entries(p.recycling())
	for _, e := range left {
		at := filepath.Join(p.recycling(), e.Name())
		if release, ok := p.acquire(at); ok {
			err = errors.Join(err, p.unmount(ctx, at))
			release()
		}
	}
	return err
}
