package command

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// gentleStep is the longest time for which Gently lets a program run, before it waits for the next turn.
const gentleStep = 20 * time.Millisecond

// Turn waits for a turn, and runs a piece of a task, which returns the number of bytes that it has read and written.
type Turn func(ctx context.Context, piece func() (bytes int64, err error)) error

// Gently does the same as Output for a long program that must not slow down others: the program is stopped unless it has its turn. It
// returns only the first limit bytes of the output, also if the program failed.
func (c Command) Gently(ctx context.Context, limit int, turn Turn) (_ string, err error) {
	ctx, span := c.startSpan(ctx)
	defer endSpan(span, &err)
	out := beginning{head{left: limit}}
	cmd, err := c.prepare(ctx, &out)
	if err != nil {
		return "", err
	}
	if err = runGently(ctx, cmd, turn); err != nil {
		err = c.explain(ctx, err, string(out.kept))
	}
	return string(out.kept), err
}

// runGently does the same as run, and stops the program unless it has its turn.
func runGently(ctx context.Context, cmd *exec.Cmd, turn Turn) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return err
	}
	running, ended := context.WithCancel(ctx)
	var steps sync.WaitGroup
	steps.Go(func() { runSteps(running, cmd.Process, turn) })
	err := cmd.Wait()
	ended()
	steps.Wait()
	return err
}

// runSteps lets a process run when it has its turn, until ctx ends.
func runSteps(ctx context.Context, p *os.Process, turn Turn) {
	for ctx.Err() == nil {
		_ = p.Signal(syscall.SIGSTOP) // fails only if the process has ended
		_ = turn(ctx, func() (int64, error) {
			before := transferred(p)
			_ = p.Signal(syscall.SIGCONT)
			select {
			case <-ctx.Done():
			case <-time.After(gentleStep):
			}
			_ = p.Signal(syscall.SIGSTOP)
			return max(0, transferred(p)-before), nil
		})
	}
}

// transferred returns the number of bytes that a process has read from disks and written; 0 if it has ended.
func transferred(p *os.Process) (bytes int64) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.Pid) + "/io")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) { // proc_pid_io(5)
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if key == "read_bytes" || key == "write_bytes" {
			n, _ := strconv.ParseInt(value, 10, 64)
			bytes += n
		}
	}
	return bytes
}

// beginning keeps the first bytes that are written to it, and drops the others.
type beginning struct{ head }

func (b *beginning) Write(p []byte) (int, error) {
	_, _ = b.head.Write(p)
	return len(p), nil
}
