package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/test/markdown"
)

// Measurements are made with one caller and with many.
const manyCallers = 16

var callers = []int{1, manyCallers}

const (
	// lives is the number of volumes that go through their life, for each way and each number of
	// callers; each turn has a part of them.
	lives    = 1000
	turn     = 50
	anywhere = 64 // volumes created without a topology
)

const anywhereCall = "CreateVolume, no requirements"

// pageSizes are the requested page sizes; the last one is the largest allowed.
var pageSizes = []int{100, 1000}

// size contains the measurements with a number of nodes.
type size struct {
	nodes, volumes int
	// Of the controller's driver: when all volumes are made, and after what is
	// measured with a number of callers.
	filled  needs
	after   map[int]needs
	samples samples
}

// pageOf and wholeList are the names of what is measured by pages of a size.
func pageOf(n int) string    { return fmt.Sprintf("a page of %d", n) }
func wholeList(n int) string { return fmt.Sprintf("the whole list by %d", n) }

func measureSize(ctx context.Context, f *fleet) (*size, error) {
	s := &size{nodes: len(f.nodes), volumes: len(f.volumes), after: map[int]needs{}, samples: samples{}}
	var err error
	if s.filled, err = f.controller.needs(ctx, f.web); err != nil {
		return nil, err
	}
	for _, n := range callers {
		if err := s.samples.live(ctx, f, f.nodes, lives, n); err != nil {
			return nil, err
		}
		if err := s.createAnywhere(ctx, f, n); err != nil {
			return nil, err
		}
		if err := s.list(ctx, f, n); err != nil {
			return nil, err
		}
		if s.after[n], err = f.controller.needs(ctx, f.web); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// live takes volumes on some nodes through their life, through the controller's
// driver and past it, in turns.
func (all samples) live(ctx context.Context, f *fleet, nodes []*member, volumes, callers int) error {
	vols := map[way][]*vol{}
	ways := []way{routed, direct}
	for _, w := range ways {
		vols[w] = newVolumes(nodes, string(w), volumes)
	}
	for _, c := range life {
		for from := 0; from < volumes; from += turn {
			slices.Reverse(ways)
			for _, w := range ways {
				took, err := forAll(ctx, callers, vols[w][from:min(from+turn, volumes)], f.on(w, c))
				if err != nil {
					return fmt.Errorf("%s, %s: %w", c.name, w, err)
				}
				all.add(w, c.name, callers, took)
			}
		}
	}
	return nil
}

// on makes a call one way.
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

func (s *size) createAnywhere(ctx context.Context, f *fleet, callers int) error {
	vols := newVolumes(f.nodes, "anywhere", anywhere)
	took, err := forAll(ctx, callers, vols, f.on(routed, call{do: createAnywhere}))
	if err != nil {
		return fmt.Errorf("%s: %w", anywhereCall, err)
	}
	s.samples.add(routed, anywhereCall, callers, took)
	_, err = forAll(ctx, callers, vols, f.on(routed, call{do: deleteVolume}))
	return err
}

// list goes through all volumes, as often as there are callers, but three times at
// least.
func (s *size) list(ctx context.Context, f *fleet, callers int) error {
	for _, n := range pageSizes {
		var lists []*listing
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(callers)
		for range max(callers, 3) {
			l := &listing{}
			lists = append(lists, l)
			group.Go(func() error { return l.walk(ctx, f.routed, n, s.volumes) })
		}
		if err := group.Wait(); err != nil {
			return err
		}
		for _, l := range lists {
			s.samples.add(routed, pageOf(n), callers, l.pages)
			s.samples.add(routed, wholeList(n), callers, []time.Duration{l.whole})
		}
	}
	return nil
}

// listing is one way through all volumes.
type listing struct {
	pages sample
	whole time.Duration
}

func (l *listing) walk(ctx context.Context, c csi.ControllerClient, page, volumes int) error {
	listed, token := 0, ""
	begin := time.Now()
	for {
		start := time.Now()
		resp, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: int32(page), StartingToken: token})
		if err != nil {
			return err
		}
		l.pages = append(l.pages, time.Since(start))
		listed += len(resp.GetEntries())
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	l.whole = time.Since(begin)
	if listed != volumes {
		return fmt.Errorf("ListVolumes gave %d volumes of %d", listed, volumes)
	}
	return nil
}

// more is how much longer calls take through the controller's driver, at the median.
func (all samples) more(call string, callers int) time.Duration {
	return all[place{routed, call, callers}].p50() - all[place{direct, call, callers}].p50()
}

// calls sets the calls through the controller's driver beside those past it.
func (s *size) calls() string {
	t := markdown.Table{{"call", "callers", "p50", "p99", "direct p50", "p99", "p50 more", "p50 ratio"}}
	for _, n := range callers {
		for _, c := range life {
			a, b := s.samples[place{routed, c.name, n}], s.samples[place{direct, c.name, n}]
			t.Row(c.name, fmt.Sprint(n), millis(a.p50()), millis(a.at(99)), millis(b.p50()), millis(b.at(99)),
				millis(s.samples.more(c.name, n)), fmt.Sprintf("%.2f", float64(a.p50())/float64(b.p50())))
		}
		a := s.samples[place{routed, anywhereCall, n}]
		t.Row(anywhereCall, fmt.Sprint(n), millis(a.p50()), millis(a.at(99)), "", "", "", "")
	}
	return fmt.Sprintf("### Calls: %d nodes, %d volumes\n\nIn milliseconds.\n\n%s", s.nodes, s.volumes, t.Text(true))
}

func (s *size) lists() string {
	t := markdown.Table{{"ListVolumes", "callers", "page p50", "p99", "whole list p50", "most"}}
	for _, n := range callers {
		for _, entries := range pageSizes {
			page, whole := s.samples[place{routed, pageOf(entries), n}], s.samples[place{routed, wholeList(entries), n}]
			t.Row(pageName(entries), fmt.Sprint(n), millis(page.p50()), millis(page.at(99)), millis(whole.p50()), millis(whole.at(100)))
		}
	}
	return "### Lists\n\nIn milliseconds; callers go through the whole list.\n\n" + t.Text(true)
}

func pageName(entries int) string { return fmt.Sprintf("pages of %d", entries) }
