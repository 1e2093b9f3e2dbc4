// Package command is the only package that starts processes: mkfs, fsck, and this program itself as
// the worker of a pool. Frequent operations use system calls instead.
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

// ErrMissing means: the program is not in PATH.
var ErrMissing = errors.New("program not found in PATH")

// Error is the failure of a program that ran.
type Error struct {
	Name string
	Args []string
	Code int // exit status; -1 if a signal ended it
	// Signal is the signal that ended it; 0 if it exited.
	Signal syscall.Signal
	// Output is the end of its output.
	Output string
}

func (e *Error) Error() string {
	how := fmt.Sprintf("exit status %d", e.Code)
	if e.Signal != 0 {
		how = "signal: " + e.Signal.String()
	}
	return fmt.Sprintf("%s %s: %s: %s", e.Name, strings.Join(e.Args, " "), how, e.Output)
}

// failure returns the Error of a program that failed.
func failure(name string, args []string, exit *exec.ExitError, output string) *Error {
	e := &Error{Name: name, Args: args, Code: exit.ExitCode(), Output: lastLines(output, 4)}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		e.Signal = status.Signal()
	}
	return e
}

// Command is a program to run.
type Command struct {
	Name string
	Args []string
	// Env is added to the environment of this process and LC_ALL=C.
	Env []string
	// Hold has files that the program inherits, from descriptor 3 on: their locks last until
	// the program ends, even if this process dies earlier.
	Hold []*os.File
	// Quiet: the output of a started program is only part of its Error.
	Quiet bool
}

// Run starts the program, waits for it, and returns an *Error if it fails. The program is killed when ctx
// ends, and by the kernel when this process ends.
func (c Command) Run(ctx context.Context) error {
	_, err := c.Output(ctx)
	return err
}

// Output is Run, and returns the output of the program.
func (c Command) Output(ctx context.Context) (string, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return "", fmt.Errorf("%s: %w: install the package that contains it, or run the driver from its image", c.Name, ErrMissing)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.Env...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.ExtraFiles = c.Hold
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := run(cmd); err != nil {
		return "", c.explain(ctx, err, out.String())
	}
	return out.String(), nil
}

// run runs a program. PR_SET_PDEATHSIG sends its signal when the parent thread ends (prctl(2)), so the
// thread that starts the program must outlive it.
func run(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// explain returns the error of ctx if it has ended, or else an *Error if the program ran.
func (c Command) explain(ctx context.Context, err error, output string) error {
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.As(err, &exit):
		return failure(c.Name, c.Args, exit, output)
	}
	return fmt.Errorf("%s: %w", c.Name, err)
}

// lastLines returns the last n lines of a program's output, which contain the reason, as one line.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}
