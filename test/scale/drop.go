package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// dropLives is the number of volumes for which each phase makes all calls of a volume's life.
const dropLives = 400

// Phases of a drop. The phase unnoticed lasts until the controller's driver has noticed all nodes
// that are away and called.
const (
	before     = "before"
	unnoticed  = "just after"
	noticed    = "later"
	afterwards = "after recovery"
)

// phases contains the phases in order.
var phases = []string{before, unnoticed, noticed, afterwards}

// drop contains the measurements while some nodes are away. Half of their drivers are ended by
// SIGTERM. The others are stopped by SIGSTOP: they answer nothing, but the kernel keeps their
// connections and accepts new ones.
type drop struct {
	fleet     *fleet
	samples   map[string]samples   // of the healthy nodes, by phase
	resources map[string]resources // of the controller's driver, by phase
	others    map[string][]outcome // the results of callOthers, by phase
	probes    map[*group]*probes   // of ending and silent
	// The other fields are times since the recovery began. back is the time until the controller's
	// driver reaches a node again.
	back   map[*group]measure.Durations
	listen time.Duration // until all drivers that ended listen again
	listed time.Duration // until the volumes of all nodes can be listed
}

// measureDrop measures all phases, while it probes the nodes that drop.
func measureDrop(ctx context.Context, f *fleet) *drop {
	d := &drop{
		fleet: f, samples: map[string]samples{}, resources: map[string]resources{}, others: map[string][]outcome{},
		probes: map[*group]*probes{f.ending: newProbes(), f.silent: newProbes()}, back: map[*group]measure.Durations{},
	}
	probing, stop := context.WithCancel(ctx)
	var probers sync.WaitGroup
	defer probers.Wait()
	defer stop()
	for group, p := range d.probes {
		for _, n := range group.probed() {
			probers.Go(func() { p.probe(probing, f, n) })
		}
	}
	d.run(ctx)
	return d
}

// run runs the phases one after the other.
func (d *drop) run(ctx context.Context) {
	once := func() bool { return true }
	d.phase(ctx, before, once)
	d.stop(d.fleet.ending, syscall.SIGTERM)
	d.stop(d.fleet.silent, syscall.SIGSTOP)
	d.away(ctx, unnoticed, d.allNoticed)
	d.away(ctx, noticed, once)
	d.recover(ctx)
	d.phase(ctx, afterwards, once)
}

// stop sends a signal that ends or stops the drivers of a group.
func (d *drop) stop(g *group, s syscall.Signal) {
	d.probes[g].stopped()
	g.signal(s)
}

// allNoticed reports whether two calls to each probed node have failed.
func (d *drop) allNoticed() bool {
	for group, p := range d.probes {
		if p.failing() < len(group.probed()) {
			return false
		}
	}
	return true
}

// maxProbed limits the nodes of a group that are called all the time, because thousands of calls per second would disturb
// the measured calls.
const maxProbed = 50

// probed returns the nodes of the group that are called all the time.
func (g *group) probed() []*node { return g.nodes[:min(maxProbed, len(g.nodes))] }

// phase measures the calls to healthy nodes, once and then again until a condition is true.
func (d *drop) phase(ctx context.Context, name string, until func() bool) {
	all := samples{}
	d.samples[name] = all
	for done := false; !done; done = until() {
		for _, n := range callers {
			all.live(ctx, d.fleet, d.fleet.healthy.nodes, dropLives, n)
		}
	}
	d.resources[name] = resourcesOf(ctx, d.fleet.controller, d.fleet.web)
}

// away is a phase in which nodes are away. It also makes the calls that reach these nodes.
func (d *drop) away(ctx context.Context, name string, until func() bool) {
	others := make(chan []outcome, 1)
	go func() { others <- d.callOthers(ctx) }()
	d.phase(ctx, name, until)
	d.others[name] = <-others
}

// outcome is the duration and the result of a call.
type outcome struct {
	what string
	took time.Duration
	code string
}

// callOthers makes calls that reach all nodes, and one that reaches a silent node. It begins when the
// drivers of the ending group have ended.
func (d *drop) callOthers(ctx context.Context) []outcome {
	f := d.fleet
	f.ending.awaitEnd()
	onSilent := f.volumeOn(f.silent.nodes[0])
	calls := []struct {
		what string
		do   func(context.Context) error
	}{
		{"ListVolumes", func(ctx context.Context) error {
			_, err := f.routed.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 100})
			return err
		}},
		{anywhereCall, func(ctx context.Context) error {
			v := &vol{name: "meanwhile"}
			if err := createAnywhere(ctx, f.routed, v); err != nil {
				return err
			}
			return deleteVolume(ctx, f.routed, v)
		}},
		{"ControllerUnpublish on a silent node", func(ctx context.Context) error { return unpublishVolume(ctx, f.routed, onSilent) }},
	}
	out := make([]outcome, len(calls))
	var group sync.WaitGroup
	for i, c := range calls {
		group.Go(func() {
			limited, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			start := time.Now()
			err := c.do(limited)
			out[i] = outcome{c.what, time.Since(start), status.Code(err).String()}
		})
	}
	group.Wait()
	return out
}

// volumeOn returns one of the volumes on a node that exist during all measurements.
func (f *fleet) volumeOn(n *node) *vol {
	return f.volumes[slices.IndexFunc(f.volumes, func(v *vol) bool { return v.node == n })]
}

// recover lets the silent group continue and starts the ending group again.
func (d *drop) recover(ctx context.Context) {
	f := d.fleet
	d.probes[f.ending].close()
	d.probes[f.silent].close()
	begin := time.Now()
	var reached errgroup.Group
	var mu sync.Mutex
	for _, g := range []*group{f.ending, f.silent} {
		for _, n := range g.probed() {
			reached.Go(func() error {
				v := f.volumeOn(n)
				err := f.controller.Await(ctx, n.name, reachPoll, startTimeout, func() bool { return getVolume(ctx, f.routed, v) == nil })
				mu.Lock()
				defer mu.Unlock()
				back := d.back[g]
				back.Add(time.Since(begin))
				d.back[g] = back
				return err
			})
		}
	}
	f.silent.signal(syscall.SIGCONT)
	f.serve(ctx, f.ending)
	d.listen = time.Since(begin)
	measure.Must(reached.Wait())
	f.awaitComplete(ctx)
	d.listed = time.Since(begin)
}

// reachPoll is the interval of the calls to a node that recovers.
const reachPoll = 100 * time.Millisecond

// probes records the failed calls to the nodes of a group. Each node is called once per second.
type probes struct {
	mu       sync.Mutex
	since    time.Time // when the drivers of the group were signaled
	closed   bool
	first    map[*node]time.Duration // the duration of the first failed call to each node
	noticed  measure.Durations       // from since until the first failed call to each node returned
	later    measure.Durations       // the durations of all later failed calls
	again    map[*node]bool          // the nodes to which at least two calls have failed
	outcomes map[string]int          // the number of failed calls, by code
}

func newProbes() *probes {
	return &probes{first: map[*node]time.Duration{}, again: map[*node]bool{}, outcomes: map[string]int{}}
}

// stopped records the time at which the drivers of the group are signaled.
func (p *probes) stopped() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.since = time.Now()
}

// close ends the recording before the nodes recover.
func (p *probes) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
}

// failing counts the nodes to which two calls have failed. The first call fails with the old
// connection, the second because the controller's driver cannot connect again.
func (p *probes) failing() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.again)
}

// probe calls one node until ctx ends.
func (p *probes) probe(ctx context.Context, f *fleet, n *node) {
	onNode := f.volumeOn(n)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		start := time.Now()
		err := getVolume(limited, f.routed, onNode)
		cancel()
		if ctx.Err() == nil && err != nil {
			p.note(n, time.Since(start), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// note records a failed call to a node.
func (p *probes) note(n *node, took time.Duration, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.outcomes[status.Code(err).String()]++
	if _, again := p.first[n]; again {
		p.again[n] = true
		p.later.Add(took)
		return
	}
	p.first[n] = took
	p.noticed.Add(time.Since(p.since))
}

func (d *drop) String() string {
	f := d.fleet
	var b strings.Builder
	fmt.Fprintf(&b, "### %d of %d nodes drop\n\n", len(f.ending.nodes)+len(f.silent.nodes), len(f.nodes))
	fmt.Fprintf(&b, "SIGTERM ends the drivers of %d nodes, and SIGSTOP stops those of %d. Calls to healthy nodes, p50 / p99 in milliseconds; in parentheses, the direct calls without the controller's driver:\n\n%s\n", len(f.ending.nodes), len(f.silent.nodes), d.healthy())
	fmt.Fprintf(&b, "Calls to nodes that are away, one per second to each of up to %d nodes:\n\n%s\n", maxProbed, d.dropped())
	fmt.Fprintf(&b, "Other calls while the nodes are away:\n\n%s\n", d.meanwhile())
	fmt.Fprintf(&b, "Goroutines of the controller's driver: %d %s, %d %s, %d %s. All drivers that had ended listened again after %s, and the volumes of all nodes could be listed after %s.\n",
		d.resources[before].goroutines, before, d.resources[noticed].goroutines, noticed, d.resources[afterwards].goroutines, afterwards, seconds(d.listen), seconds(d.listed))
	return b.String()
}

// healthy returns a table of the calls to healthy nodes in each phase.
func (d *drop) healthy() string {
	t := markdown.Table{append([]string{"call", "callers"}, phases...)}
	for _, n := range callers {
		for _, c := range life {
			cells := []string{c.name, fmt.Sprint(n)}
			for _, phase := range phases {
				a, b := d.samples[phase][sampleKey{routed, c.name, n}], d.samples[phase][sampleKey{direct, c.name, n}]
				cells = append(cells, fmt.Sprintf("%s / %s (%s / %s)", millis(a.P50()), millis(a.At(99)), millis(b.P50()), millis(b.At(99))))
			}
			t.Row(cells...)
		}
	}
	return t.Text(true)
}

// dropped returns a table of the calls to nodes that are away.
func (d *drop) dropped() string {
	t := markdown.Table{{"nodes", "first call failed after, p50", "max", "duration of that call, p50", "max", "later failed calls, p50 ms", "p99", "codes", "reached again after, p50", "max"}}
	for _, g := range []*group{d.fleet.ending, d.fleet.silent} {
		p := d.probes[g]
		first := measure.Durations(slices.Collect(maps.Values(p.first)))
		t.Row(g.name, seconds(p.noticed.P50()), seconds(p.noticed.At(100)), seconds(first.P50()), seconds(first.At(100)),
			millis(p.later.P50()), millis(p.later.At(99)), p.codes(), seconds(d.back[g].P50()), seconds(d.back[g].At(100)))
	}
	return t.Text(true)
}

// codes returns the number of failed calls by code, as text.
func (p *probes) codes() string {
	var all []string
	for _, code := range slices.Sorted(maps.Keys(p.outcomes)) {
		all = append(all, fmt.Sprintf("%s %d times", code, p.outcomes[code]))
	}
	return strings.Join(all, ", ")
}

// meanwhile returns a table of the results of callOthers.
func (d *drop) meanwhile() string {
	t := markdown.Table{{"call", unnoticed, noticed}}
	for i, o := range d.others[unnoticed] {
		later := d.others[noticed][i]
		t.Row(o.what, o.code+" in "+seconds(o.took), later.code+" in "+seconds(later.took))
	}
	return t.Text(true)
}
