package main

import (
	"slices"
	"time"
)

// sample is how long calls took.
type sample []time.Duration

// at is the time within which the given percentage of the calls ended.
func (s sample) at(percent int) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

func (s sample) p50() time.Duration { return s.at(50) }

// samples holds one for each call on its way and number of callers.
type samples map[place]sample

type place struct {
	way     way
	call    string
	callers int
}

// way is how calls get to a node.
type way string

const (
	routed way = "routed"
	direct way = "direct"
)

func (all samples) add(w way, call string, callers int, took []time.Duration) {
	at := place{w, call, callers}
	all[at] = append(all[at], took...)
}
