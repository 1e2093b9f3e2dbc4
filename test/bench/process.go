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

// usage is what a process has used so far.
type usage struct {
	cpu time.Duration
	// childFaults are the page faults of children that it has waited for.
	childFaults uint64
	children    int
	// rpcs are of the whole machine, of which one server at a time is called.
	rpcs int
}

// usage reads the process's usage. Whether a process was started between two
// readings is told exactly: every process takes page faults, so one that ended
// has made childFaults grow when it was waited for (proc_pid_stat(5), cminflt),
// and one that did not end is a child. Threads count as neither.
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

// startedSince tells whether a process was started since before.
func (u usage) startedSince(before usage) bool {
	return u.childFaults != before.childFaults || u.children > before.children
}

// cpuTime reads the CPU clock of a process, user and system of all its threads
// that are and were, in nanoseconds: /proc/PID/stat has hundredths of a second.
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
		// A process that is gone meanwhile is nobody's child.
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
