package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-csi/trivet/test/markdown"
)

// manySize is the size in bytes of each of many volumes.
const manySize = 32 * mib

// manyResult has the times and the memory of a driver with many published volumes.
type manyResult struct {
	volumes          int
	atStart          int64 // VmRSS
	resident, memory int64 // VmRSS, RssAnon
	samples          samples
}

// measureMany publishes many volumes, and measures calls while they are published.
func measureMany(ctx context.Context, g *ground, o options) (*manyResult, error) {
	r := &manyResult{volumes: 1000, samples: samples{}}
	if o.quick {
		r.volumes = 100
	}
	driver, err := g.launchTrivet(o.binary, "many")
	if err != nil {
		return nil, err
	}
	clients, err := driver.connect(ctx, manyCallers)
	if err != nil {
		return nil, err
	}
	if r.atStart, err = driver.memory("VmRSS"); err != nil {
		return nil, err
	}
	dir, err := g.kubelet("many")
	if err != nil {
		return nil, err
	}
	vols, err := newVolumes(dir, "many", r.volumes, ext4Of(manySize))
	if err != nil {
		return nil, err
	}
	if err := callAll(ctx, clients, vols, create, controllerPublish, stage, publish); err != nil {
		return nil, err
	}
	if err := r.weigh(driver); err != nil {
		return nil, err
	}
	if err := r.measure(ctx, g, &contender{server: driver, clients: clients}, vols); err != nil {
		return nil, err
	}
	if err := callAll(ctx, clients, vols, unpublish, unstage, controllerUnpublish, remove); err != nil {
		return nil, err
	}
	return r, errors.Join(removeFolders(vols), awaitEmpty(ctx, g.trash("many")), driver.stop())
}

// callAll makes calls one after the other, each for all volumes.
func callAll(ctx context.Context, clients []*client, vols []*vol, calls ...call) error {
	for _, one := range calls {
		if _, err := forAll(ctx, clients, one, vols); err != nil {
			return err
		}
	}
	return nil
}

func (r *manyResult) weigh(driver *server) (err error) {
	if r.resident, err = driver.memory("VmRSS"); err != nil {
		return err
	}
	r.memory, err = driver.memory("RssAnon")
	return err
}

// measure publishes some volumes once more, at targets of the driver and of the floor. The
// floor binds the driver's staging mounts, so both have the same mounts around them.
func (r *manyResult) measure(ctx context.Context, g *ground, driver *contender, vols []*vol) error {
	bare, err := g.launchFloor("many-floor")
	if err != nil {
		return err
	}
	clients, err := bare.connect(ctx, 1)
	if err != nil {
		return err
	}
	p := pass{
		ground: g, samples: r.samples, volumes: min(len(vols), 100), callers: 1,
		contenders: []*contender{driver, {server: bare, clients: clients}},
	}
	vols = vols[:p.volumes]
	for range 4 {
		slices.Reverse(p.contenders)
		again := map[*contender][]*vol{}
		for _, c := range p.contenders {
			c.calls = life
			again[c] = elsewhere(vols, c.name)
		}
		for _, one := range []call{publish, stats, unpublish} {
			if err := p.call(ctx, one, again); err != nil {
				return err
			}
		}
	}
	return bare.stop()
}

// elsewhere returns the same volumes with other targets.
func elsewhere(vols []*vol, suffix string) []*vol {
	out := make([]*vol, len(vols))
	for i, v := range vols {
		other := *v
		other.target += "-" + suffix
		out[i] = &other
	}
	return out
}

func (r *manyResult) String() string {
	t := markdown.Table{{"call", "p50", "p99", "floor p50", "p99", "p50 ratio"}}
	for _, one := range []call{publish, stats, unpublish} {
		a, b := r.samples.of("many", one.name, 1), r.samples.of("many-floor", one.name, 1)
		t.Row(one.name, micros(a.p50()), micros(a.at(99)), micros(b.p50()), micros(b.at(99)), times(a.slower(b)))
	}
	return fmt.Sprintf("### %d published volumes\n\n%s\nMemory of the driver: RSS %s, of it anonymous %s; at its start RSS %s.\n",
		r.volumes, t.Text(true), mebibytes(r.resident), mebibytes(r.memory), mebibytes(r.atStart))
}
