package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// steps is a backend.Trimmer whose steps begin when the test receives from entered, and end with the error that the test
// sends to results. A volume has two steps.
type steps struct {
	entered chan uint64
	results chan error
	running atomic.Int32
	budget  *background.Budget
}

func (*steps) CheckTrim(volume.Volume) error { return nil }

func (s *steps) TrimBudget(volume.Volume) (*background.Budget, error) { return s.budget, nil }

func (s *steps) TrimStep(_ volume.Volume, from uint64) (blockdev.Trimmed, error) {
	s.running.Add(1)
	defer s.running.Add(-1)
	s.entered <- from
	err := <-s.results
	return blockdev.Trimmed{Bytes: 1, Next: from + 1, Done: from == 1}, err
}

var _ backend.Trimmer = &steps{}

// newTrimTest returns trims of a pool with one volume.
func newTrimTest(t *testing.T) (*trims, *steps, trimmable) {
	t.Helper()
	dir := t.TempDir()
	state, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { _ = state.Close() })
	c := pool.Config{Name: "p", Directory: pool.Directory{Path: filepath.Join(dir, "p")}, Trim: pool.Daily}
	p, err := pool.Open(t.Context(), nil, c, state, nil)
	must(t, err)
	t.Cleanup(p.Close)
	must(t, os.Mkdir(filepath.Join(dir, "p", "volumes", "v"), 0o700))
	s := &steps{entered: make(chan uint64), results: make(chan error)}
	tr := newTrims(t.Context(), nil, nil, []pool.Config{c})
	t.Cleanup(tr.Close)
	return tr, s, trimmable{p: p, b: s, v: volume.Volume{ID: p.ID("loop", "v")}}
}

// inBackground runs a trim, and returns its error.
func inBackground(t *testing.T, tr *trims, c trimmable) <-chan error {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		_, err := tr.trim(t.Context(), c)
		result <- err
	}()
	return result
}

func lastTrim(t *testing.T, c trimmable) time.Time {
	t.Helper()
	at, err := c.p.Trimmed(c.v)
	must(t, err)
	return at
}

// TestTrimSteps: a step that another call disturbs is repeated. The time of the trim is recorded at the end.
func TestTrimSteps(t *testing.T) {
	tr, s, c := newTrimTest(t)
	result := inBackground(t, tr, c)
	for i, step := range []struct {
		from   uint64
		result error
	}{{0, nil}, {1, volume.ErrPending}, {1, nil}} {
		if from := <-s.entered; from != step.from {
			t.Errorf("step %d: got address %d, want %d", i, from, step.from)
		}
		if !lastTrim(t, c).IsZero() {
			t.Errorf("step %d: got a recorded trim, want none before the end", i)
		}
		s.results <- step.result
	}
	must(t, <-result)
	if lastTrim(t, c).IsZero() {
		t.Error("got no recorded trim")
	}
}

// TestTrimHold: Hold returns when the running step has ended, and no other step begins before release.
func TestTrimHold(t *testing.T) {
	tr, s, c := newTrimTest(t)
	result := inBackground(t, tr, c)
	<-s.entered
	held := make(chan func(), 1)
	go func() { held <- tr.Hold(t.Context(), c.v.ID) }()
	await(t, func() bool { tr.mu.Lock(); defer tr.mu.Unlock(); return tr.volumes[c.v.ID].holds == 1 })
	select {
	case <-held:
		t.Fatal("Hold returned during a step")
	default:
	}
	s.results <- nil
	release := <-held
	if err := <-result; !errors.Is(err, errTrimEnds) || s.running.Load() != 0 {
		t.Errorf("got error %v and %d running steps, want the end of the trim", err, s.running.Load())
	}
	if _, err := tr.trim(t.Context(), c); !errors.Is(err, errTrimEnds) {
		t.Errorf("a trim during the hold: got error %v, want that it is refused", err)
	}
	release()
	if !lastTrim(t, c).IsZero() || tr.byPool["p"].failures != 0 || len(tr.volumes) != 0 {
		t.Errorf("got recorded time %v, %v failures and states %v, want none of an interrupted trim", lastTrim(t, c), tr.byPool["p"].failures, tr.volumes)
	}
	result = inBackground(t, tr, c)
	<-s.entered
	s.results <- nil
	<-s.entered
	s.results <- nil
	must(t, <-result)
}

// TestTrimHoldTimeout: Hold does not wait longer than its context.
func TestTrimHoldTimeout(t *testing.T) {
	tr, s, c := newTrimTest(t)
	result := inBackground(t, tr, c)
	<-s.entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	tr.Hold(ctx, c.v.ID)()
	s.results <- nil
	if err := <-result; !errors.Is(err, errTrimEnds) {
		t.Errorf("got error %v, want the end of the trim", err)
	}
}

// TestTrimTurn: a step has the turn on the disk, also if it ends because another call was changing the volume.
func TestTrimTurn(t *testing.T) {
	tr, s, c := newTrimTest(t)
	disk, err := os.Open(t.TempDir())
	must(t, err)
	defer disk.Close()
	s.budget = c.p.Background(disk)
	result := inBackground(t, tr, c)
	for i, end := range []error{nil, volume.ErrPending, nil} {
		<-s.entered
		other := make(chan error, 1)
		go func() { other <- c.p.Background(disk).Do(t.Context(), func() (int64, error) { return 0, nil }) }()
		select {
		case <-other:
			t.Errorf("step %d: another task had the turn during the step", i)
		case <-time.After(100 * time.Millisecond):
		}
		s.results <- end
		must(t, <-other)
	}
	must(t, <-result)
}

// TestTrimClose: Close refuses further trims.
func TestTrimClose(t *testing.T) {
	tr, _, c := newTrimTest(t)
	tr.Close()
	if _, err := tr.trim(t.Context(), c); !errors.Is(err, errTrimEnds) {
		t.Errorf("got error %v, want that the trim is refused", err)
	}
}

// TestTrimFailure: a failure is counted, and no trim is recorded.
func TestTrimFailure(t *testing.T) {
	tr, s, c := newTrimTest(t)
	result := inBackground(t, tr, c)
	<-s.entered
	s.results <- os.ErrInvalid
	if err := <-result; !errors.Is(err, os.ErrInvalid) {
		t.Errorf("got error %v, want that of the step", err)
	}
	if n := tr.byPool["p"].failures; n != 1 || !lastTrim(t, c).IsZero() {
		t.Errorf("got %v failures and a trim at %v, want one failure", n, lastTrim(t, c))
	}
}

// await waits until a condition holds.
func await(t *testing.T, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("timed out")
		}
	}
}
