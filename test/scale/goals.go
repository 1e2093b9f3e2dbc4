package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// goals shows the results beside the goals. It is for information: on a busy machine, a limit
// that is missed means nothing.
func goals(s *size, d *drop) string {
	t := markdown.Table{{"goal", "result"}}
	more := s.samples.mores(1)
	t.Row("the controller's driver's own time at most 0.5 ms on unary calls, p50, one caller",
		fmt.Sprintf("%s to %s ms", millis(slices.Min(more)), millis(slices.Max(more))))
	t.Row("memory at most 100 MiB", fmt.Sprintf("%s at rest; at most %s with one caller, %s with %d",
		mebibytes(s.filled.resident), mebibytes(s.after[1].peak), mebibytes(s.after[manyCallers].peak), manyCallers))
	t.Row("no call to a healthy node slowed by dead ones: the own time, median of the calls, before they drop, just after, later",
		fmt.Sprintf("%s, %s, %s ms", d.median(before), d.median(unnoticed), d.median(noticed)))
	return "### Goals and results\n\n" + t.Text(true)
}

// mores are how much longer each call takes through the controller's driver.
func (all samples) mores(callers int) []time.Duration {
	var out []time.Duration
	for _, c := range life {
		out = append(out, all.more(c.name, callers))
	}
	return out
}

func (d *drop) median(phase string) string {
	return millis(measure.Durations(d.samples[phase].mores(1)).P50())
}

func mebibytes(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
