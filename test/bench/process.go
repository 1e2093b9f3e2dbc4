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
	children    int
	// rpcs is the number of NFS calls of the machine. One server at a time is called.
	rpcs int
}

// usage reads the usage of the process. It shows exactly whether a process was started between
// two readings: every process causes page faults. A process that has ended has increased
// childFaults (proc_pid_stat(5), cminflt), and one that has not ended is a child. Threads
// count as neither.
func (s *server) usage() usage {
	const childFaults = 11
	fields := measure.Get(stat(s.PID))
	faults := measure.Get(strconv.ParseUint(fields[childFaults], 10, 64))
	return usage{cpu: s.cpuTime(), childFaults: faults, children: countChildren(s.PID), rpcs: clientCalls()}
}

// startedSince reports whether a process was started since before.
func (u usage) startedSince(before usage) bool {
	return u.childFaults != before.childFaults || u.children > before.children
}

// cpuTime reads the CPU clock of the process in nanoseconds: user and system time of all
// threads, also of ended ones. /proc/PID/stat has only hundredths of a second.
func (s *server) cpuTime() time.Duration {
	const schedClock = 2 // CPUCLOCK_SCHED; the clock's number is as in clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^s.PID)<<3|schedClock, &t); err != nil {
		measure.Must(fmt.Errorf("CPU clock of process %d: %w", s.PID, err))
	}
	return time.Duration(t.Nano())
}

// stat reads /proc/PID/stat; the fields have the numbers of proc_pid_stat(5).
func stat(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may contain blanks
	return append([]string{"", "", ""}, strings.Fields(rest)...), nil
}

func countChildren(pid int) int {
	const parent = 4
	n := 0
	all, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, path := range all {
		one, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			continue
		}
		// A process that has ended meanwhile is no child.
		if fields, err := stat(one); err == nil && fields[parent] == strconv.Itoa(pid) {
			n++
		}
	}
	return n
}
