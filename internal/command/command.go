// Package command is the one place that starts other programs: mkfs, fsck, and this
// program itself as the worker of a pool.
// Nothing that a hot path needs is here; those make system calls.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ErrMissing means: the program is not installed where PATH looks.
var ErrMissing = errors.New("program not found in PATH")

// Error is a program that ran and failed.
type Error struct {
	Name string
	Args []string
	Code int // exit status; -1 if a signal ended it
	// Output is the end of what it printed.
	Output string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s %s: exit status %d: %s", e.Name, strings.Join(e.Args, " "), e.Code, e.Output)
}

// Command is a program to run.
type Command struct {
	Name string
	Args []string
	// Env is added to this process's environment, in the C locale.
	Env []string
	// Hold are files that are open in the program too, from descriptor 3 on,
	// so that a lock on one lasts until the program is gone, whatever becomes
	// of us.
	Hold []*os.File
}

// Run starts the program, waits for it, and returns an *Error if it fails. It
// is killed when ctx ends, and by the kernel when this process dies.
func (c Command) Run(ctx context.Context) error {
	_, err := c.Output(ctx)
	return err
}

// Output is Run, and returns what the program printed.
func (c Command) Output(ctx context.Context) (string, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return "", fmt.Errorf("%s: %w: install the package that has it, or run the driver from its image", c.Name, ErrMissing)
	}
	// PR_SET_PDEATHSIG fires when the parent *thread* ends (prctl(2)), so the
	// thread that starts the program has to outlive it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.Env...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.ExtraFiles = c.Hold
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err = cmd.Run(); err == nil {
		return out.String(), nil
	}
	if ctx.Err() != nil {
		return "", fmt.Errorf("%s: %w", c.Name, ctx.Err())
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return "", fmt.Errorf("%s: %w", c.Name, err)
	}
	return "", &Error{Name: c.Name, Args: c.Args, Code: exit.ExitCode(), Output: lastLines(out.String(), 4)}
}

// lastLines keeps the end of a program's output, where the reason stands, on
// one line.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}
