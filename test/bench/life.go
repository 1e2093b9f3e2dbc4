package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// Names of the driver and of the floors.
const (
	trivet       = "trivet"
	floorName    = "floor"
	floorMkfs    = "floor-mkfs"
	floorDurable = "floor-fsync"
)

// manyCallers is the number of simultaneous callers.
const manyCallers = 8

// contender is a server that is measured in turns with other contenders.
type contender struct {
	*server
	clients []*client
	class   class  // of its volumes
	calls   []call // that are measured
	// trash is the directory of deleted volumes, which the server removes in the background; empty if
	// the server has none.
	trash string
}

// lifeResult contains the times of all calls in a volume's life.
type lifeResult struct {
	samples samples
	calls   []call // in the order in which they are made
	callers []int  // the numbers of simultaneous callers, in ascending order
	volumes int    // of each server in each pass
	passes  int
}

// measureLife makes all calls of a volume's life on all servers.
func measureLife(ctx context.Context, g *testbed, o options) *lifeResult {
	driver := startTrivet(ctx, g, o.binary, trivet, ext4Of(gib))
	contenders := append([]*contender{driver}, startFloors(ctx, g, driver.class, imageFloors)...)
	r := measurePasses(ctx, g, contenders, o.volumes, 2*o.rounds)
	if !r.samples.of(floorMkfs, stage.name, 1).processes {
		measure.Must(errors.New("the floor started mkfs.ext4, but the benchmark did not detect the process: processes cannot be counted on this machine"))
	}
	stopAll(contenders)
	return r
}

// measurePasses makes all calls of a volume's life on all servers. An even number of passes
// measures each order of the servers as often as its reverse.
func measurePasses(ctx context.Context, g *testbed, contenders []*contender, volumes, passes int) *lifeResult {
	r := &lifeResult{samples: samples{}, calls: life, callers: []int{1, manyCallers}, volumes: volumes, passes: passes}
	r.measure(ctx, g, contenders)
	return r
}

// measure makes the calls on all servers.
func (r *lifeResult) measure(ctx context.Context, g *testbed, contenders []*contender) {
	p := pass{testbed: g, contenders: contenders, samples: samples{}, prefix: "warm", calls: r.calls, volumes: min(2, r.volumes), callers: 1}
	p.run(ctx) // the first calls are slower, so their samples are dropped
	p.samples, p.volumes = r.samples, r.volumes
	for n := range r.passes {
		slices.Reverse(contenders)
		for _, p.callers = range r.callers {
			p.prefix = fmt.Sprintf("pass%d-%d", n, p.callers)
			p.run(ctx)
		}
	}
}

func stopAll(contenders []*contender) {
	for _, c := range contenders {
		c.stop()
	}
}

// startTrivet starts the driver as a contender. name and flags are those of launchTrivet.
func startTrivet(ctx context.Context, g *testbed, binary, name string, of class, flags ...string) *contender {
	s := g.launchTrivet(binary, name, flags...)
	return &contender{server: s, clients: s.connect(ctx, manyCallers), class: of, calls: life, trash: g.trash(name)}
}

// floorKind is a kind of floor or mounter.
type floorKind struct {
	name  string
	flags []string // of serveFloor or serveMounter
	calls []call   // that are measured
}

// imageFloors are the floors of images with ext4. floorMkfs does in stage what the other floors do in create.
var imageFloors = []floorKind{
	{floorName, nil, life},
	{floorMkfs, []string{"--mkfs"}, []call{create, stage, unstage, remove}},
	{floorDurable, []string{"--durable"}, []call{create, controllerPublish, controllerUnpublish, remove}},
}

// startFloors starts floors as contenders whose volumes have a class.
func startFloors(ctx context.Context, g *testbed, of class, kinds []floorKind) (all []*contender) {
	for _, kind := range kinds {
		s := g.launchFloor(kind.name, kind.flags...)
		all = append(all, &contender{server: s, clients: s.connect(ctx, manyCallers), class: of, calls: kind.calls})
	}
	return all
}

// quiet waits until the trash is empty, because the removal of deleted volumes in the background
// must not slow down the next server.
func (c *contender) quiet(ctx context.Context) {
	if c.trash == "" {
		return
	}
	for len(measure.Get(os.ReadDir(c.trash))) > 0 {
		measure.Must(sleep(ctx, poll))
	}
}

// pass makes each call of a volume's life on each server, for new volumes.
type pass struct {
	testbed    *testbed
	contenders []*contender
	samples    samples
	prefix     string // of the volumes' names
	calls      []call // in the order in which they are made
	volumes    int    // of each server
	callers    int
}

// run creates, uses and deletes the volumes.
func (p *pass) run(ctx context.Context) {
	vols := map[*contender][]*vol{}
	for _, c := range p.contenders {
		vols[c] = newVolumes(p.testbed.kubelet(c.Name), p.prefix, p.volumes, c.class)
	}
	for _, which := range p.calls {
		p.call(ctx, which, vols)
	}
	for _, c := range p.contenders {
		removeStaging(vols[c])
	}
}

// call makes one call for all volumes, with the servers in turns. The turns of a single caller are
// short. Several callers need long turns, because at the end of a turn some callers are idle.
func (p *pass) call(ctx context.Context, which call, vols map[*contender][]*vol) {
	turn := p.volumes
	if p.callers == 1 {
		turn = max(1, p.volumes/5)
	}
	for from := 0; from < p.volumes; from += turn {
		for _, c := range p.contenders {
			if !slices.ContainsFunc(c.calls, func(one call) bool { return one.name == which.name }) {
				continue
			}
			p.testbed.Settle()
			some := vols[c][from:min(from+turn, p.volumes)]
			c.turn(ctx, c.clients[:p.callers], which, some, p.samples.of(c.Name, which.name, p.callers))
		}
	}
}

// turn measures one call for some volumes. What the server does after its answers counts in the CPU
// time, but not in the duration of the calls.
func (c *contender) turn(ctx context.Context, callers []*client, which call, vols []*vol, into *sample) {
	before := c.usage()
	start := time.Now()
	took := forAll(ctx, callers, which, vols)
	wall := time.Since(start)
	c.quiet(ctx)
	into.add(took, wall, before, c.usage())
}

// String returns tables that compare each call with the floors.
func (r *lifeResult) String() string {
	return fmt.Sprintf("%d volumes of 1 GiB ext4, %d passes, servers in turns; times in µs; CPU is the server's, user and system, per call.\n", r.volumes, r.passes) +
		"\"floor\" only makes the system calls, and copies the ext4 from a template when a volume is created; \"floor + fsyncs\" also makes its changes durable; \"floor: mkfs\" starts mkfs.ext4 when a volume is staged.\n\n" +
		r.tables("###")
}

// tables returns a table of all calls for each number of callers. A call without a floor has
// empty cells.
func (r *lifeResult) tables(heading string) string {
	var b strings.Builder
	for _, callers := range r.callers {
		fmt.Fprintf(&b, "%s Callers: %d\n\n", heading, callers)
		t := markdown.Table{{"call", "p50", "p99", "ops/s", "CPU", "floor p50", "p99", "ops/s", "CPU", "p50 ratio", "ops/s ratio", "CPU ratio", "processes"}}
		for _, one := range life {
			r.row(&t, one.name, one.name, floorName, callers)
			for _, second := range []struct{ server, label string }{{floorMkfs, "stage, floor: mkfs"}, {floorDurable, one.name + ", floor + fsyncs"}} {
				if r.hasFloor(second.server, one.name, callers) {
					r.row(&t, second.label, one.name, second.server, callers)
				}
			}
		}
		b.WriteString(t.Text(true) + "\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// hasFloor reports whether a floor was measured for a call.
func (r *lifeResult) hasFloor(server, name string, callers int) bool {
	if server == floorMkfs && name != stage.name {
		return false // other calls are the same as those of the floor without --mkfs
	}
	return len(r.samples.of(server, name, callers).Durations) > 0
}

// row adds the times of a call of the driver, beside those of a floor if the floor was measured.
func (r *lifeResult) row(t *markdown.Table, label, name, server string, callers int) {
	a, b := r.samples.of(trivet, name, callers), r.samples.of(server, name, callers)
	beside := make([]string, 7)
	if r.hasFloor(server, name, callers) {
		beside = append(b.cpuCells(), times(a.slower(b)), times(a.rate()/b.rate()), times(float64(a.cpuPerCall())/float64(b.cpuPerCall())))
	}
	t.Row(slices.Concat([]string{label}, a.cpuCells(), beside, []string{yes(a.processes)})...)
}

// cpuCells returns p50 and p99 in µs, calls per second, and CPU time per call in µs.
func (s *sample) cpuCells() []string { return append(s.microCells(), micros(s.cpuPerCall())) }

// microCells returns p50 and p99 in µs, and calls per second.
func (s *sample) microCells() []string {
	return []string{micros(s.P50()), micros(s.At(99)), fmt.Sprintf("%.0f", s.rate())}
}
