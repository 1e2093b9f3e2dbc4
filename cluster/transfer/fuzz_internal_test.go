package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"testing"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// memory is a source of some content, and a target that remembers what was written.
type memory struct {
	content []byte
	base    string // the base with which the target began
	low     int64  // no write may be below
	wrong   bool
	upTo    int64
}

func (m *memory) Manifest() volume.Manifest { return volume.Manifest{Size: int64(len(m.content))} }

func (m *memory) ReadAt(b []byte, at int64) (int, error) { return copy(b, m.content[at:]), nil }

func (m *memory) Budget() *background.Budget { return nil }

func (m *memory) Since(identity string) bool { return identity == known }

func (m *memory) Ranges(_ context.Context, from int64) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		yield(clone.Range{Offset: from, Length: int64(len(m.content)) - from}, nil)
	}
}

func (m *memory) Close() error { return nil }

func (m *memory) Begin(_ context.Context, base string) error {
	m.base = base
	return nil
}

func (m *memory) WriteZeros(r clone.Range) error {
	_, err := m.WriteAt(make([]byte, r.Length), r.Offset)
	return err
}

func (m *memory) WriteAt(b []byte, at int64) (int, error) {
	if at < m.low || at+int64(len(b)) > int64(len(m.content)) {
		m.wrong = true
		return 0, io.ErrShortWrite
	}
	m.low = at + int64(len(b))
	return copy(m.content[at:], b), nil
}

func (m *memory) Verified(upTo int64) error {
	m.wrong = m.wrong || upTo < m.low || upTo > int64(len(m.content))
	m.low, m.upTo = upTo, upTo
	return nil
}

// known is the base that every memory has.
const known = "base"

// sent returns what a sender of content sends, as differences from a base unless that is empty.
func sent(t testing.TB, content []byte, base string) []byte {
	t.Helper()
	var b bytes.Buffer
	o := &outgoing{source: &memory{content: content}, to: &b, limit: NewLimit(0, 1), differences: base != ""}
	if err := errors.Join(writeFrame(&b, frame{kind: kindBase, payload: []byte(base)}), o.send(t.Context(), 0)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// FuzzReceive: whatever a sender sends, the receiver writes only in order and within the size, and ends without an error only
// after a right checksum of all content.
func FuzzReceive(f *testing.F) {
	const size = 3 << 10
	content := bytes.Repeat([]byte("content "), size/8)
	f.Add(sent(f, content, ""), int64(0))
	f.Add(sent(f, make([]byte, size), ""), int64(1024))
	f.Add(sent(f, make([]byte, size), known), int64(0))
	f.Add(sent(f, content, known), int64(0))
	f.Add(append(sent(f, content, "")[:100], failureFrame(volume.ErrNotFound).payload...), int64(0))
	f.Fuzz(func(t *testing.T, stream []byte, from int64) {
		if from < 0 || from > size {
			return
		}
		m := &memory{content: make([]byte, size), low: from}
		i := &incoming{from: bytes.NewReader(stream), to: m, limit: NewLimit(0, 1), node: "a", end: size, bases: []string{known}}
		err := i.receive(t.Context(), from)
		switch {
		case m.base != "" && m.base != known:
			t.Errorf("the receiver began with the base %q, which it does not have", m.base)
		case m.wrong:
			t.Error("the receiver wrote or verified outside of the content")
		case err == nil && m.upTo != size:
			t.Errorf("the transfer has succeeded, but only %d bytes are verified", m.upTo)
		case err != nil && !volume.HasKind(err):
			t.Errorf("error %v has no kind", err)
		}
	})
}

// FuzzFrame: a frame that is read is written with the same bytes, and its payload has at most the size that its kind allows.
func FuzzFrame(f *testing.F) {
	f.Add(sent(f, []byte("content"), known))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := readFrame(bytes.NewReader(b), make([]byte, chunkSize))
		if err != nil {
			return
		}
		if int64(len(got.payload)) > got.kind.maxPayload() || got.offset < 0 || got.size < 0 || got.size > chunkSize {
			t.Errorf("got invalid frame %+v", got)
		}
		var again bytes.Buffer
		if err := writeFrame(&again, got); err != nil || !bytes.HasPrefix(b, again.Bytes()) {
			t.Errorf("the frame was written as %x, want a prefix of %x", again.Bytes(), b)
		}
	})
}

// TestDamagedStream: a wrong bit anywhere in a stream is detected, unless the content is right nevertheless.
func TestDamagedStream(t *testing.T) {
	content := bytes.Repeat([]byte("content "), 16)
	good := sent(t, content, "")
	for at := range good {
		stream := bytes.Clone(good)
		stream[at] ^= 1
		m := &memory{content: make([]byte, len(content))}
		i := &incoming{from: bytes.NewReader(stream), to: m, limit: NewLimit(0, 1), node: "a", end: int64(len(content))}
		err := i.receive(t.Context(), 0)
		if err == nil && bytes.Equal(m.content, content) { // the bit has no meaning, such as an unused one of zstd
			continue
		}
		if !errors.Is(err, volume.ErrUnavailable) || m.upTo == int64(len(content)) {
			t.Errorf("byte %d is wrong: got %v, want ErrUnavailable", at, err)
		}
	}
	for n := range good {
		m := &memory{content: make([]byte, len(content))}
		i := &incoming{from: bytes.NewReader(good[:n]), to: m, limit: NewLimit(0, 1), node: "a", end: int64(len(content))}
		if err := i.receive(t.Context(), 0); !errors.Is(err, volume.ErrUnavailable) {
			t.Errorf("%d bytes: got %v, want ErrUnavailable", n, err)
		}
	}
}
