package main

import (
	"context"
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
func measureMany(ctx context.Context, g *ground, o options) *manyResult {
	r := &manyResult{volumes: 1000, samples: samples{}}
	if o.quick {
		r.volumes = 100
	}
	driver := startTrivet(ctx, g, o.binary, "many", ext4Of(manySize))
	r.atStart = driver.Memory("VmRSS")
	vols := newVolumes(g.kubelet("many"), "many", r.volumes, driver.class)
	callAll(ctx, driver.clients, vols, create, controllerPublish, stage, publish)
	r.resident, r.memory = driver.Memory("VmRSS"), driver.Memory("RssAnon")
	r.measure(ctx, g, driver, vols)
	callAll(ctx, driver.clients, vols, unpublish, unstage, controllerUnpublish, remove)
	removeFolders(vols)
	driver.quiet(ctx)
	driver.stop()
	return r
}

// measure publishes some volumes once more, at targets of the driver and of the floor. The
// floor binds the driver's staging mounts, so both have the same mounts around them.
func (r *manyResult) measure(ctx context.Context, g *ground, driver *contender, vols []*vol) {
	bare := startFloors(ctx, g, driver.class, []floorKind{{"many-floor", nil, life}})[0]
	p := pass{ground: g, samples: r.samples, volumes: min(len(vols), 100), callers: 1, contenders: []*contender{driver, bare}}
	vols = vols[:p.volumes]
	for range 4 {
		slices.Reverse(p.contenders)
		again := map[*contender][]*vol{}
		for _, c := range p.contenders {
			again[c] = elsewhere(vols, c.Name)
		}
		for _, one := range []call{publish, stats, unpublish} {
			p.call(ctx, one, again)
		}
	}
	bare.stop()
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
		t.Row(one.name, micros(a.P50()), micros(a.At(99)), micros(b.P50()), micros(b.At(99)), times(a.slower(b)))
	}
	return fmt.Sprintf("### %d published volumes\n\n%s\nMemory of the driver: RSS %s, of it anonymous %s; at its start RSS %s.\n",
		r.volumes, t.Text(true), mebibytes(r.resident), mebibytes(r.memory), mebibytes(r.atStart))
}
