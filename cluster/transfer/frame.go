package transfer

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/trivet-csi/trivet/volume"
)

// Protocol is the name of the protocol in the TLS handshake (ALPN).
const Protocol = "trivet-transfer/1"

// A frame is a header, which names its kind and the length of its payload, and the payload.
type kind byte

const (
	kindTicket   kind = iota + 1 // from the client: a signed ticket
	kindManifest                 // a volume.Manifest
	kindStart                    // from the client: send the content from offset on; payload is the list of bases (JSON)
	kindData                     // the content from offset on; size bytes, of which flagCompressed says the form
	kindChecked                  // all up to offset was sent; payload is the checksum of all data frames since the start
	kindEnd                      // as kindChecked; there is no more data
	kindFailure                  // the transfer has failed
	kindWait                     // nothing can be sent or received now, and the connection is alive
	kindBase                     // payload is the base of the content that follows; empty for none
)

const (
	headerSize = 24
	// chunkSize is the largest size of the content in one frame, in bytes.
	chunkSize = 1 << 20
	// maxText bounds the size of a manifest or of an error in bytes.
	maxText = 64 << 10
)

// frame is one message.
type frame struct {
	kind    kind
	flags   byte
	offset  int64
	size    int64 // of the content in a data frame, in bytes
	payload []byte
}

// maxPayload is the largest payload of a frame of the kind; -1 if there is no such kind.
func (k kind) maxPayload() int64 {
	switch k {
	case kindTicket:
		return maxTicket
	case kindManifest, kindFailure, kindStart, kindBase:
		return maxText
	case kindData:
		return chunkSize
	case kindChecked, kindEnd:
		return checksumSize
	case kindWait:
		return 0
	}
	return -1
}

// hasOffset reports whether frames of the kind have an offset.
func (k kind) hasOffset() bool {
	return k == kindStart || k == kindData || k == kindChecked || k == kindEnd
}

// appendHeader appends the header of a frame with a payload of some length.
func (f frame) appendHeader(b []byte, length int) []byte {
	b = append(b, byte(f.kind), f.flags, 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	b = binary.BigEndian.AppendUint64(b, uint64(f.offset))
	return binary.BigEndian.AppendUint64(b, uint64(f.size))
}

// writeFrame writes a frame by one write.
func writeFrame(w io.Writer, f frame) error {
	b := make([]byte, 0, headerSize+len(f.payload))
	_, err := w.Write(append(f.appendHeader(b, len(f.payload)), f.payload...))
	return err
}

// readFrame reads a frame. The payload is in buf until the next call. The other side is not trusted: a payload that is larger
// than its kind allows, or than buf, is an error, and the caller checks offset and size.
func readFrame(r io.Reader, buf []byte) (f frame, err error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return f, err
	}
	f.kind, f.flags = kind(h[0]), h[1]
	length, offset, size := int64(binary.BigEndian.Uint32(h[4:])), binary.BigEndian.Uint64(h[8:]), binary.BigEndian.Uint64(h[16:])
	if length > f.kind.maxPayload() || length > int64(len(buf)) || offset > 1<<62 || size > chunkSize || h[2] != 0 || h[3] != 0 ||
		f.kind != kindData && (f.flags != 0 || size != 0) || !f.kind.hasOffset() && offset != 0 {
		return f, fmt.Errorf("invalid frame of kind %d: length %d, offset %d, size %d", f.kind, length, offset, size)
	}
	f.offset, f.size, f.payload = int64(offset), int64(size), buf[:length]
	if _, err := io.ReadFull(r, f.payload); err != nil {
		return f, errors.Join(err, io.ErrUnexpectedEOF)
	}
	return f, nil
}

// failure is the payload of kindFailure.
type failure struct {
	// Kind is the index of the error in failureKinds, or -1.
	Kind int    `json:"kind"`
	Text string `json:"text"`
}

// failureKinds are the errors that keep their kind on the way to the other node. The order is part of the protocol.
var failureKinds = []error{
	volume.ErrInvalid, volume.ErrNotFound, volume.ErrPrecondition, volume.ErrPending, volume.ErrUnavailable, volume.ErrDamaged,
}

// failureFrame is the frame of an error.
func failureFrame(err error) frame {
	f := failure{Kind: -1, Text: err.Error()}
	for i, kind := range failureKinds {
		if errors.Is(err, kind) {
			f.Kind = i
			break
		}
	}
	f.Text = f.Text[:min(len(f.Text), maxText/8)] // JSON needs up to six bytes for one
	payload, _ := json.Marshal(f)                 // a struct of a number and a text
	return frame{kind: kindFailure, payload: payload}
}

// failureIn is the error in a frame of kindFailure from a node.
func failureIn(payload []byte, node string) error {
	var f failure
	if err := json.Unmarshal(payload, &f); err != nil {
		return volume.Errorf(volume.ErrUnavailable, "node %q has ended the transfer, and sent an invalid reason: %w", node, err)
	}
	kind := volume.ErrUnavailable
	if f.Kind >= 0 && f.Kind < len(failureKinds) {
		kind = failureKinds[f.Kind]
	}
	return volume.Errorf(kind, "node %q: %s", node, f.Text)
}
