package main

import (
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// sample contains the measurements of one call on one server.
type sample struct {
	measure.Durations
	// wall is the sum of the durations of the turns, and cpu the CPU time of the server.
	wall, cpu time.Duration
	// rpcs is the number of NFS calls of this machine during the measurement.
	rpcs int
	// processes is true if the server started processes.
	processes bool
}

// add adds one turn: the durations of its calls, its duration, and the usage of the server before and
// after it.
func (s *sample) add(took measure.Durations, wall time.Duration, before, after usage) {
	s.Add(took...)
	s.wall += wall
	s.cpu += after.cpu - before.cpu
	s.rpcs += after.rpcs - before.rpcs
	s.processes = s.processes || after.startedSince(before)
}

// rate is the number of calls per second.
func (s *sample) rate() float64 { return float64(len(s.Durations)) / s.wall.Seconds() }

func (s *sample) cpuPerCall() time.Duration { return s.cpu / time.Duration(max(1, len(s.Durations))) }

// slower returns the median of s divided by the median of other.
func (s *sample) slower(other *sample) float64 { return float64(s.P50()) / float64(other.P50()) }

// samples contains a sample for each server, call and number of callers.
type samples map[sampleKey]*sample

type sampleKey struct {
	server  string
	call    string
	callers int
}

// of returns the sample of a call. It creates an empty one if necessary.
func (all samples) of(server, call string, callers int) *sample {
	at := sampleKey{server, call, callers}
	if all[at] == nil {
		all[at] = &sample{}
	}
	return all[at]
}
