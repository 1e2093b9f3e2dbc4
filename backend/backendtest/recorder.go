package backendtest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// recorder repeatedly writes an increasing number to several places, in their order, and makes each write durable
// before the next. At any time the number at a place therefore equals that at the place before it, or is one
// less.
type recorder struct {
	// files and at are the file and the offset of each place.
	files []*os.File
	at    []int64
	// done is the last number that was written to all places.
	done atomic.Int64
	stop context.CancelFunc
	ends sync.WaitGroup
	err  error // of the first write that failed; set before ends is done
}

// recordSize is the size of a written number in bytes: a block, because some places are in raw devices.
const recordSize = 4096

// places returns the two places in a volume: files of its filesystem, or offsets of its device after the range to
// which write writes.
func (l *testVolume) places(target string) (paths []string, at []int64) {
	if l.kind.Block() {
		return []string{target, target}, []int64{64 * mib, 32 * mib}
	}
	return []string{l.data(target) + "-first", l.data(target) + "-second"}, []int64{0, 0}
}

// record starts a recorder that writes to published volumes, and returns when the first numbers are written.
func record(t *testing.T, volumes ...*testVolume) *recorder {
	t.Helper()
	r := &recorder{}
	for _, l := range volumes {
		paths, at := l.places(l.target)
		for i, path := range paths {
			f, err := os.OpenFile(path, os.O_WRONLY|createUnlessDevice(path), 0o644)
			must(t, err)
			r.files, r.at = append(r.files, f), append(r.at, at[i])
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	r.stop = cancel
	r.ends.Go(func() { r.run(ctx) })
	t.Cleanup(func() { _ = r.end() })
	r.await(t)
	return r
}

// run writes numbers until ctx ends or a write fails.
func (r *recorder) run(ctx context.Context) {
	for n := int64(1); ctx.Err() == nil && r.err == nil; n++ {
		for i, f := range r.files {
			b := make([]byte, recordSize)
			binary.LittleEndian.PutUint64(b, uint64(n))
			_, err := f.WriteAt(b, r.at[i])
			if r.err = errors.Join(err, f.Sync()); r.err != nil {
				return
			}
		}
		r.done.Store(n)
	}
}

// await waits until more numbers are written.
func (r *recorder) await(t *testing.T) {
	t.Helper()
	until := r.done.Load() + 3
	await(t, "the recorder to write more numbers", func() bool { return r.done.Load() >= until })
}

// end stops the recorder, and returns its error.
func (r *recorder) end() error {
	r.stop()
	r.ends.Wait()
	for _, f := range r.files {
		f.Close()
	}
	r.files = nil
	return r.err
}

// recorded reads the numbers at all places of published volumes: those of record, or copies of them.
func recorded(t *testing.T, volumes ...*testVolume) (numbers []int64) {
	t.Helper()
	for _, l := range volumes {
		paths, at := l.places(l.target)
		for i, path := range paths {
			f, err := os.Open(path)
			must(t, err)
			b := make([]byte, recordSize)
			if _, err := f.ReadAt(b, at[i]); err != nil && !errors.Is(err, io.EOF) {
				t.Errorf("reading the recorded numbers: %v", err)
			}
			f.Close()
			numbers = append(numbers, int64(binary.LittleEndian.Uint64(b)))
		}
	}
	return numbers
}

// wantMoment fails the test unless the volumes show one point in time of a recorder, at which it wrote a number
// from since to until.
func wantMoment(t *testing.T, since, until int64, volumes ...*testVolume) {
	t.Helper()
	numbers := recorded(t, volumes...)
	last := numbers[len(numbers)-1]
	if last < since || numbers[0] > until+1 {
		t.Errorf("got recorded numbers %v, want %d to %d", numbers, since, until+1)
	}
	for i, n := range numbers {
		if n > numbers[0] || n < last || n-last > 1 || i > 0 && n > numbers[i-1] {
			t.Errorf("got recorded numbers %v, want numbers of one point in time", numbers)
			return
		}
	}
}

// allocatedTo returns the allocated size of a file in bytes.
func allocatedTo(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return st.Blocks * 512
}
