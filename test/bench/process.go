package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/test/measure"
)

// usage is the resource usage of a process since its start.
type usage struct {
	cpu time.Duration
	// childFaults is the number of page faults of children that have ended and were waited
	// for.
	childFaults uint64
	children    int // that run
	// rpcs is the number of NFS calls of the machine. They are all of this server, because only
	// one server is called at a time.
	rpcs int
}

// usage reads the usage of the process. Two readings show whether the process started a child
// between them: a child that has ended increased childFaults (cminflt in proc_pid_stat(5)),
// because every process causes page faults, and a child that still runs is counted in children.
// Threads change neither.
func (s *server) usage() usage {
	const childFaults = 11
	fields := measure.Get(stat(s.PID))
	faults := measure.Get(strconv.ParseUint(fields[childFaults], 10, 64))
	return usage{cpu: s.cpuTime(), childFaults: faults, children: countChildren(s.PID), rpcs: clientCalls()}
}

// startedSince reports whether the process started a child since the reading before.
func (u usage) startedSince(before usage) bool {
	return u.childFaults != before.childFaults || u.children > before.children
}

// cpuTime returns the user and system time of all threads of the process, including ended ones.
// It reads the CPU clock of the process, because /proc/PID/stat only has hundredths of a second.
func (s *server) cpuTime() time.Duration {
	const schedClock = 2 // CPUCLOCK_SCHED; the clock's number is as in clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^s.PID)<<3|schedClock, &t); err != nil {
		measure.Must(fmt.Errorf("CPU clock of process %d: %w", s.PID, err))
	}
	return time.Duration(t.Nano())
}

// stat reads /proc/PID/stat. The indices of the fields are their numbers in proc_pid_stat(5).
func stat(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may contain blanks
	return append([]string{"", "", ""}, strings.Fields(rest)...), nil
}

// countChildren returns the number of running children of a process.
func countChildren(pid int) int {
	const parent = 4
	n := 0
	all, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, path := range all {
		other, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			continue
		}
		// stat fails for a process that has ended since the Glob.
		if fields, err := stat(other); err == nil && fields[parent] == strconv.Itoa(pid) {
			n++
		}
	}
	return n
}
