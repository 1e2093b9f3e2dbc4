package verify

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
)

// blockSize is the size of one write in bytes.
const blockSize = 4096

// version is one write to a block. number counts all writes of the writer, and batch is the number of
// the write's batch. A batch is synced before the next one begins, by the writer or by the driver,
// which syncs before it copies.
type version struct {
	number, batch uint64
	zero          bool // the block was overwritten with zeros
}

// moment is the progress of a writer: the number of batches whose writes have all returned, and the
// number of writes that have begun.
type moment struct{ written, begun uint64 }

// writer writes to random blocks of a file or device, and records the versions of each block.
type writer struct {
	seed   uint64
	blocks int
	rand   *rand.Rand
	// unzeroed is true if blocks that were never written may have any content.
	unzeroed bool

	mu       sync.Mutex
	now      moment
	versions map[int][]version
}

// newWriter returns a writer for a number of blocks.
func newWriter(seed uint64, blocks int) *writer {
	return &writer{seed: seed, blocks: blocks, rand: rand.New(rand.NewPCG(seed, 1)), versions: map[int][]version{}}
}

// moment returns the current progress of the writer.
func (w *writer) moment() moment {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

// writeUnsynced writes one batch without a sync.
func (w *writer) writeUnsynced(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(w.batch(f), f.Close())
}

// write writes n batches.
func (w *writer) write(path string, n int) error {
	return w.writeWhile(path, func() bool { n--; return n >= 0 })
}

// writeUntil writes batches until stop is closed.
func (w *writer) writeUntil(path string, stop <-chan struct{}) error {
	return w.writeWhile(path, func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	})
}

// writeWhile writes batches as long as more returns true, and syncs each batch.
func (w *writer) writeWhile(path string, more func() bool) (err error) {
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

// batch writes to up to eight random blocks.
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

// begin records a write to a block before the block is written.
func (w *writer) begin(at int, zero bool) version {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now.begun++
	v := version{number: w.now.begun, batch: w.now.written + 1, zero: zero}
	w.versions[at] = append(w.versions[at], v)
	return v
}

// content returns the content of a version of a block. Its second half is zeros, which filesystems
// can compress.
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

// check compares a copy with the written content. The copy was made after one moment and before
// another. It must contain all batches that were written at the first moment. If it contains a write,
// it must also contain all earlier batches, because they were synced before that write began.
func (w *writer) check(path string, after, before moment) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) && after.written == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, int64(w.blocks)*blockSize)) // a disk may be larger
	if err != nil {
		return err
	}
	found := map[int]int{}
	complete := after.written
	for at := range w.blocks {
		have := b[min(at*blockSize, len(b)):min((at+1)*blockSize, len(b))]
		i, err := w.find(at, have, before)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if found[at] = i; i >= 0 && !w.versions[at][i].zero {
			complete = max(complete, w.versions[at][i].batch-1)
		}
	}
	for at, i := range found {
		if err := w.recent(at, i, complete); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// find returns the index of the newest version, begun before the copy was complete, that has the
// content of a block. It returns -1 for the content before the first write.
func (w *writer) find(at int, have []byte, before moment) (int, error) {
	versions := w.versions[at]
	for i := len(versions) - 1; i >= 0; i-- {
		if versions[i].number <= before.begun && same(have, w.content(at, versions[i])) {
			return i, nil
		}
	}
	if w.unzeroed || same(have, make([]byte, blockSize)) {
		return -1, nil
	}
	return 0, fmt.Errorf("block %d has none of its %d versions: got a block that begins with %x", at, len(versions), have[:min(16, len(have))])
}

// same reports whether a block has the wanted content. A block that is shorter, because the file
// ends in it, is followed by zeros.
func same(have, want []byte) bool {
	return bytes.Equal(have, want[:len(have)]) && len(bytes.Trim(want[len(have):], "\x00")) == 0
}

// recent fails if a version of a block is too old: one of the batches up to complete, which the copy
// must contain, has a newer version.
func (w *writer) recent(at, i int, complete uint64) error {
	for _, v := range w.versions[at][i+1:] {
		if v.batch <= complete {
			return fmt.Errorf("block %d does not contain write %d of batch %d, although the copy must contain all batches up to %d", at, v.number, v.batch, complete)
		}
	}
	return nil
}
