package command

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// gentleStep is the time for which Gently lets a program run, and then stops it.
const gentleStep = 100 * time.Millisecond

// Gently does the same as Output for a long program that must not slow down others: it stops the program half of the time. It
// returns only the first limit bytes of the output, also if the program failed.
func (c Command) Gently(ctx context.Context, limit int) (_ string, err error) {
	ctx, span := c.startSpan(ctx)
	defer endSpan(span, &err)
	out := beginning{head{left: limit}}
	cmd, err := c.prepare(ctx, &out)
	if err != nil {
		return "", err
	}
	if err = runGently(cmd); err != nil {
		err = c.explain(ctx, err, string(out.kept))
	}
	return string(out.kept), err
}

// runGently does the same as run, and stops the program half of the time.
func runGently(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	var pauses sync.WaitGroup
	pauses.Go(func() { pause(cmd.Process, ended) })
	err := cmd.Wait()
	close(ended)
	pauses.Wait()
	return err
}

// pause stops a process and lets it continue, in turns, until ended is closed.
func pause(p *os.Process, ended <-chan struct{}) {
	tick := time.NewTicker(gentleStep)
	defer tick.Stop()
	for next := syscall.SIGSTOP; ; {
		select {
		case <-ended:
			return
		case <-tick.C:
		}
		_ = p.Signal(next) // fails only if the process has ended
		if next == syscall.SIGSTOP {
			next = syscall.SIGCONT
		} else {
			next = syscall.SIGSTOP
		}
	}
}

// beginning keeps the first bytes that are written to it, and drops the others.
type beginning struct{ head }

func (b *beginning) Write(p []byte) (int, error) {
	_, _ = b.head.Write(p)
	return len(p), nil
}
