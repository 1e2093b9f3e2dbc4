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

// Child is a running program. If Start started it, it also ends with this process.
type Child struct {
	cmd    *exec.Cmd
	output tail
	done   chan struct{}
	err    error // set before done is closed
}

// Start starts the program with input as its standard input. The output of the program goes to the standard error of
// this process, unless c.Quiet is set. The caller may close the files in Hold.
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

// StartDetached starts the program in its own session (setsid(2)). The program continues when this process
// ends, and receives no signal for this process's group or terminal. Its standard files are
// /dev/null. The caller may close the files in Hold.
func (c Command) StartDetached() (*Child, error) {
	child, err := c.child()
	if err != nil {
		return nil, err
	}
	child.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return child.start()
}

// child returns a Child that is not started.
func (c Command) child() (*Child, error) {
	path, err := exec.LookPath(c.Name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Name, ErrMissing)
	}
	child := &Child{cmd: exec.Command(path, c.Args...), output: tail{to: os.Stderr}, done: make(chan struct{})} //nolint:noctx // the program outlives the call that starts it
	child.cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.Env...)
	child.cmd.ExtraFiles = c.Hold
	child.cmd.WaitDelay = time.Second
	return child, nil
}

// start starts the program, and returns when it runs or has failed to start.
func (c *Child) start() (*Child, error) {
	started := make(chan error)
	go c.startAndWait(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w", c.cmd.Path, err)
	}
	return c, nil
}

// startAndWait starts the program and waits for its end. It runs on a thread of its own, because
// PR_SET_PDEATHSIG kills the program when the thread that started it ends.
func (c *Child) startAndWait(started chan<- error) {
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

// PID returns the process ID.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Kill kills the program. The program ends later if one of its threads waits in the kernel.
func (c *Child) Kill() { _ = c.cmd.Process.Kill() } // fails only if the program has ended

// Done is closed when the program and all its threads have ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Err returns nil or an *Error once Done is closed.
func (c *Child) Err() error {
	select {
	case <-c.done:
		return c.err
	default:
		return nil
	}
}

// tail copies the written bytes to another writer, and keeps the last keptOutput bytes.
type tail struct {
	to   io.Writer // may be nil
	mu   sync.Mutex
	kept []byte
}

// keptOutput is the number of bytes that a tail keeps.
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
