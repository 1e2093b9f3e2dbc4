package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
)

// wanted sets what was reached beside what is wanted. It is information: on a
// noisy machine a limit that fails would say nothing.
func wanted(s *size, d *drop) string {
	t := markdown.Table{{"wanted", "reached"}}
	more := s.samples.mores(1)
	t.Row("the controller's driver's own time at most 0.5 ms on unary calls, p50, one caller",
		fmt.Sprintf("%s to %s ms", millis(slices.Min(more)), millis(slices.Max(more))))
	t.Row("memory at most 100 MiB", fmt.Sprintf("%s at rest; at most %s with one caller, %s with %d",
		mebibytes(s.filled.resident), mebibytes(s.after[1].peak), mebibytes(s.after[manyCallers].peak), manyCallers))
	t.Row("no call to a healthy node slowed by dead ones: the own time, median of the calls, before they drop, just after, later",
		fmt.Sprintf("%s, %s, %s ms", d.median(before), d.median(unnoticed), d.median(noticed)))
	return "### Wanted and reached\n\n" + t.Text(true)
}

// mores are how much longer each call takes through the controller's driver.
func (all samples) mores(callers int) []time.Duration {
	var out []time.Duration
	for _, c := range life {
		out = append(out, all.more(c.name, callers))
	}
	return out
}

func (d *drop) median(phase string) string { return millis(sample(d.samples[phase].mores(1)).p50()) }

func mebibytes(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
