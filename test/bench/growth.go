package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
)

const (
	// windowSize is the number of volumes of a window, and windowStaged the number of those that are staged.
	windowSize   = 20
	windowStaged = 5
	// reapDelay is the time for which the driver waits before it removes deleted volumes (package pool).
	reapDelay = 200 * time.Millisecond
)

// window contains the times while a group grows from a number of volumes to windowSize more, and shrinks again.
type window struct {
	from    int
	samples samples
}

// growthResult contains the times for a volume group with few and many volumes.
type growthResult struct{ windows []*window }

// removed is the call of the samples with the time from DeleteVolume to the removal of the logical volume.
const removed = "removed"

// growth is a volume group of each server that grows and shrinks.
type growth struct {
	pass
	all map[*contender][]*vol
}

// measureGrowth creates many thick logical volumes with the driver and with a floor in turns, and removes them.
func measureGrowth(ctx context.Context, g *testbed, o options) *growthResult {
	r := &growthResult{[]*window{{0, samples{}}, {90, samples{}}, {180, samples{}}}}
	if o.quick {
		r.windows = r.windows[:1]
	}
	driver := thickKind.startDriver(ctx, g, o)
	contenders := append(startFloors(ctx, g, driver.class, thickKind.floors()[1:2]), driver)
	w := growth{pass{testbed: g, contenders: contenders, callers: 1}, map[*contender][]*vol{}}
	for _, c := range contenders {
		w.all[c] = newVolumes(g.kubelet(c.Name), "many", r.windows[len(r.windows)-1].from+windowSize, c.class)
	}
	filled := 0
	for _, at := range r.windows {
		w.make(ctx, samples{}, filled, at.from, create)
		filled = at.from + windowSize
		w.make(ctx, at.samples, at.from, filled, create)
		w.make(ctx, at.samples, at.from, at.from+windowStaged, controllerPublish, stage, unstage, controllerUnpublish)
	}
	for _, at := range slices.Backward(r.windows) {
		w.make(ctx, samples{}, at.from+windowSize, filled, remove)
		filled = at.from + windowStaged
		w.remove(ctx, at.samples, filled, at.from+windowSize)
	}
	w.make(ctx, samples{}, 0, filled, remove)
	for _, c := range contenders {
		removeStaging(w.all[c])
	}
	stopAll(contenders)
	return r
}

// make makes calls for some of the volumes.
func (w *growth) make(ctx context.Context, into samples, from, to int, calls ...call) {
	some := map[*contender][]*vol{}
	for c, vols := range w.all {
		some[c] = vols[from:to]
	}
	w.samples, w.volumes = into, to-from
	for _, one := range calls {
		w.call(ctx, one, some)
	}
}

// remove deletes volumes that were never staged, which are not wiped, and waits until their logical volumes are removed.
func (w *growth) remove(ctx context.Context, into samples, from, to int) {
	for _, c := range w.contenders {
		start := time.Now()
		forAll(ctx, c.clients[:1], remove, w.all[c][from:to])
		c.quiet(ctx)
		took := time.Since(start)
		if c.trash != "" {
			took -= reapDelay
		}
		into.of(c.Name, removed, 1).Add(took / time.Duration(to-from))
	}
}

// String compares the driver with the floor for each size of the group.
func (r *growthResult) String() string {
	t := markdown.Table{{"call", "volumes in the group", "p50", "floor + fsyncs p50", "p50 ratio"}}
	for _, name := range []string{create.name, stage.name, unstage.name, removed} {
		for _, at := range r.windows {
			own, floor := at.samples.of(trivet, name, 1), at.samples.of(floorDurable, name, 1)
			t.Row(name, fmt.Sprintf("%d to %d", at.from+1, at.from+windowSize), own.milliCells()[0], floor.milliCells()[0], times(own.slower(floor)))
		}
	}
	return fmt.Sprintf("### A growing volume group\n\nServers in turns; times in ms. %q is the time from DeleteVolume of a volume that was never staged to the removal of its logical volume, without the %v for which the driver waits before it.\n\n%s", removed, reapDelay, t.Text(true))
}
