package main

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

// process is a started process.
type process struct {
	name  string
	log   string
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended
	err   error         // how it ended; read it after ended
}

// launch starts a process.
func (g *ground) launch(name, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(g.base, fmt.Sprintf("%02d-%s.log", len(g.processes), name)), ended: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// Not CommandContext: processes are stopped in order, after what uses them.
	p.cmd = exec.Command(program, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	g.processes = append(g.processes, p)
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// patience is the limit of await.
const patience = time.Minute

// await polls until a condition holds.
func (p *process) await(ctx context.Context, what string, every time.Duration, is func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for !is() {
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %w\n%s", p.name, p.err, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w\n%s", what, ctx.Err(), p.tail())
		case <-tick.C:
		}
	}
	return nil
}

// signal sends a signal to a running process.
func (p *process) signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("%s to %s: %w", s, p.name, err)
	}
	return nil
}

// stop ends the process and returns when it has ended.
func (p *process) stop() error {
	select {
	case <-p.ended: // earlier, and its users have seen that
		return nil
	default:
	}
	// A halted process must continue to end.
	errs := []error{p.signal(syscall.SIGTERM), p.signal(syscall.SIGCONT)}
	select {
	case <-p.ended:
	case <-time.After(patience):
		errs = append(errs, fmt.Errorf("%s did not stop when told to", p.name), p.cmd.Process.Kill())
		<-p.ended
	}
	if p.err != nil && !p.terminated() {
		errs = append(errs, fmt.Errorf("%s: %w\n%s", p.name, p.err, p.tail()))
	}
	return errors.Join(errs...)
}

// terminated tells whether the signal came before the process could handle it.
func (p *process) terminated() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// tail returns the end of the process's log.
func (p *process) tail() string {
	b, _ := os.ReadFile(p.log) // the error is useful without it
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// needs are the resources of a process; memory is in bytes.
type needs struct {
	resident, anonymous, peak int64
	heap                      int64 // objects in use or not yet collected
	goroutines                int64
	files, sockets            int64
}

func (p *process) needs(ctx context.Context, metrics string) (n needs, err error) {
	for _, field := range []struct {
		name string
		to   *int64
	}{{"VmRSS", &n.resident}, {"RssAnon", &n.anonymous}, {"VmHWM", &n.peak}} {
		if *field.to, err = p.memory(field.name); err != nil {
			return n, err
		}
	}
	if n.files, n.sockets, err = p.open(); err != nil {
		return n, err
	}
	all, err := scrape(ctx, metrics)
	n.heap, n.goroutines = int64(all["go_memstats_heap_alloc_bytes"]), int64(all["go_goroutines"])
	return n, err
}

// memory reads a field of /proc/PID/status, in bytes.
func (p *process) memory(field string) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no %s", p.cmd.Process.Pid, field)
}

// open counts the descriptors of the process and its sockets among them.
func (p *process) open() (files, sockets int64, err error) {
	dir := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil { // closed meanwhile
			continue
		}
		files++
		if strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return files, sockets, err
}

// scrape reads the metrics without labels.
func scrape(ctx context.Context, address string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Close = true // otherwise the next count contains its connection
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
