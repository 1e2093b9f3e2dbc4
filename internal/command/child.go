package command

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Child is a program that lives on beside this process, until it ends by itself or is
// killed. One that Start has started ends with this process, too.
type Child struct {
	cmd    *exec.Cmd
	output tail
	done   chan struct{}
	err    error // once done is closed
}

// Start starts the program with input as its standard input. What it prints goes
// to this process's standard error. The caller may close its files in Hold.
func (c Command) Start(input []byte) (*Child, error) {
	child, err := c.child()
	if err != nil {
		return nil, err
	}
	if c.Quiet {
		child.output.to = nil
	}
	child.cmd.Stdin = bytes.NewReader(input)
	child.cmd.Stdout, child.cmd.Stderr = &child.output, &child.output
	child.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return child.start()
}

// StartDetached starts the program so that it goes on when this process dies, in a
// session of its own (setsid(2)): no signal to this process's group or terminal
// reaches it. Its standard files are /dev/null. The caller may close its files in Hold.
func (c Command) StartDetached() (*Child, error) {
	child, err := c.child()
	if err != nil {
		return nil, err
	}
	child.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return child.start()
}

func (c Command) child() (*Child, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Name, ErrMissing)
	}
	child := &Child{cmd: exec.Command(path, c.Args...), output: tail{to: os.Stderr}, done: make(chan struct{})} //nolint:noctx // it outlives the call that needs it first
	child.cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.Env...)
	child.cmd.ExtraFiles = c.Hold
	child.cmd.WaitDelay = time.Second
	return child, nil
}

func (c *Child) start() (*Child, error) {
	started := make(chan error)
	go c.own(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w", c.cmd.Path, err)
	}
	return c, nil
}

// own starts the program and stays until it has ended, on a thread that does
// nothing else: PR_SET_PDEATHSIG is about the parent thread (see Output).
func (c *Child) own(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := c.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	err = c.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = failure(c.cmd.Args[0], c.cmd.Args[1:], exit, c.output.String())
	}
	c.err = err
	close(c.done)
}

// PID is the program's.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Kill kills the program. It may be a while until it has ended: a thread of it that
// waits in the kernel may have to wait on.
func (c *Child) Kill() { _ = c.cmd.Process.Kill() } // it has ended, or will

// Done is closed when the program has ended and all its threads with it.
func (c *Child) Done() <-chan struct{} { return c.done }

// Err is how the program has ended, once Done is closed: nil, or an *Error.
func (c *Child) Err() error {
	select {
	case <-c.done:
		return c.err
	default:
		return nil
	}
}

// tail passes on what is written to it, and keeps the end.
type tail struct {
	to   io.Writer // nil: nobody
	mu   sync.Mutex
	kept []byte
}

const keptOutput = 4 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	t.kept = append(t.kept, b...)
	t.kept = t.kept[max(0, len(t.kept)-keptOutput):]
	t.mu.Unlock()
	if t.to == nil {
		return len(b), nil
	}
	return t.to.Write(b)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.kept)
}
