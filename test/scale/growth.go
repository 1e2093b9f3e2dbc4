package main

import (
	"fmt"

	"github.com/trivet-csi/trivet/test/markdown"
)

// growth returns a table that compares few nodes with many, with the cost of each additional node.
func growth(sizes []*size) string {
	head := []string{"nodes"}
	for _, s := range sizes {
		head = append(head, fmt.Sprint(s.nodes))
	}
	t := grown{sizes, markdown.Table{append(head, "per additional node")}}
	count := func(name string, value func(*size) int64) {
		t.row(name, "", "", 1, func(s *size) float64 { return float64(value(s)) })
	}
	memory := func(name string, value func(*size) int64) {
		t.row(name, " MiB", " KiB", 1<<10, func(s *size) float64 { return float64(value(s)) / (1 << 20) })
	}
	count("volumes", func(s *size) int64 { return int64(s.volumes) })
	memory("RSS when all volumes are created", func(s *size) int64 { return s.filled.resident })
	memory("anonymous part of the RSS", func(s *size) int64 { return s.filled.anonymous })
	memory("Go's heap", func(s *size) int64 { return s.filled.heap })
	for _, n := range callers {
		memory(fmt.Sprintf("peak RSS, callers: %d", n), func(s *size) int64 { return s.after[n].peak })
	}
	count("goroutines", func(s *size) int64 { return s.filled.goroutines })
	count("descriptors", func(s *size) int64 { return s.filled.files })
	count("sockets among the descriptors", func(s *size) int64 { return s.filled.sockets })
	for _, name := range []string{"CreateVolume", "GetCapacity", "ControllerPublish", anywhereCall, pageOf(100), pageOf(1000), wholeList} {
		t.row(name, " ms", " µs", 1000, func(s *size) float64 { return float64(s.samples[sampleKey{routed, name, 1}].P50()) / 1e6 })
	}
	return "### Growth with the number of nodes\n\nResources of the controller's driver; times are medians with one caller.\n\n" + t.Text(true)
}

// grown is a table with a column for each size.
type grown struct {
	sizes []*size
	markdown.Table
}

// row adds a row with a value in a unit for each size, and its increase per node in a smaller unit.
// factor is the ratio of the units.
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
