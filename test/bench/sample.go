package main

import (
	"slices"
	"time"
)

// sample has the measurements of one call on one server.
type sample struct {
	took      []time.Duration
	wall, cpu time.Duration
	// rpcs is the number of calls of this machine to NFS servers during the measurement.
	rpcs int
	// processes: the server started processes.
	processes bool
}

func (s *sample) add(took []time.Duration, wall time.Duration, before, after usage) {
	s.took = append(s.took, took...)
	s.wall += wall
	s.cpu += after.cpu - before.cpu
	s.rpcs += after.rpcs - before.rpcs
	s.processes = s.processes || after.startedSince(before)
}

// at is a percentile of the times.
func (s *sample) at(percent int) time.Duration {
	if len(s.took) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.took))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

func (s *sample) p50() time.Duration { return s.at(50) }

// rate is the number of calls per second.
func (s *sample) rate() float64 { return float64(len(s.took)) / s.wall.Seconds() }

func (s *sample) cpuPerCall() time.Duration { return s.cpu / time.Duration(max(1, len(s.took))) }

// slower is the ratio of the medians of s and other.
func (s *sample) slower(other *sample) float64 { return float64(s.p50()) / float64(other.p50()) }

// samples has a sample for each server, call and number of callers.
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
