package main

import (
	"slices"
	"time"
)

// sample contains the durations of calls.
type sample []time.Duration

// at returns a percentile.
func (s sample) at(percent int) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

func (s sample) p50() time.Duration { return s.at(50) }

// samples contains a sample for each call, way and number of callers.
type samples map[place]sample

type place struct {
	way     way
	call    string
	callers int
}

// way is the route of calls to a node.
type way string

const (
	routed way = "routed"
	direct way = "direct"
)

func (all samples) add(w way, call string, callers int, took []time.Duration) {
	at := place{w, call, callers}
	all[at] = append(all[at], took...)
}
