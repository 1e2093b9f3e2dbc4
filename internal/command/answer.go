package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// ErrTooMuch means that a program printed more than the maximum.
var ErrTooMuch = errors.New("the program printed too much")

// Answer runs a third-party program in its own process group, and returns the program's standard output,
// also if the program failed. An *Error contains the end of the standard error. Answer fails with ErrTooMuch
// if the standard output exceeds limit bytes.
//
// When ctx ends, the whole group is killed. When this process ends, the kernel kills only the program.
// Answer does not wait for other processes of the group.
func (c Command) Answer(ctx context.Context, limit int) (_ string, err error) {
	ctx, span := c.startSpan(ctx)
	defer endSpan(span, &err)
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", c.Name, ErrMissing)
	}
	out, errs := head{left: limit}, tail{}
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = run(cmd)
	switch {
	case out.over:
		return string(out.kept), fmt.Errorf("%s: %w: more than %d bytes", c.Name, ErrTooMuch, limit)
	case err == nil, errors.Is(err, exec.ErrWaitDelay) && ctx.Err() == nil: // a child process still has the output open
		return string(out.kept), nil
	}
	return string(out.kept), c.explain(ctx, err, errs.String())
}

// head keeps the first bytes that are written to it, and refuses more.
type head struct {
	kept []byte
	left int  // bytes that it can still keep
	over bool // more was written than it can keep
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
