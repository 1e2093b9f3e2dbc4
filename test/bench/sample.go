package main

import (
	"slices"
	"time"
)

// sample is what was measured of one call on one server.
type sample struct {
	took      []time.Duration
	wall, cpu time.Duration
	// rpcs are this machine's calls to NFS servers meanwhile.
	rpcs int
	// processes: the server started some.
	processes bool
}

func (s *sample) add(took []time.Duration, wall time.Duration, before, after usage) {
	s.took = append(s.took, took...)
	s.wall += wall
	s.cpu += after.cpu - before.cpu
	s.rpcs += after.rpcs - before.rpcs
	s.processes = s.processes || after.startedSince(before)
}

// at is the time within which the given percentage of the calls ended.
func (s *sample) at(percent int) time.Duration {
	if len(s.took) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.took))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

func (s *sample) p50() time.Duration { return s.at(50) }

// rate is in calls per second.
func (s *sample) rate() float64 { return float64(len(s.took)) / s.wall.Seconds() }

func (s *sample) cpuPerCall() time.Duration { return s.cpu / time.Duration(max(1, len(s.took))) }

// slower is how many times longer s takes than other, at the median.
func (s *sample) slower(other *sample) float64 { return float64(s.p50()) / float64(other.p50()) }

// samples holds one for each server, call and number of callers.
type samples map[place]*sample

type place struct {
	server  string
	call    string
	callers int
}

func (all samples) of(server, call string, callers int) *sample {
	at := place{server, call, callers}
	if all[at] == nil {
		all[at] = &sample{}
	}
	return all[at]
}
