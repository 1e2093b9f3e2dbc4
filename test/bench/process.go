package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
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
func (s *server) usage() (usage, error) {
	pid := s.cmd.Process.Pid
	cpu, err := cpuTime(pid)
	if err != nil {
		return usage{}, err
	}
	fields, err := stat(pid)
	if err != nil {
		return usage{}, err
	}
	const childFaults = 11
	faults, err := strconv.ParseUint(fields[childFaults], 10, 64)
	if err != nil {
		return usage{}, err
	}
	return usage{cpu: cpu, childFaults: faults, children: countChildren(pid), rpcs: clientCalls()}, nil
}

// startedSince reports whether a process was started since before.
func (u usage) startedSince(before usage) bool {
	return u.childFaults != before.childFaults || u.children > before.children
}

// cpuTime reads the CPU clock of a process in nanoseconds: user and system time of all
// threads, also of ended ones. /proc/PID/stat has only hundredths of a second.
func cpuTime(pid int) (time.Duration, error) {
	const schedClock = 2 // CPUCLOCK_SCHED; the clock's number is as in clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|schedClock, &t); err != nil {
		return 0, fmt.Errorf("CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// stat reads /proc/PID/stat; the fields have the numbers of proc_pid_stat(5).
func stat(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may have blanks
	return append([]string{"", "", ""}, strings.Fields(rest)...), nil
}

func countChildren(pid int) int {
	const parent = 4
	n := 0
	all, _ := filepath.Glob("/proc/[0-9]*") // the pattern is good
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

// memory reads a field of /proc/PID/status, in bytes.
func (s *server) memory(field string) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no %s", s.cmd.Process.Pid, field)
}
