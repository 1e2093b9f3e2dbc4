package main

import (
	"fmt"

	"github.com/trivet-csi/trivet/test/markdown"
)

// growth compares few nodes with many and returns the cost of one more node.
func growth(sizes []*size) string {
	head := []string{"nodes"}
	for _, s := range sizes {
		head = append(head, fmt.Sprint(s.nodes))
	}
	t := grown{sizes, markdown.Table{append(head, "each node more")}}
	count := func(name string, value func(*size) int64) {
		t.row(name, "", "", 1, func(s *size) float64 { return float64(value(s)) })
	}
	memory := func(name string, value func(*size) int64) {
		t.row(name, " MiB", " KiB", 1<<10, func(s *size) float64 { return float64(value(s)) / (1 << 20) })
	}
	count("volumes", func(s *size) int64 { return int64(s.volumes) })
	memory("RSS, all volumes made", func(s *size) int64 { return s.filled.resident })
	memory("of it anonymous", func(s *size) int64 { return s.filled.anonymous })
	memory("Go's heap then", func(s *size) int64 { return s.filled.heap })
	for _, n := range callers {
		memory(fmt.Sprintf("the most RSS was, callers: %d", n), func(s *size) int64 { return s.after[n].peak })
	}
	count("goroutines", func(s *size) int64 { return s.filled.goroutines })
	count("descriptors", func(s *size) int64 { return s.filled.files })
	count("sockets among them", func(s *size) int64 { return s.filled.sockets })
	for _, name := range []string{"CreateVolume", "GetCapacity", "ControllerPublish", anywhereCall, pageOf(100), pageOf(1000), wholeList(1000)} {
		t.row(name, " ms", " µs", 1000, func(s *size) float64 { return float64(s.samples[place{routed, name, 1}].P50()) / 1e6 })
	}
	return "### What grows and how\n\nThe controller's driver; times are medians with one caller.\n\n" + t.Text(true)
}

// grown is a table with a column for each size.
type grown struct {
	sizes []*size
	markdown.Table
}

// row shows a value in a unit, and its part per node in a smaller unit. factor is the ratio of the
// units.
func (g *grown) row(name, unit, smaller string, factor float64, value func(*size) float64) {
	first, last := g.sizes[0], g.sizes[len(g.sizes)-1]
	format := "%.0f"
	if unit != "" {
		format = "%.2f"
	}
	cells := []string{name}
	for _, s := range g.sizes {
		cells = append(cells, fmt.Sprintf(format, value(s))+unit)
	}
	each := (value(last) - value(first)) / float64(last.nodes-first.nodes) * factor
	g.Row(append(cells, fmt.Sprintf("%.1f", each)+smaller)...)
}
