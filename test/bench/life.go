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
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// Names of the servers.
const (
	trivet       = "trivet"
	floorName    = "floor"
	floorMkfs    = "floor-mkfs"
	floorDurable = "floor-fsync"
)

// manyCallers is the number of simultaneous callers.
const manyCallers = 8

// contender is a server that is measured in turns with others.
type contender struct {
	*server
	clients []*client
	class   class // of its volumes
	calls   []call
	// quiet waits for the end of the work that a server does after its answers; nil: there is
	// none.
	quiet func(context.Context) error
}

// lifeResult has the times of all calls in a volume's life.
type lifeResult struct {
	samples samples
	callers []int
	volumes int
	passes  int
}

// measureLife makes all calls of a volume's life on all servers.
func measureLife(ctx context.Context, g *ground, o options) (*lifeResult, error) {
	contenders, err := startContenders(ctx, g, o.binary)
	if err != nil {
		return nil, err
	}
	r := &lifeResult{samples: samples{}, callers: []int{1, manyCallers}, volumes: o.volumes, passes: 2 * o.rounds}
	warm := pass{ground: g, contenders: contenders, samples: samples{}, prefix: "warm", volumes: 2, callers: 1}
	if err := warm.run(ctx); err != nil {
		return nil, err
	}
	for n := range r.passes {
		// Each order is measured as often as its reverse.
		slices.Reverse(contenders)
		for _, callers := range r.callers {
			p := pass{
				ground: g, contenders: contenders, samples: r.samples,
				prefix: fmt.Sprintf("pass%d-%d", n, callers), volumes: o.volumes, callers: callers,
			}
			if err := p.run(ctx); err != nil {
				return nil, err
			}
		}
	}
	if !r.samples.of(floorMkfs, stage.name, 1).processes {
		return nil, errors.New("the floor has started mkfs.ext4, and it was not seen: processes cannot be counted here")
	}
	for _, c := range contenders {
		if err := c.stop(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func startContenders(ctx context.Context, g *ground, binary string) ([]*contender, error) {
	driver, err := startTrivet(ctx, g, binary, trivet, ext4Of(gib))
	if err != nil {
		return nil, err
	}
	floors, err := startFloors(ctx, g, ext4Of(gib), []floorKind{
		{floorName, nil, life},
		{floorMkfs, []string{"--mkfs"}, []call{create, stage, unstage, remove}},
		{floorDurable, []string{"--durable"}, []call{create, controllerPublish, controllerUnpublish, remove}},
	})
	return append([]*contender{driver}, floors...), err
}

// startTrivet starts the driver; name and flags are those of launchTrivet.
func startTrivet(ctx context.Context, g *ground, binary, name string, of class, flags ...string) (*contender, error) {
	s, err := g.launchTrivet(binary, name, flags...)
	if err != nil {
		return nil, err
	}
	c := &contender{server: s, class: of, calls: life, quiet: func(ctx context.Context) error {
		return awaitEmpty(ctx, g.trash(name))
	}}
	c.clients, err = s.connect(ctx, manyCallers)
	return c, err
}

type floorKind struct {
	name  string
	flags []string
	calls []call
}

func startFloors(ctx context.Context, g *ground, of class, kinds []floorKind) ([]*contender, error) {
	var all []*contender
	for _, kind := range kinds {
		s, err := g.launchFloor(kind.name, kind.flags...)
		if err != nil {
			return nil, err
		}
		c := &contender{server: s, class: of, calls: kind.calls}
		if c.clients, err = c.connect(ctx, manyCallers); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// awaitEmpty waits until a folder is empty. Deleted volumes are removed in the background,
// which must not slow down the next server.
func awaitEmpty(ctx context.Context, dir string) error {
	for {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
}

// pass makes all calls of a volume's life once on each server.
type pass struct {
	ground     *ground
	contenders []*contender
	samples    samples
	prefix     string
	volumes    int
	callers    int
}

func (p *pass) run(ctx context.Context) error {
	vols := map[*contender][]*vol{}
	for _, c := range p.contenders {
		dir, err := p.ground.kubelet(c.name)
		if err != nil {
			return err
		}
		if vols[c], err = newVolumes(dir, p.prefix, p.volumes, c.class); err != nil {
			return err
		}
	}
	for _, which := range life {
		if err := p.call(ctx, which, vols); err != nil {
			return err
		}
	}
	for _, c := range p.contenders {
		if err := removeFolders(vols[c]); err != nil {
			return err
		}
	}
	return nil
}

// call makes one call on all servers in turns. The turns of a single caller are short. Several
// callers need long turns, because at the end of a turn not all of them are busy.
func (p *pass) call(ctx context.Context, which call, vols map[*contender][]*vol) error {
	turn := p.volumes
	if p.callers == 1 {
		turn = max(1, p.volumes/5)
	}
	for from := 0; from < p.volumes; from += turn {
		for _, c := range p.contenders {
			if !slices.ContainsFunc(c.calls, func(one call) bool { return one.name == which.name }) {
				continue
			}
			if err := p.ground.settle(); err != nil {
				return err
			}
			some := vols[c][from:min(from+turn, p.volumes)]
			if err := c.turn(ctx, c.clients[:p.callers], which, some, p.samples.of(c.name, which.name, p.callers)); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	return nil
}

// turn measures one call for some volumes. The work of the server after its answers counts as
// CPU time, not as the caller's time.
func (c *contender) turn(ctx context.Context, callers []*client, which call, vols []*vol, into *sample) error {
	before, err := c.usage()
	if err != nil {
		return err
	}
	start := time.Now()
	took, err := forAll(ctx, callers, which, vols)
	wall := time.Since(start)
	if err != nil {
		return err
	}
	if c.quiet != nil {
		if err := c.quiet(ctx); err != nil {
			return err
		}
	}
	after, err := c.usage()
	if err != nil {
		return err
	}
	into.add(took, wall, before, after)
	return nil
}

// String shows every call beside the floor, and beside the second floor if there is one.
func (r *lifeResult) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d volumes of 1 GiB ext4, %d passes, servers in turns; times in µs; CPU is the server's, user and system, per call.\n", r.volumes, r.passes)
	b.WriteString("\"floor\" is the bare system calls, its ext4 copied from a template; \"+ fsyncs\" makes its answers durable; \"mkfs\" starts mkfs.ext4 for each volume.\n\n")
	for _, callers := range r.callers {
		fmt.Fprintf(&b, "### Callers: %d\n\n", callers)
		t := markdown.Table{{"call", "p50", "p99", "ops/s", "CPU", "floor p50", "p99", "ops/s", "CPU", "p50 ratio", "ops/s ratio", "CPU ratio", "processes"}}
		for _, one := range life {
			r.row(&t, one.name, one.name, floorName, callers)
			for _, second := range []struct{ server, label string }{{floorMkfs, "stage, floor: mkfs"}, {floorDurable, one.name + ", floor + fsyncs"}} {
				if r.hasFloor(second.server, one.name, callers) {
					r.row(&t, second.label, one.name, second.server, callers)
				}
			}
		}
		b.WriteString(t.Text(true))
		b.WriteString("\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// hasFloor reports whether a second floor was measured for a call.
func (r *lifeResult) hasFloor(server, name string, callers int) bool {
	if server == floorMkfs && name != stage.name {
		return false // it is the same as the floor's
	}
	return len(r.samples.of(server, name, callers).took) > 0
}

func (r *lifeResult) row(t *markdown.Table, label, name, server string, callers int) {
	a, b := r.samples.of(trivet, name, callers), r.samples.of(server, name, callers)
	t.Row(label, micros(a.p50()), micros(a.at(99)), fmt.Sprintf("%.0f", a.rate()), micros(a.cpuPerCall()),
		micros(b.p50()), micros(b.at(99)), fmt.Sprintf("%.0f", b.rate()), micros(b.cpuPerCall()),
		times(a.slower(b)), times(a.rate()/b.rate()), times(float64(a.cpuPerCall())/float64(b.cpuPerCall())), yes(a.processes))
}
