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

// dropLives is the number of volumes that go through their life at a time while nodes are away.
const dropLives = 400

// Phases of a drop.
const (
	before     = "before"
	unnoticed  = "just after"
	noticed    = "later"
	afterwards = "all are back"
)

var phases = []string{before, unnoticed, noticed, afterwards}

// drop contains the measurements while some nodes were away. Half of their drivers end in order; the
// others are halted and answer nothing, while the kernel keeps their connections and accepts more.
type drop struct {
	fleet   *fleet
	samples map[string]samples // of the healthy nodes, by phase
	needs   map[string]needs
	others  map[string][]outcome // calls for all nodes, or for a silent one
	visits  map[*group]*visits
	// back is the time from the restart of the nodes until they can be reached.
	back   map[*group]measure.Durations
	listen time.Duration // until all drivers that ended listen again
	whole  time.Duration // until all nodes can be listed
}

func measureDrop(ctx context.Context, f *fleet) *drop {
	d := &drop{
		fleet: f, samples: map[string]samples{}, needs: map[string]needs{}, others: map[string][]outcome{},
		visits: map[*group]*visits{f.ending: newVisits(), f.silent: newVisits()}, back: map[*group]measure.Durations{},
	}
	visiting, leave := context.WithCancel(ctx)
	var visitors sync.WaitGroup
	defer visitors.Wait()
	defer leave()
	for group, v := range d.visits {
		for _, n := range group.nodes {
			visitors.Go(func() { v.visit(visiting, f, n) })
		}
	}
	d.run(ctx)
	return d
}

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

func (d *drop) stop(g *group, how syscall.Signal) {
	d.visits[g].stopped()
	measure.Must(g.Signal(how))
}

func (d *drop) allNoticed() bool {
	return d.visits[d.fleet.ending].failing() == len(d.fleet.ending.nodes) && d.visits[d.fleet.silent].failing() == len(d.fleet.silent.nodes)
}

// phase calls healthy nodes at least once, and until a condition is true.
func (d *drop) phase(ctx context.Context, name string, until func() bool) {
	all := samples{}
	d.samples[name] = all
	for done := false; !done; done = until() {
		for _, n := range callers {
			all.live(ctx, d.fleet, d.fleet.healthy.nodes, dropLives, n)
		}
	}
	d.needs[name] = needsOf(ctx, d.fleet.controller, d.fleet.web)
}

// away is a phase in which nodes are away; other calls notice it meanwhile.
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

// callOthers makes calls for all nodes, or for a silent one, after the drivers in the ending group have
// ended.
func (d *drop) callOthers(ctx context.Context) []outcome {
	f := d.fleet
	<-f.ending.Ended() // only the silent ones are not noticed yet
	there := f.volumeOn(f.silent.nodes[0])
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
		{"ControllerUnpublish on a silent node", func(ctx context.Context) error { return unpublishVolume(ctx, f.routed, there) }},
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

func (f *fleet) volumeOn(n *member) *vol {
	return f.volumes[slices.IndexFunc(f.volumes, func(v *vol) bool { return v.node == n })]
}

// recover starts the nodes again.
func (d *drop) recover(ctx context.Context) {
	f := d.fleet
	d.visits[f.ending].close()
	d.visits[f.silent].close()
	begin := time.Now()
	var reached errgroup.Group
	var mu sync.Mutex
	for _, g := range []*group{f.ending, f.silent} {
		for _, n := range g.nodes {
			reached.Go(func() error {
				v := f.volumeOn(n)
				err := f.controller.Await(ctx, n.name, reachPoll, measure.Patience, func() bool { return getVolume(ctx, f.routed, v) == nil })
				mu.Lock()
				defer mu.Unlock()
				back := d.back[g]
				back.Add(time.Since(begin))
				d.back[g] = back
				return err
			})
		}
	}
	measure.Must(f.silent.Signal(syscall.SIGCONT))
	f.serve(ctx, f.ending)
	d.listen = time.Since(begin)
	measure.Must(reached.Wait())
	f.awaitComplete(ctx, reachPoll)
	d.whole = time.Since(begin)
}

// reachPoll is the interval of the calls to a node that comes back.
const reachPoll = 100 * time.Millisecond

// visits are calls to the nodes of a group, one per second and node.
type visits struct {
	mu       sync.Mutex
	since    time.Time // when the nodes were stopped
	closed   bool
	first    map[*member]time.Duration // duration of the first failed call,
	noticed  measure.Durations         // its time since the stop,
	later    measure.Durations         // and durations of the later failed calls
	again    map[*member]bool          // a later call failed too
	outcomes map[string]int            // by code
}

func newVisits() *visits {
	return &visits{first: map[*member]time.Duration{}, again: map[*member]bool{}, outcomes: map[string]int{}}
}

func (v *visits) stopped() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.since = time.Now()
}

// close ends the record when the nodes come back.
func (v *visits) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
}

// failing counts the nodes with two failed calls: the first fails with the old connection, the second
// because no new one can be made.
func (v *visits) failing() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.again)
}

// visit calls one node until ctx ends.
func (v *visits) visit(ctx context.Context, f *fleet, n *member) {
	there := f.volumeOn(n)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		start := time.Now()
		err := getVolume(limited, f.routed, there)
		cancel()
		if ctx.Err() == nil && err != nil {
			v.note(n, time.Since(start), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (v *visits) note(n *member, took time.Duration, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return
	}
	v.outcomes[status.Code(err).String()]++
	if _, again := v.first[n]; again {
		v.again[n] = true
		v.later.Add(took)
		return
	}
	v.first[n] = took
	v.noticed.Add(time.Since(v.since))
}

func (d *drop) String() string {
	f := d.fleet
	var b strings.Builder
	fmt.Fprintf(&b, "### %d of %d nodes drop\n\n", len(f.ending.nodes)+len(f.silent.nodes), len(f.nodes))
	fmt.Fprintf(&b, "The drivers of %d end in order, those of %d halt. Calls to healthy nodes, p50 / p99 in milliseconds, in brackets past the controller's driver:\n\n%s\n", len(f.ending.nodes), len(f.silent.nodes), d.healthy())
	fmt.Fprintf(&b, "Calls to nodes that are away, one a second to each:\n\n%s\n", d.dropped())
	fmt.Fprintf(&b, "Other calls meanwhile:\n\n%s\n", d.meanwhile())
	fmt.Fprintf(&b, "Goroutines of the controller's driver: %d %s, %d %s, %d when %s. All drivers that had ended listened again after %s, and all nodes could be listed after %s.\n",
		d.needs[before].goroutines, before, d.needs[noticed].goroutines, noticed, d.needs[afterwards].goroutines, afterwards, seconds(d.listen), seconds(d.whole))
	return b.String()
}

func (d *drop) healthy() string {
	t := markdown.Table{append([]string{"call", "callers"}, phases...)}
	for _, n := range callers {
		for _, c := range life {
			cells := []string{c.name, fmt.Sprint(n)}
			for _, phase := range phases {
				a, b := d.samples[phase][place{routed, c.name, n}], d.samples[phase][place{direct, c.name, n}]
				cells = append(cells, fmt.Sprintf("%s / %s (%s / %s)", millis(a.P50()), millis(a.At(99)), millis(b.P50()), millis(b.At(99))))
			}
			t.Row(cells...)
		}
	}
	return t.Text(true)
}

func (d *drop) dropped() string {
	t := markdown.Table{{"drivers", "noticed after, p50", "most", "first failed call, p50", "most", "later calls, p50 ms", "p99", "codes", "back after, p50", "most"}}
	for _, g := range []*group{d.fleet.ending, d.fleet.silent} {
		v := d.visits[g]
		first := measure.Durations(slices.Collect(maps.Values(v.first)))
		t.Row(g.name, seconds(v.noticed.P50()), seconds(v.noticed.At(100)), seconds(first.P50()), seconds(first.At(100)),
			millis(v.later.P50()), millis(v.later.At(99)), v.codes(), seconds(d.back[g].P50()), seconds(d.back[g].At(100)))
	}
	return t.Text(true)
}

func (v *visits) codes() string {
	var all []string
	for _, code := range slices.Sorted(maps.Keys(v.outcomes)) {
		all = append(all, fmt.Sprintf("%s %d times", code, v.outcomes[code]))
	}
	return strings.Join(all, ", ")
}

func (d *drop) meanwhile() string {
	t := markdown.Table{{"call", unnoticed, noticed}}
	for i, o := range d.others[unnoticed] {
		later := d.others[noticed][i]
		t.Row(o.what, o.code+" in "+seconds(o.took), later.code+" in "+seconds(later.took))
	}
	return t.Text(true)
}
