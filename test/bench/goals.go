package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/test/markdown"
)

// goals returns a table of the goals and the results. A missed goal is no failure, because the
// results on a busy machine say little about the driver.
func goals(life *lifeResult, others []*filesystemResult, many *manyResult, start *startResult) string {
	t := markdown.Table{{"goal", "result"}}
	for _, c := range []call{publish, unpublish, stats} {
		t.Row(c.name+": at most 2 × the floor", life.samples.ratio(c, floorName))
	}
	for _, r := range slices.Concat([]*filesystemResult{{"ext4", life}}, others) {
		t.Row("stage of "+r.fsType+": at most 1.2 × the floor", r.samples.ratio(stage, floorName))
		t.Row("create of "+r.fsType+": at most 1.3 × the floor + fsyncs", r.samples.ratio(create, floorDurable))
	}
	life.addRates(&t)
	t.Row("no process in create, publish, unpublish, stats, delete", life.unexpectedProcesses())
	t.Row(fmt.Sprintf("RSS at most 40 MiB with %d published volumes", many.volumes), mebibytes(many.resident))
	t.Row(fmt.Sprintf("ready at most 1 s after start with %d volumes", start.volumes),
		fmt.Sprintf("%s; %s after the filesystem is mounted again", millis(start.warm.ready.P50()), millis(start.cold.ready.P50())))
	t.Row(fmt.Sprintf("a ListVolumes page of %d in at most 20 ms", pageSize), millis(start.pages.P50()))
	return "### Goals and results\n\n" + t.Text(false)
}

// ratio returns the ratio of the driver's time to that of a server, for one caller.
func (all samples) ratio(c call, server string) string {
	return times(all.of(trivet, c.name, 1).slower(all.of(server, c.name, 1))) + " ×"
}

// addRates compares the rates with many callers. The ratio to the floor without fsyncs includes
// the cost of durability, so addRates also shows the ratio to the floor with fsyncs.
func (r *lifeResult) addRates(t *markdown.Table) {
	for _, c := range life {
		own := r.samples.of(trivet, c.name, manyCallers).rate()
		reached := times(own / r.samples.of(floorName, c.name, manyCallers).rate())
		if r.hasFloor(floorDurable, c.name, manyCallers) {
			reached += "; " + times(own/r.samples.of(floorDurable, c.name, manyCallers).rate()) + " with fsyncs"
		}
		t.Row(fmt.Sprintf("%s with %d callers: at least 0.5 of the floor's ops/s", c.name, manyCallers), reached)
	}
}

// unexpectedProcesses lists the calls in which the driver must not start a process but did.
func (r *lifeResult) unexpectedProcesses() string {
	var with []string
	for _, c := range []call{create, publish, unpublish, stats, remove} {
		for _, callers := range r.callers {
			if r.samples.of(trivet, c.name, callers).processes {
				with = append(with, fmt.Sprintf("%s with %d callers", c.name, callers))
			}
		}
	}
	if len(with) == 0 {
		return "none"
	}
	return "processes in " + strings.Join(with, ", ")
}
