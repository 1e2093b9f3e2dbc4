package verify

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
)

// blockSize is the size of one write in bytes.
const blockSize = 4096

// version is the content of a block at some time: the number of the write, and its batch of
// writes. A batch is synced before the next one begins, by the writer or by the process that
// copies.
type version struct {
	number, batch uint64
	zero          bool
}

// moment is the progress of a writer: the batches whose writes have all returned, and the
// writes that have begun.
type moment struct{ written, begun uint64 }

// writer writes numbered blocks at random places of a file or device, and records their order.
type writer struct {
	seed   uint64
	blocks int
	rand   *rand.Rand

	mu       sync.Mutex
	now      moment
	versions map[int][]version
}

func newWriter(seed uint64, blocks int) *writer {
	return &writer{seed: seed, blocks: blocks, rand: rand.New(rand.NewPCG(seed, 1)), versions: map[int][]version{}}
}

func (w *writer) moment() moment {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

// unsynced writes a batch without a sync.
func (w *writer) unsynced(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(w.batch(f), f.Close())
}

// some writes n batches.
func (w *writer) some(path string, n int) error {
	return w.while(path, func() bool { n--; return n >= 0 })
}

// until writes batches until stop is closed.
func (w *writer) until(path string, stop <-chan struct{}) error {
	return w.while(path, func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	})
}

func (w *writer) while(path string, more func() bool) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for more() {
		if err := errors.Join(w.batch(f), f.Sync()); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) batch(f *os.File) error {
	for range 1 + w.rand.IntN(8) {
		at := w.rand.IntN(w.blocks)
		v := w.begin(at, w.rand.IntN(8) == 0)
		if _, err := f.WriteAt(w.content(at, v), int64(at)*blockSize); err != nil {
			return err
		}
	}
	w.mu.Lock()
	w.now.written++
	w.mu.Unlock()
	return nil
}

// begin records a write before it is made.
func (w *writer) begin(at int, zero bool) version {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now.begun++
	v := version{number: w.now.begun, batch: w.now.written + 1, zero: zero}
	w.versions[at] = append(w.versions[at], v)
	return v
}

// content is the content of a block. Half of it is compressible.
func (w *writer) content(at int, v version) []byte {
	b := make([]byte, blockSize)
	if v.zero {
		return b
	}
	var key [32]byte
	for i, n := range []uint64{w.seed, uint64(at), v.number} {
		binary.LittleEndian.PutUint64(key[8*i:], n)
	}
	_, _ = rand.NewChaCha8(key).Read(b[:blockSize/2]) // never fails
	binary.LittleEndian.PutUint64(b, v.number)
	return b
}

// check compares a copy with the written content. The copy was made between two moments and
// shows one moment between them: all that was written at the first, and all batches that were
// synced before any write that it shows.
func (w *writer) check(path string, after, before moment) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && after.written == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	found := map[int]int{}
	whole := after.written
	for at := range w.blocks {
		have := b[min(at*blockSize, len(b)):min((at+1)*blockSize, len(b))]
		i, err := w.find(at, have, before)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if found[at] = i; i >= 0 && !w.versions[at][i].zero {
			whole = max(whole, w.versions[at][i].batch-1)
		}
	}
	for at, i := range found {
		if err := w.recent(at, i, whole); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// find is the last version that a block can have; -1 is its content before the first write.
func (w *writer) find(at int, have []byte, before moment) (int, error) {
	versions := w.versions[at]
	for i := len(versions) - 1; i >= 0; i-- {
		if versions[i].number <= before.begun && same(have, w.content(at, versions[i])) {
			return i, nil
		}
	}
	if same(have, make([]byte, blockSize)) {
		return -1, nil
	}
	return 0, fmt.Errorf("block %d is none of the %d that were written there: it begins with %x", at, len(versions), have[:min(16, len(have))])
}

// same compares, with zeros after the end of the file.
func same(have, want []byte) bool {
	return bytes.Equal(have, want[:len(have)]) && len(bytes.Trim(want[len(have):], "\x00")) == 0
}

// recent refuses a version that is older than one of a batch that the copy shows completely.
func (w *writer) recent(at, i int, whole uint64) error {
	for _, v := range w.versions[at][i+1:] {
		if v.batch <= whole {
			return fmt.Errorf("block %d has not what write %d of batch %d made of it: batches to %d are there", at, v.number, v.batch, whole)
		}
	}
	return nil
}
