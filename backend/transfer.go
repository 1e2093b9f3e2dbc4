package backend

import (
	"context"
	"io"
	"iter"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// Transferrer is implemented by backends whose volumes can be created from a snapshot or a volume on another node.
type Transferrer interface {
	// Send opens a snapshot or a volume of this node, to send its content to another node. ErrPrecondition if the
	// volume is in use and cannot be copied consistently.
	Send(ctx context.Context, source volume.Source) (Outgoing, error)
	// Receive does what Create does, for a source on another node. The content that was received before an
	// interruption is kept for the next call. ErrPending while the transfer continues: a retry joins it.
	Receive(ctx context.Context, spec volume.Spec, from Incoming) (volume.Volume, error)
}

// Outgoing is the content of an open snapshot or volume. It does not change until it is closed.
type Outgoing interface {
	Manifest() volume.Manifest
	io.ReaderAt
	// Budget limits the reads of the content; nil if they are not limited. Ranges accounts for its own.
	Budget() *background.Budget
	// Since makes Ranges yield the differences from the content with an identity. It reports false, and changes
	// nothing, if this node does not have that content.
	Since(identity string) bool
	// Ranges yields, in order, the ranges with data between an offset and Manifest().StorageSize(). All other
	// bytes are zeros. After Since they are the ranges that may differ from the other content, and behind its end
	// those with data.
	Ranges(ctx context.Context, from int64) iter.Seq2[clone.Range, error]
	io.Closer
}

// Incoming is the permission to read a source on another node.
type Incoming interface {
	// Connect requests the content. It can be called once.
	Connect(ctx context.Context) (Stream, error)
}

// Stream is the content of a source on another node.
type Stream interface {
	// Manifest is as the other node sent it. The caller checks it.
	Manifest() volume.Manifest
	// Copy writes the ranges with data between an offset and Manifest().StorageSize() to a target, in order.
	// It writes nothing outside of them. If the other node has one of the bases, which are identities of contents,
	// it sends only the differences from the first of these. It returns nil if the target has received all of the
	// content.
	Copy(ctx context.Context, from int64, bases []string, to Target) error
	// Alive tells the other node, at most every few seconds, that this node is at work. A method of a target that takes minutes
	// calls it often.
	Alive()
	io.Closer
}

// Target receives the content of a Stream.
type Target interface {
	// Begin is called before all other methods. All bytes that are not written are then those of base, which is one
	// of the bases or empty. Without a base they are zeros.
	Begin(ctx context.Context, base string) error
	io.WriterAt
	// WriteZeros writes zeros to a range.
	WriteZeros(r clone.Range) error
	// Verified is called repeatedly: the content up to an offset is complete, and its checksum is that of the source.
	Verified(upTo int64) error
}
