package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/trivet-csi/trivet/test/markdown"
)

// manySize is the size in bytes of each volume when there are many.
const manySize = 32 * mib

// manyResult contains the times, and the memory in bytes, of a driver with many published volumes.
type manyResult struct {
	volumes             int
	atStart             int64 // VmRSS before the volumes are created
	resident, anonymous int64 // VmRSS and RssAnon when all volumes are published
	samples             samples
}

// measureMany publishes many volumes, and measures calls while they are published.
func measureMany(ctx context.Context, g *testbed, o options) *manyResult {
	r := &manyResult{volumes: 1000, samples: samples{}}
	if o.quick {
		r.volumes = 100
	}
	driver := startTrivet(ctx, g, o.binary, "many", ext4Of(manySize))
	r.atStart = driver.Memory("VmRSS")
	vols := newVolumes(g.kubelet("many"), "many", r.volumes, driver.class)
	callAll(ctx, driver.clients, vols, create, controllerPublish, stage, publish)
	r.resident, r.anonymous = driver.Memory("VmRSS"), driver.Memory("RssAnon")
	r.measure(ctx, g, driver, vols)
	callAll(ctx, driver.clients, vols, unpublish, unstage, controllerUnpublish, remove)
	removeStaging(vols)
	driver.quiet(ctx)
	driver.stop()
	return r
}

// measure publishes some of the published volumes at second targets, with the driver and with a
// floor. The floor publishes from the driver's staging mounts, so both work with the same number of
// mounts.
func (r *manyResult) measure(ctx context.Context, g *testbed, driver *contender, vols []*vol) {
	bare := startFloors(ctx, g, driver.class, []floorKind{{"many-floor", nil, life}})[0]
	p := pass{testbed: g, samples: r.samples, volumes: min(len(vols), 100), callers: 1, contenders: []*contender{driver, bare}}
	vols = vols[:p.volumes]
	for range 4 {
		slices.Reverse(p.contenders)
		again := map[*contender][]*vol{}
		for _, c := range p.contenders {
			again[c] = withTargets(vols, c.Name)
		}
		for _, one := range []call{publish, stats, unpublish} {
			p.call(ctx, one, again)
		}
	}
	bare.stop()
}

// withTargets returns copies of the volumes whose targets have a suffix.
func withTargets(vols []*vol, suffix string) []*vol {
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
		r.volumes, t.Text(true), mebibytes(r.resident), mebibytes(r.anonymous), mebibytes(r.atStart))
}
