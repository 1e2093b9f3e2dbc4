package transfer

import (
	"bytes"
	"crypto/rand"
	"io"
	"testing"
	"time"
)

// countingWriter counts bytes, and delays each write by a time per byte, as a slow network does.
type countingWriter struct {
	n       int64
	perByte time.Duration
}

func (w *countingWriter) Write(b []byte) (int, error) {
	w.n += int64(len(b))
	if w.perByte > 0 {
		<-time.After(time.Duration(len(b)) * w.perByte)
	}
	return len(b), nil
}

// TestCompressor: the form that was faster in the trial of both is used, and both are tried again later.
func TestCompressor(t *testing.T) {
	for name, tc := range map[string]struct {
		compressed, plain time.Duration // for one chunk
		want              bool
	}{
		"slow network": {time.Millisecond, 10 * time.Millisecond, true},
		"fast network": {3 * time.Millisecond, time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := newCompressor()
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			k := chunk{buf: make([]byte, headerSize+4096), size: 4096}
			c.message(k)
			now, counts := c.began, map[bool]int{}
			const rounds = 3
			for range rounds * (2*trialChunks + steadyChunks) {
				counts[c.on]++
				if c.on {
					now = now.Add(tc.compressed)
				} else {
					now = now.Add(tc.plain)
				}
				c.done(k, now)
			}
			if counts[tc.want] < rounds*steadyChunks || counts[!tc.want] < rounds*trialChunks {
				t.Errorf("got %d compressed and %d plain chunks", counts[true], counts[false])
			}
		})
	}
}

// TestCompression: content that can be compressed takes fewer bytes on a slow network, and other content not many more.
func TestCompression(t *testing.T) {
	text := bytes.Repeat([]byte("the same words again and again "), 64<<10)
	random := make([]byte, len(text))
	_, _ = rand.Read(random)
	for name, tc := range map[string]struct {
		content []byte
		most    int
	}{"text": {text, len(text) / 10}, "random": {random, len(random) + 4096}} {
		w := &countingWriter{perByte: 10 * time.Nanosecond}
		o := &outgoing{source: &memory{content: tc.content}, to: w, limit: NewLimit(0, 1)}
		if err := o.send(t.Context(), 0); err != nil || w.n > int64(tc.most) {
			t.Errorf("%s: got %d bytes, %v, want at most %d", name, w.n, err, tc.most)
		}
		m := &memory{content: make([]byte, len(tc.content))}
		i := &incoming{from: bytes.NewReader(sent(t, tc.content, "")), to: m, limit: NewLimit(0, 1), node: "a", end: int64(len(tc.content))}
		if err := i.receive(t.Context(), 0); err != nil || !bytes.Equal(m.content, tc.content) {
			t.Errorf("%s: got %v, want the content that was sent", name, err)
		}
	}
}

// TestDecompressedSize: content that is larger than its header says is refused, without the memory for it.
func TestDecompressedSize(t *testing.T) {
	c, err := newCompressor()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	k := chunk{buf: make([]byte, headerSize+chunkSize), size: chunkSize}
	f, err := readFrame(bytes.NewReader(c.message(k)), make([]byte, chunkSize))
	if err != nil || f.flags != flagCompressed {
		t.Fatalf("got %+v, %v, want a compressed frame", f, err)
	}
	d, err := newDecompressor()
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if b, err := d.content(f); err != nil || len(b) != chunkSize {
		t.Errorf("got %d bytes, %v, want %d", len(b), err, chunkSize)
	}
	for _, size := range []int64{4096, chunkSize - 1} {
		f.size = size
		if b, err := d.content(f); err == nil {
			t.Errorf("got %d bytes for a frame of %d bytes of content, want an error", len(b), size)
		}
	}
	f.flags = 4
	if _, err := d.content(f); err == nil {
		t.Error("unknown flags were accepted")
	}
}

// BenchmarkSend sends content that cannot be compressed to nowhere.
func BenchmarkSend(b *testing.B) {
	content := make([]byte, 64<<20)
	_, _ = rand.Read(content)
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		o := &outgoing{source: &memory{content: content}, to: io.Discard, limit: NewLimit(0, 1)}
		if err := o.send(b.Context(), 0); err != nil {
			b.Fatal(err)
		}
	}
}
