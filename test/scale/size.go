package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// manyCallers is the number of concurrent callers. Each measurement is made with one caller and with
// many.
const manyCallers = 16

// callers contains the numbers of concurrent callers.
var callers = []int{1, manyCallers}

const (
	// lives is the number of volumes for which all calls of a volume's life are made, through the
	// controller's driver and again directly, for each number of callers.
	lives    = 1000
	turn     = 50 // volumes after which the way changes
	anywhere = 16 // volumes that are created without a topology
)

// anywhereCall is the name of the samples of createAnywhere.
const anywhereCall = "CreateVolume without topology"

const (
	listPages = 50   // the maximum number of pages that one caller reads
	wholePage = 1000 // the page size with which the whole list is read, the largest allowed
)

// pageSizes are the requested page sizes.
var pageSizes = []int{100, wholePage}

// size contains the measurements with a number of nodes.
type size struct {
	nodes, volumes int
	filled         resources         // when fill has created all volumes
	after          map[int]resources // after the measurements with a number of callers
	samples        samples
}

// wholeList is the name of the samples of the whole list.
var wholeList = fmt.Sprintf("the whole list by %d", wholePage)

// pageOf returns the name of the samples of ListVolumes with a page size.
func pageOf(n int) string { return fmt.Sprintf("a page of %d", n) }

// measureSize measures a fleet with each number of callers.
func measureSize(ctx context.Context, f *fleet) *size {
	s := &size{nodes: len(f.nodes), volumes: len(f.volumes), after: map[int]resources{}, samples: samples{}}
	s.filled = resourcesOf(ctx, f.controller, f.web)
	for _, n := range callers {
		s.samples.live(ctx, f, f.nodes, lives, n)
		s.createAnywhere(ctx, f, n)
		s.list(ctx, f, n)
		s.after[n] = resourcesOf(ctx, f.controller, f.web)
	}
	return s
}

// live makes all calls of a volume's life for volumes on some nodes, through the controller's driver
// and directly in turns.
func (all samples) live(ctx context.Context, f *fleet, nodes []*node, volumes, callers int) {
	ways := []way{routed, direct}
	vols := map[way][]*vol{}
	for _, w := range ways {
		vols[w] = newVolumes(nodes, string(w), volumes)
	}
	for _, c := range life {
		for from := 0; from < volumes; from += turn {
			slices.Reverse(ways)
			for _, w := range ways {
				took := forAll(ctx, callers, vols[w][from:min(from+turn, volumes)], f.on(w, c))
				all.add(w, c.name, callers, took...)
			}
		}
	}
}

// on returns a function that makes a call through the controller's driver or directly.
func (f *fleet) on(w way, c call) func(context.Context, *vol) error {
	if w == routed {
		return func(ctx context.Context, v *vol) error { return c.do(ctx, f.routed, v) }
	}
	do := c.do
	if c.forwarded != nil {
		do = c.forwarded
	}
	return func(ctx context.Context, v *vol) error { return do(ctx, v.node.direct, v) }
}

// createAnywhere measures CreateVolume without a topology, and deletes the volumes.
func (s *size) createAnywhere(ctx context.Context, f *fleet, callers int) {
	vols := newVolumes(f.nodes, "anywhere", anywhere)
	s.samples.add(routed, anywhereCall, callers, forAll(ctx, callers, vols, f.on(routed, call{do: createAnywhere}))...)
	forAll(ctx, callers, vols, f.on(routed, call{do: deleteVolume}))
}

// list reads the beginning of the list of all volumes, at most listPages pages of each size, once per caller. One caller
// also reads the whole list.
func (s *size) list(ctx context.Context, f *fleet, callers int) {
	for _, n := range pageSizes {
		pages := make([]measure.Durations, callers)
		measure.ForAll(ctx, callers, pages, func(ctx context.Context, i int, _ measure.Durations) (err error) {
			pages[i], err = firstPages(ctx, f.routed, n)
			return err
		})
		s.samples.add(routed, pageOf(n), callers, slices.Concat(pages...)...)
	}
	if callers == 1 {
		start := time.Now()
		_ = measure.Get(measure.ListVolumes(ctx, f.routed, wholePage, s.volumes))
		s.samples.add(routed, wholeList, callers, time.Since(start))
	}
}

// firstPages reads the first pages of the list of all volumes, and returns the duration of each page.
func firstPages(ctx context.Context, c csi.ControllerClient, pageSize int) (pages measure.Durations, err error) {
	token := ""
	for range listPages {
		start := time.Now()
		resp, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: int32(pageSize), StartingToken: token})
		if err != nil {
			return nil, err
		}
		pages.Add(time.Since(start))
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	return pages, nil
}

// overhead returns the time that the controller's driver adds to the median of a call.
func (all samples) overhead(call string, callers int) time.Duration {
	return all[sampleKey{routed, call, callers}].P50() - all[sampleKey{direct, call, callers}].P50()
}

// calls returns a table that compares the calls through the controller's driver with direct ones.
func (s *size) calls() string {
	t := markdown.Table{{"call", "callers", "p50", "p99", "direct p50", "p99", "p50 difference", "p50 ratio"}}
	for _, n := range callers {
		for _, c := range life {
			a, b := s.samples[sampleKey{routed, c.name, n}], s.samples[sampleKey{direct, c.name, n}]
			t.Row(c.name, fmt.Sprint(n), millis(a.P50()), millis(a.At(99)), millis(b.P50()), millis(b.At(99)),
				millis(s.samples.overhead(c.name, n)), fmt.Sprintf("%.2f", float64(a.P50())/float64(b.P50())))
		}
		a := s.samples[sampleKey{routed, anywhereCall, n}]
		t.Row(anywhereCall, fmt.Sprint(n), millis(a.P50()), millis(a.At(99)), "", "", "", "")
	}
	return fmt.Sprintf("### Calls: %d nodes, %d volumes\n\nIn milliseconds.\n\n%s", s.nodes, s.volumes, t.Text(true))
}

// lists returns a table of ListVolumes with each page size.
func (s *size) lists() string {
	t := markdown.Table{{"ListVolumes", "callers", "page p50", "p99"}}
	for _, n := range callers {
		for _, entries := range pageSizes {
			page := s.samples[sampleKey{routed, pageOf(entries), n}]
			t.Row(fmt.Sprintf("pages of %d", entries), fmt.Sprint(n), millis(page.P50()), millis(page.At(99)))
		}
	}
	whole := s.samples[sampleKey{routed, wholeList, 1}].P50()
	return fmt.Sprintf("### Lists\n\nIn milliseconds. Each caller reads up to %d pages. One caller reads the whole list in pages of %d in %s.\n\n%s", listPages, wholePage, seconds(whole), t.Text(true))
}
