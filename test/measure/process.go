package measure

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// WaitTimeout is the default maximum time to wait for a process.
const WaitTimeout = time.Minute

// Process is a process of a benchmark.
type Process struct {
	Name  string
	PID   int
	cmd   *exec.Cmd
	log   string
	ended chan struct{} // closed when the process has ended
	err   error         // the result of Wait; valid when ended is closed
}

// next returns the path of a file for the process that is launched next.
func (g *Testbed) next(name, suffix string) string {
	return filepath.Join(g.Dir, fmt.Sprintf("%02d-%s%s", len(g.processes), name, suffix))
}

// Socket returns a path for the socket of the process that is launched next.
func (g *Testbed) Socket(name string) string { return g.next(name, ".sock") }

// Launch starts a process whose output goes to a log file.
func (g *Testbed) Launch(name, program string, args ...string) *Process {
	p := &Process{Name: name, log: g.next(name, ".log"), ended: make(chan struct{})}
	log := Get(os.Create(p.log))
	defer log.Close()
	// Neither a context nor a Ctrl-C ends the process, because Stop must end the processes in
	// order, after their clients.
	p.cmd = exec.Command(program, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	Must(p.cmd.Start())
	p.PID = p.cmd.Process.Pid
	g.processes = append(g.processes, p)
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p
}

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Await polls until is returns true. It fails after timeout, or if the process ends.
func (p *Process) Await(ctx context.Context, what string, interval, timeout time.Duration, is func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for !is() {
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %w\n%s", p.Name, p.err, p.Tail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w\n%s", what, ctx.Err(), p.Tail())
		case <-tick.C:
		}
	}
	return nil
}

// Signal sends a signal to the running process.
func (p *Process) Signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("%s to %s: %w", s, p.Name, err)
	}
	return nil
}

// Stop ends the process and waits for its end. It returns no error for a process that has already
// ended, because the calls of its clients have failed then.
func (p *Process) Stop() error {
	select {
	case <-p.ended:
		return nil
	default:
	}
	errs := []error{p.Signal(syscall.SIGTERM)}
	// A process that was stopped by SIGSTOP ends only after it continues. The error is not needed
	// because the process may already have ended.
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	select {
	case <-p.ended:
	case <-time.After(WaitTimeout):
		errs = append(errs, fmt.Errorf("%s did not end after SIGTERM", p.Name), p.cmd.Process.Kill())
		<-p.ended
	}
	if p.err != nil && !p.terminated() {
		errs = append(errs, fmt.Errorf("%s: %w\n%s", p.Name, p.err, p.Tail()))
	}
	return errors.Join(errs...)
}

// terminated reports whether SIGTERM ended the process before it handled the signal.
func (p *Process) terminated() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// Tail returns the last five lines of the process's log.
func (p *Process) Tail() string {
	b, _ := os.ReadFile(p.log) // without the log, the caller's error is still useful
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// Memory reads a field in kB of /proc/PID/status and returns it in bytes.
func (p *Process) Memory(field string) int64 {
	status := Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID)))
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return Get(strconv.ParseInt(strings.Fields(value)[0], 10, 64)) << 10
		}
	}
	Must(fmt.Errorf("/proc/%d/status has no %s", p.PID, field))
	return 0
}

// Scrape reads the metrics at a host:port. The keys are the names with their labels.
func Scrape(ctx context.Context, address string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Close = true // an idle connection would count as a socket of the measured process
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	all := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		if value, err := strconv.ParseFloat(text, 64); err == nil {
			all[name] = value
		}
	}
	return all, lines.Err()
}
