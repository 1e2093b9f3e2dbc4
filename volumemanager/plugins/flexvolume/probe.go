package flexvolume

import (
	"context"
	"fmt"
	"os"
	"time"
)

// probe is what a driver answered to init, once for each executable that it has had.
type probe struct {
	of      os.FileInfo
	started time.Time
	done    chan struct{}
	// These are set when done is closed.
	capabilities capabilities
	err          error
	until        time.Time // when an error counts no more
}

const (
	// probePatience is how long after its start init is waited for by those who ask for
	// capabilities, all together: nobody hangs with a driver.
	probePatience = 2 * time.Second
	// probeAgain is how long an init that failed is not repeated.
	probeAgain = 10 * time.Second
)

// can asks a driver what it can do. The answer is kept until the executable is another.
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
		return capabilities{}, fmt.Errorf("driver %s: init: it gives no answer yet: look at what it waits for", d.name)
	}
}

// probe starts init, unless that was done for this executable, or is under way.
func (d *driver) probe(ctx context.Context, info os.FileInfo) *probe {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.probes[d.name]
	if p != nil && same(p.of, info) && !p.stale() {
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

// stale tells whether a probe that failed may be repeated.
func (p *probe) stale() bool {
	select {
	case <-p.done:
		return p.err != nil && time.Now().After(p.until)
	default:
		return false
	}
}

func same(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
