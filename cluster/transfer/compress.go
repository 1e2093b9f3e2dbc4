package transfer

import (
	"fmt"
	"time"

	"github.com/klauspost/compress/zstd"
)

// The forms of a data frame.
const (
	flagCompressed = 1 // the payload is compressed (zstd)
	flagZeros      = 2 // the content is zeros; there is no payload
)

// zeros is the content of frames with flagZeros.
var zeros [chunkSize]byte

const (
	// A sender tries both forms for trialChunks each, and then uses the faster one for steadyChunks. A trial is larger than
	// the buffers of the connection.
	trialChunks  = 16
	steadyChunks = 512
)

// compressor compresses chunks as long as that makes the transfer faster.
type compressor struct {
	zstd *zstd.Encoder
	buf  []byte
	// on is the form that is used for the next left chunks. tried counts the forms that were tried in the current trial.
	on    bool
	left  int
	tried int
	// rate is the rate of both forms in the last trial, in bytes of content per second.
	rate  map[bool]float64
	began time.Time
	sent  int64
}

func newCompressor() (*compressor, error) {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(chunkSize))
	if err != nil {
		return nil, err
	}
	return &compressor{zstd: encoder, buf: make([]byte, headerSize+encoder.MaxEncodedSize(chunkSize)), on: true, left: trialChunks, rate: map[bool]float64{}}, nil
}

// message returns the data frame of a chunk, in the form that is used now. It is valid until the next call.
func (c *compressor) message(k chunk) []byte {
	if c.began.IsZero() {
		c.began = time.Now()
	}
	f := frame{kind: kindData, offset: k.offset, size: int64(k.size)}
	if k.zeros {
		f.flags = flagZeros
		return f.appendHeader(k.buf[:0], 0)
	}
	if c.on {
		f.flags = flagCompressed
		message := c.zstd.EncodeAll(k.content(), c.buf[:headerSize])
		if length := len(message) - headerSize; length < k.size {
			f.appendHeader(message[:0], length)
			return message
		}
	}
	f.flags = 0
	f.appendHeader(k.buf[:0], k.size)
	return k.buf[:headerSize+k.size]
}

// done is called when a chunk was sent. It decides which form the next one has.
func (c *compressor) done(k chunk, now time.Time) {
	if k.zeros {
		return
	}
	c.sent += int64(k.size)
	if c.left--; c.left > 0 {
		return
	}
	if c.tried < 2 { // the end of a trial of one form
		c.rate[c.on] = float64(c.sent) / max(now.Sub(c.began).Seconds(), 1e-9)
		c.tried++
		c.on, c.left = !c.on, trialChunks
		if c.tried == 2 {
			c.on, c.left = c.rate[true] > c.rate[false], steadyChunks
		}
	} else {
		c.tried, c.left = 0, trialChunks
	}
	c.began, c.sent = now, 0
}

// close frees the memory of the encoder.
func (c *compressor) close() { _ = c.zstd.Close() }

// decompressor returns the content of data frames.
type decompressor struct {
	zstd *zstd.Decoder
	buf  []byte
}

func newDecompressor() (*decompressor, error) {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(chunkSize), zstd.WithDecoderMaxWindow(chunkSize), zstd.WithDecodeAllCapLimit(true))
	return &decompressor{zstd: decoder, buf: make([]byte, 0, chunkSize)}, err
}

// content returns the content of a data frame, which is valid until the next call. It never has more than f.size bytes.
func (d *decompressor) content(f frame) (b []byte, err error) {
	switch f.flags {
	case 0:
		b = f.payload
	case flagZeros:
		if len(f.payload) > 0 {
			return nil, fmt.Errorf("a frame of zeros has a payload of %d bytes", len(f.payload))
		}
		b = zeros[:f.size]
	case flagCompressed:
		b, err = d.zstd.DecodeAll(f.payload, d.buf[:0:f.size])
	default:
		err = fmt.Errorf("unknown flags %d", f.flags)
	}
	if err == nil && int64(len(b)) != f.size {
		err = fmt.Errorf("it has %d bytes of content, its header says %d", len(b), f.size)
	}
	return b, err
}

func (d *decompressor) close() { d.zstd.Close() }
