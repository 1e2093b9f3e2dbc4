package flexvolume

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// probe is the result of the call init for one version of a driver's executable.
type probe struct {
	executable os.FileInfo
	started    time.Time
	done       chan struct{}
	// The following fields are set when done is closed.
	capabilities capabilities
	err          error
	retryAfter   time.Time // when a failed init may be repeated
}

const (
	// probePatience is the time after the start of init until which callers wait for its result. A
	// driver that hangs must not block them longer.
	probePatience = 2 * time.Second
	// probeAgain is the interval before a failed init is repeated.
	probeAgain = 10 * time.Second
)

// capabilities returns the driver's capabilities. They are cached until the executable changes.
func (d *driver) capabilities(ctx context.Context) (capabilities, error) {
	if err := checkDriver(d.name); err != nil {
		return capabilities{}, err
	}
	info, err := os.Stat(d.executable())
	if err != nil {
		return capabilities{}, fmt.Errorf("driver %s is not installed (%w): put its executable at this path", d.name, err)
	}
	p := d.probe(context.WithoutCancel(ctx), info)
	select {
	case <-p.done:
	case <-ctx.Done():
		return capabilities{}, ctx.Err()
	case <-time.After(time.Until(p.started.Add(probePatience))):
	}
	select {
	case <-p.done:
		return p.capabilities, p.err
	default:
		return capabilities{}, fmt.Errorf("driver %s: init: no answer yet: check what the driver waits for", d.name)
	}
}

// probe returns the probe of this executable. It starts a new one if there is none, or if the last one
// failed and may be repeated.
func (d *driver) probe(ctx context.Context, info os.FileInfo) *probe {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.probes[d.name]
	if p != nil && plugins.Unchanged(p.executable, info) && !p.stale() {
		return p
	}
	p = &probe{executable: info, started: time.Now(), done: make(chan struct{})}
	d.probes[d.name] = p
	go func() {
		a, err := d.call(ctx, nil, "init")
		if err != nil {
			err = fmt.Errorf("driver %s cannot be used: %w", d.name, err)
		}
		p.capabilities, p.err, p.retryAfter = a.Capabilities, err, time.Now().Add(probeAgain)
		close(p.done)
		if time.Since(p.started) > probePatience {
			d.changed()
		}
	}()
	return p
}

// stale reports whether a failed probe may be repeated.
func (p *probe) stale() bool {
	select {
	case <-p.done:
		return p.err != nil && time.Now().After(p.retryAfter)
	default:
		return false
	}
}
