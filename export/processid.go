package export

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// processID identifies a process by its PID and the time of its start, because PIDs are reused.
type processID struct {
	pid int
	// start is the time of the start, in clock ticks since the node was started.
	start uint64
}

// self is this process.
var self = sync.OnceValue(func() processID {
	p := processID{pid: os.Getpid()}
	p.start, _ = startOf(p.pid)
	return p
})

func (p processID) String() string { return fmt.Sprintf("%d-%d", p.pid, p.start) }

// parseProcessID parses the result of String. It refuses a PID without a start time, because PIDs are reused.
func parseProcessID(s string) (p processID, err error) {
	pid, start, _ := strings.Cut(s, "-")
	if p.pid, err = strconv.Atoi(pid); err != nil {
		return p, err
	}
	p.start, err = strconv.ParseUint(start, 10, 64)
	if err == nil && p.start == 0 {
		err = fmt.Errorf("process ID %q has no start time", s)
	}
	return p, err
}

// ended reports whether the process has ended, with all its files closed.
func (p processID) ended() bool {
	start, err := startOf(p.pid)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH):
		return true
	case err != nil:
		return false
	}
	return start != p.start
}

// startOf returns the time of a process's start (proc_pid_stat(5)).
func startOf(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The program's name is in parentheses and may contain any character. The field after the name
	// is field 3 of the line, and the start time is field 22.
	const startTime = 22 - 3
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= startTime {
		return 0, fmt.Errorf("/proc/%d/stat: %q has no start time", pid, b)
	}
	return strconv.ParseUint(string(fields[startTime]), 10, 64)
}
