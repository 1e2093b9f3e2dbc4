package driver

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

// process identifies a process also when another one has its ID: by the time of its start.
type process struct {
	pid int
	// start is in clock ticks since the node was started. 0: unknown, in the names of base
	// mounts of versions that did not record it.
	start uint64
}

// self is this process.
var self = sync.OnceValue(func() process {
	p := process{pid: os.Getpid()}
	p.start, _ = startOf(p.pid)
	return p
})

func (p process) String() string { return fmt.Sprintf("%d-%d", p.pid, p.start) }

func parseProcess(s string) (p process, err error) {
	pid, start, recorded := strings.Cut(s, "-")
	if p.pid, err = strconv.Atoi(pid); err != nil || !recorded {
		return p, err
	}
	p.start, err = strconv.ParseUint(start, 10, 64)
	return p, err
}

// gone tells whether the process has ended. One whose files are still being closed has
// not. A process of an earlier version was started before this one.
func (p process) gone() bool {
	start, err := startOf(p.pid)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH):
		return true
	case err != nil:
		return false
	case p.start == 0:
		return start >= self().start
	}
	return start != p.start
}

// startOf is when a process was started (proc_pid_stat(5)).
func startOf(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name of the program is in parentheses and can have any character.
	const startTime = 22 - 3 // the field behind it is the third
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= startTime {
		return 0, fmt.Errorf("/proc/%d/stat: %q has no start time", pid, b)
	}
	return strconv.ParseUint(string(fields[startTime]), 10, 64)
}
