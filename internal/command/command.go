// Package command is the only package that starts processes, for example mkfs, fsck, and this program itself
// as a worker. Frequent operations use system calls instead.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/internal/trace"
)

// ErrMissing means that the program is not in PATH.
var ErrMissing = errors.New("program not found in PATH")

// Error is the failure of a program that ran.
type Error struct {
	Name string
	Args []string
	Code int // exit status; -1 if a signal ended the program
	// Signal is the signal that ended the program; 0 if it exited.
	Signal syscall.Signal
	// Output is the end of the program's output.
	Output string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s %s: %s: %s", e.Name, strings.Join(e.Args, " "), e.end(), e.Output)
}

// end says how the program ended.
func (e *Error) end() string {
	if e.Signal != 0 {
		return "signal: " + e.Signal.String()
	}
	return fmt.Sprintf("exit status %d", e.Code)
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
	// Action is the command of a program that has several, such as lvcreate of lvm(8). It is only used in the name of the span,
	// which contains no arguments.
	Action string
	// Env contains variables for the program. The program also gets the environment of this process and LC_ALL=C.
	Env []string
	// Hold contains files that the program inherits as descriptors 3, 4 and so on. Locks on these files last
	// until the program ends, even if this process ends earlier.
	Hold []*os.File
	// Quiet means that Start does not pass the program's output to the standard error of this process. The *Error
	// contains the end of the output in any case.
	Quiet bool
}

// Run starts the program, waits for it, and returns an *Error if it fails. The program is killed when ctx
// ends, and by the kernel when this process ends.
func (c Command) Run(ctx context.Context) error {
	_, err := c.Output(ctx)
	return err
}

// Output does the same as Run, and also returns the standard output and standard error of the program.
func (c Command) Output(ctx context.Context) (_ string, err error) {
	ctx, span := c.startSpan(ctx)
	defer endSpan(span, &err)
	var out bytes.Buffer
	cmd, err := c.prepare(ctx, &out)
	if err != nil {
		return "", err
	}
	if err := run(cmd); err != nil {
		return "", c.explain(ctx, err, out.String())
	}
	return out.String(), nil
}

// prepare returns a program whose output goes to out, and which is killed as Run describes.
func (c Command) prepare(ctx context.Context, out io.Writer) (*exec.Cmd, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: install the package that contains it, or run the driver from its image", c.Name, ErrMissing)
	}
	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.Env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = c.Hold
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}

// startSpan starts the span of a program.
func (c Command) startSpan(ctx context.Context) (context.Context, trace.Span) {
	return trace.Start(ctx, strings.TrimSpace(c.Name+" "+c.Action))
}

// endSpan ends the span of a program. The arguments and the output of the program are not in the span, because they
// can contain secrets.
func endSpan(span trace.Span, err *error) {
	var failed *Error
	if errors.As(*err, &failed) {
		how := errors.New(failed.end())
		err = &how
	}
	span.End(err)
}

// run runs a program. The kernel kills the program when the thread that started it ends (PR_SET_PDEATHSIG,
// prctl(2)), so the thread must outlive the program.
func run(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// explain returns the error of ctx if ctx has ended, an *Error if the program ran, and otherwise err. It adds the
// name of the program.
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

// lastLines joins the last n lines of a program's output, because the last lines contain the reason of a
// failure.
func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "; ")
}
