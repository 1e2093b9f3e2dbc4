package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// goals returns a table of the goals and the results. A missed goal is no failure, because the
// results on a busy machine say little about the driver.
func goals(s *size, r restart, d *drop) string {
	t := markdown.Table{{"goal", "result"}}
	overheads := s.samples.overheads(1)
	t.Row("the controller's driver adds at most 0.5 ms to a unary call, p50, one caller",
		fmt.Sprintf("%s to %s ms", millis(slices.Min(overheads)), millis(slices.Max(overheads))))
	t.Row("memory at most 400 MiB with 5,000 nodes", fmt.Sprintf("%s at rest; at most %s with one caller, %s with %d",
		mebibytes(s.filled.resident), mebibytes(s.after[1].peak), mebibytes(s.after[manyCallers].peak), manyCallers))
	t.Row("a restart answers within 10 s", fmt.Sprintf("%s; all nodes after %s", seconds(r.first), seconds(r.listed)))
	t.Row("nodes that are away do not slow down calls to healthy nodes: the added time, median of the calls, before the drop, just after, later",
		fmt.Sprintf("%s, %s, %s ms", d.median(before), d.median(unnoticed), d.median(noticed)))
	return "### Goals and results\n\n" + t.Text(true)
}

// overheads returns the time that the controller's driver adds to each call of a volume's life.
func (all samples) overheads(callers int) []time.Duration {
	var out []time.Duration
	for _, c := range life {
		out = append(out, all.overhead(c.name, callers))
	}
	return out
}

// median returns the median of the overheads in a phase.
func (d *drop) median(phase string) string {
	return millis(measure.Durations(d.samples[phase].overheads(1)).P50())
}

func mebibytes(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
