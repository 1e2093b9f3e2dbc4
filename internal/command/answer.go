package command

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// ErrTooMuch means: a program printed more than was to be read.
var ErrTooMuch = errors.New("it printed too much")

// Answer runs a program that somebody else wrote, in a process group of its own, all of
// which is killed when ctx ends; the program itself also when this process dies. What
// the program left running goes on, and is not waited for.
//
// It returns what the program printed to its standard output, also if it failed: at most
// atMost bytes, of more ErrTooMuch. An *Error has the end of what it printed to its
// standard error.
func (c Command) Answer(ctx context.Context, atMost int) (string, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", c.Name, ErrMissing)
	}
	runtime.LockOSThread() // see Output
	defer runtime.UnlockOSThread()

	out, errs := head{left: atMost}, tail{}
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case out.over:
		return string(out.kept), fmt.Errorf("%s: %w: more than %d bytes", c.Name, ErrTooMuch, atMost)
	case err == nil, errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil: // a child has its output still open
		return string(out.kept), nil
	case ctx.Err() != nil:
		return string(out.kept), fmt.Errorf("%s: %w", c.Name, ctx.Err())
	case errors.As(err, &exit):
		return string(out.kept), failure(c.Name, c.Args, exit, errs.String())
	}
	return "", fmt.Errorf("%s: %w", c.Name, err)
}

// head keeps the beginning of what is written to it, and refuses more.
type head struct {
	kept []byte
	left int
	over bool
}

func (h *head) Write(b []byte) (int, error) {
	n := min(len(b), h.left)
	h.kept, h.left = append(h.kept, b[:n]...), h.left-n
	if n < len(b) {
		h.over = true
		return n, ErrTooMuch
	}
	return n, nil
}
