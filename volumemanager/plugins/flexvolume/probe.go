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
	of      os.FileInfo
	started time.Time
	done    chan struct{}
	// These are set when done is closed.
	capabilities capabilities
	err          error
	until        time.Time // when a failed init may be repeated
}

const (
	// probePatience limits the wait for init, from its start, for all callers together: a driver
	// that hangs must not block them.
	probePatience = 2 * time.Second
	// probeAgain is the interval before a failed init is repeated.
	probeAgain = 10 * time.Second
)

// can returns the driver's capabilities. They are cached until the executable changes.
func (d *driver) can(ctx context.Context) (capabilities, error) {
	if err := checkDriver(d.name); err != nil {
		return capabilities{}, err
	}
	info, err := os.Stat(d.executable())
	if err != nil {
		return capabilities{}, fmt.Errorf("driver %s is not installed (%w): put its executable there", d.name, err)
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
		return capabilities{}, fmt.Errorf("driver %s: init: no answer yet: check what it waits for", d.name)
	}
}

// probe starts init, unless it runs or has run for this executable.
func (d *driver) probe(ctx context.Context, info os.FileInfo) *probe {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.probes[d.name]
	if p != nil && plugins.Unchanged(p.of, info) && !p.stale() {
		return p
	}
	p = &probe{of: info, started: time.Now(), done: make(chan struct{})}
	d.probes[d.name] = p
	go func() {
		a, err := d.call(ctx, nil, "init")
		if err != nil {
			err = fmt.Errorf("driver %s cannot be used: %w", d.name, err)
		}
		p.capabilities, p.err, p.until = a.Capabilities, err, time.Now().Add(probeAgain)
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
		return p.err != nil && time.Now().After(p.until)
	default:
		return false
	}
}
