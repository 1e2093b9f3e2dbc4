package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// checkedSize is how much content is read between two checksums, in bytes, also if it is zeros that are not sent: a receiver
	// may have to write them. An interrupted transfer continues from one.
	checkedSize = 64 << 20
	// waitInterval is the time after which a sender that has nothing to send shows that it is alive.
	waitInterval = 10 * time.Second
	// buffers is the number of chunks that are read ahead.
	buffers = 4
)

// checksum is the checksum of the data frames of a transfer: of their offsets, sizes and content. It detects errors of the
// software and the memory of both nodes. It need not detect intended changes, which TLS prevents.
type checksum struct{ hash.Hash }

func newChecksum() checksum { return checksum{xxhash.New()} }

// checksumSize is the size of a checksum in bytes.
const checksumSize = 8

func (c checksum) add(offset int64, content []byte) {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], uint64(offset))
	binary.BigEndian.PutUint64(b[8:], uint64(len(content)))
	c.Write(b[:])
	c.Write(content)
}

// chunk is a part of the content, or an error of reading it. buf has room for a header before the content.
type chunk struct {
	buf    []byte
	offset int64
	size   int
	zeros  bool
	// skipped means that the chunk is zeros that are not sent.
	skipped bool
	err     error
}

func (c chunk) content() []byte { return c.buf[headerSize:][:c.size] }

// outgoing sends the content of a source.
type outgoing struct {
	source backend.Outgoing
	to     io.Writer
	limit  *Limit
	chunks chan chunk
	free   chan []byte
	form   *compressor
	// differences means that zeros are sent, too.
	differences bool
}

// send sends the content from an offset on.
func (o *outgoing) send(ctx context.Context, from int64) error {
	var err error
	if o.form, err = newCompressor(); err != nil {
		return err
	}
	defer o.form.close()
	ctx, cancel := context.WithCancel(ctx)
	o.chunks, o.free = make(chan chunk, buffers), make(chan []byte, buffers)
	for range buffers {
		o.free <- make([]byte, headerSize+chunkSize)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(o.chunks)
		o.read(ctx, from)
	}()
	defer func() { cancel(); <-ended }()
	sum, unchecked, checked, index := newChecksum(), int64(0), from, o.indexSize()
	sent := time.Now()
	for {
		c, more, err := o.next(ctx)
		switch {
		case err != nil:
			return err
		case !more && ctx.Err() != nil: // read has ended early
			return ctx.Err()
		case !more:
			return writeFrame(o.to, frame{kind: kindEnd, offset: o.source.Manifest().StorageSize(), payload: sum.Sum(nil)})
		}
		if unchecked += int64(c.size); unchecked > checkedSize || checked < index && c.offset >= index {
			unchecked, checked = int64(c.size), c.offset
			if err := writeFrame(o.to, frame{kind: kindChecked, offset: c.offset, payload: sum.Sum(nil)}); err != nil {
				return err
			}
		}
		switch {
		case !c.skipped:
			sum.add(c.offset, c.content())
			if err := o.write(ctx, c); err != nil {
				return err
			}
			sent = time.Now()
		case time.Since(sent) > waitInterval: // zeros are read slowly
			if err := writeFrame(o.to, frame{kind: kindWait}); err != nil {
				return err
			}
			sent = time.Now()
		}
		o.free <- c.buf
	}
}

// indexSize is the size of the index of a directory, behind which there is a checksum; 0 for other content.
func (o *outgoing) indexSize() int64 {
	if t := o.source.Manifest().Tree; t != nil {
		return t.IndexSize
	}
	return 0
}

// next returns the next chunk, and keeps the connection alive until there is one.
func (o *outgoing) next(ctx context.Context) (c chunk, more bool, err error) {
	tick := time.NewTicker(waitInterval)
	defer tick.Stop()
	for {
		select {
		case c, more = <-o.chunks:
			return c, more, c.err
		case <-tick.C:
			if err := writeFrame(o.to, frame{kind: kindWait}); err != nil {
				return c, false, err
			}
		case <-ctx.Done():
			return c, false, ctx.Err()
		}
	}
}

// write sends a chunk.
func (o *outgoing) write(ctx context.Context, c chunk) error {
	message := o.form.message(c)
	if err := o.limit.wait(ctx, len(message)); err != nil {
		return err
	}
	_, err := o.to.Write(message)
	o.form.done(c, time.Now())
	return err
}

// read reads the ranges, with the idle I/O priority. It skips chunks of zeros, except of differences.
func (o *outgoing) read(ctx context.Context, from int64) {
	sys.IdleIO()
	end := o.source.Manifest().StorageSize()
	for r, err := range o.source.Ranges(ctx, from) {
		if err == nil && r.Offset+r.Length > end {
			r.Length = end - r.Offset
		}
		for at := r.Offset; err == nil && at < r.Offset+r.Length; {
			var buf []byte
			select {
			case buf = <-o.free:
			case <-ctx.Done():
				return
			}
			c := chunk{buf: buf, offset: at, size: int(min(chunkSize, r.Offset+r.Length-at))}
			if _, err = o.source.Budget().ReadAt(ctx, o.source, c.content(), at); err != nil {
				break
			}
			at += int64(c.size)
			c.zeros = zero(c.content())
			c.skipped = c.zeros && !o.differences
			if !o.pass(ctx, c) {
				return
			}
		}
		if err != nil {
			o.pass(ctx, chunk{err: err})
			return
		}
	}
}

// pass passes a chunk to send; it returns false if ctx has ended.
func (o *outgoing) pass(ctx context.Context, c chunk) bool {
	select {
	case o.chunks <- c:
		return true
	case <-ctx.Done():
		return false
	}
}

// zero reports whether all bytes are 0: the first is 0, and each equals the one before it.
func zero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1]) }

// incoming receives the content of a source, which is not trusted.
type incoming struct {
	from  io.Reader
	to    backend.Target
	limit *Limit
	// node is the node that sends, for errors.
	node string
	// end is the size of the content in bytes.
	end int64
	// at is the offset up to which all content was received.
	at int64
	// bases are the contents of which the sender may use one, and begun is true after it has said which.
	bases []string
	begun bool
	form  *decompressor
}

// receive writes the content from an offset on to the target. It returns nil only if all of the content was received, and
// all checksums are right.
func (i *incoming) receive(ctx context.Context, from int64) error {
	var err error
	if i.form, err = newDecompressor(); err != nil {
		return err
	}
	defer i.form.close()
	i.at = from
	ended := make(chan struct{})
	defer close(ended)
	frames := i.readAhead(ended)
	for sum := newChecksum(); ; {
		f := <-frames
		if f.err != nil {
			return i.interrupted(f.err)
		}
		switch {
		case f.kind == kindWait:
		case f.kind == kindFailure:
			err = failureIn(f.payload, i.node)
		case f.kind == kindBase && !i.begun:
			err = i.begin(ctx, string(f.payload))
		case f.kind == kindData && i.begun:
			err = i.data(ctx, f.frame, sum)
		case (f.kind == kindChecked || f.kind == kindEnd) && i.begun:
			err = i.checked(f.frame, sum)
		default:
			err = i.interrupted(fmt.Errorf("unexpected frame of kind %d", f.kind))
		}
		if err != nil || f.kind == kindEnd {
			return err
		}
		f.free()
	}
}

// received is a frame, or the error of reading it.
type received struct {
	frame
	err error
	// free allows the next frame to use the memory of the payload.
	free func()
}

// readAhead reads frames while the frames before them are written. It ends after an error, and when ended is closed and the
// connection is closed.
func (i *incoming) readAhead(ended <-chan struct{}) <-chan received {
	free, frames := make(chan []byte, buffers), make(chan received)
	for range buffers {
		free <- make([]byte, chunkSize)
	}
	go func() {
		for {
			var buf []byte
			select {
			case buf = <-free:
			case <-ended:
				return
			}
			f, err := readFrame(i.from, buf)
			select {
			case frames <- received{f, err, func() { free <- buf }}:
			case <-ended:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return frames
}

// begin begins the target with the base that the sender has selected.
func (i *incoming) begin(ctx context.Context, base string) error {
	if base != "" && !slices.Contains(i.bases, base) {
		return i.interrupted(fmt.Errorf("the base %q is none of those that were offered", base))
	}
	i.begun = true
	return i.to.Begin(ctx, base)
}

// data writes the content of a data frame. The frames are in order, and within the size of the content.
func (i *incoming) data(ctx context.Context, f frame, sum checksum) error {
	if f.offset < i.at || f.size == 0 || f.offset+f.size > i.end {
		return i.interrupted(fmt.Errorf("invalid data frame: offset %d, size %d; expected an offset from %d to %d", f.offset, f.size, i.at, i.end))
	}
	if err := i.limit.wait(ctx, headerSize+len(f.payload)); err != nil {
		return err
	}
	content, err := i.form.content(f)
	if err != nil {
		return i.interrupted(fmt.Errorf("invalid data frame: %w", err))
	}
	sum.add(f.offset, content)
	i.at = f.offset + f.size
	if f.flags == flagZeros {
		return i.to.WriteZeros(clone.Range{Offset: f.offset, Length: f.size})
	}
	_, err = i.to.WriteAt(content, f.offset)
	return err
}

// checked compares the checksums.
func (i *incoming) checked(f frame, sum checksum) error {
	switch {
	case f.offset < i.at || f.offset > i.end || f.kind == kindEnd && f.offset != i.end:
		return i.interrupted(fmt.Errorf("invalid offset %d of a checksum, expected %d to %d", f.offset, i.at, i.end))
	case !bytes.Equal(f.payload, sum.Sum(nil)):
		return volume.Errorf(volume.ErrUnavailable, "the checksum of the content up to offset %d from node %q is wrong: retry; the part before that is kept", f.offset, i.node)
	}
	i.at = f.offset
	return i.to.Verified(f.offset)
}

func (i *incoming) interrupted(err error) error {
	return volume.Errorf(volume.ErrUnavailable, "the transfer from node %q was interrupted at offset %d of %d: %w: retry; the transfer continues with the part that was not verified", i.node, i.at, i.end, err)
}
