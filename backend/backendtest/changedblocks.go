package backendtest

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// testChangedBlocks: the changes between two snapshots of a raw volume turn the older snapshot into the newer
// one. All bytes outside the allocated ranges are zero.
func testChangedBlocks(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	l := newVolumeOfSize(t, d, kind, size)
	l.stageAndPublish(t)
	rng := rand.NewChaCha8([32]byte{})
	var snapshots []*csi.Snapshot
	for range 4 {
		scribble(t, rng, l, size)
		if kind.Has(RestCopies) {
			l.unpublishAndUnstage(t)
		}
		snapshots = append(snapshots, l.snapshot(t))
		if kind.Has(RestCopies) {
			l.stageAndPublish(t)
		}
	}
	for i, newer := range snapshots {
		content := d.snapshotContent(t, newer, kind)
		wantZerosOutside(t, content, d.allocated(t, newer, 0, 0))
		for _, older := range snapshots[:i+1] {
			wantDelta(t, d, kind, older, newer)
		}
	}
	wantPaged(t, d, snapshots[0], snapshots[3])
	testChangedBlocksRequests(t, d, kind, snapshots[0], snapshots[1], size)
}

// scribble writes, zeroes and deallocates random blocks of a raw volume. An encrypted volume refuses discards.
func scribble(t *testing.T, source *rand.ChaCha8, l *testVolume, size int64) {
	t.Helper()
	rng := rand.New(source)
	f, err := os.OpenFile(l.target, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	for range 30 {
		at, n := rng.Int64N(size/4096-16)*4096, (1+rng.Int64N(16))*4096
		switch action := rng.IntN(6); {
		case action == 0 && !l.kind.Has(Encrypted):
			err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n)
		case action == 1:
			err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, at, n)
		default:
			b := make([]byte, n)
			_, _ = source.Read(b)
			_, err = f.WriteAt(b, at)
		}
		if errors.Is(err, unix.EOPNOTSUPP) { // newer kernels refuse it after a zeroing that the filesystem of the image does not support
			_, err = f.WriteAt(make([]byte, n), at)
		}
		must(t, err)
	}
	must(t, f.Sync())
}

// snapshotContent returns the content of the image of a snapshot, without a header.
func (d *Driver) snapshotContent(t *testing.T, s *csi.Snapshot, kind Kind) []byte {
	t.Helper()
	l := testVolume{id: s.GetSnapshotId()}
	b, err := os.ReadFile(filepath.Join(d.Pool(), "snapshots", l.name(), "0/image"))
	must(t, err)
	if int64(len(b)) != s.GetSizeBytes()+kind.Overhead() {
		t.Fatalf("the image of snapshot %v has %d bytes, want its size, and that of the header", s, len(b))
	}
	return b[kind.Overhead():]
}

// stream reads the messages of a call for a volume of size bytes, and returns their blocks. The blocks must
// be in order and not overlap. A message must have at most limit blocks; 0 allows any number.
func stream(t *testing.T, limit int32, size int64, receive func() (size int64, metadataType csi.BlockMetadataType, blocks []*csi.BlockMetadata, err error)) (all []*csi.BlockMetadata) {
	t.Helper()
	end := int64(0)
	for {
		capacity, metadataType, blocks, err := receive()
		if errors.Is(err, io.EOF) {
			return all
		}
		must(t, err)
		if capacity != size || metadataType != csi.BlockMetadataType_VARIABLE_LENGTH || len(blocks) == 0 || limit > 0 && len(blocks) > int(limit) {
			t.Fatalf("got a message of %d blocks, type %v, capacity %d; want 1 to %d blocks (0 allows any number), VARIABLE_LENGTH, capacity %d", len(blocks), metadataType, capacity, limit, size)
		}
		for _, b := range blocks {
			if b.GetByteOffset() < end || b.GetSizeBytes() <= 0 || b.GetByteOffset()+b.GetSizeBytes() > size {
				t.Errorf("got block %v, want it between bytes %d and %d", b, end, size)
			}
			end = b.GetByteOffset() + b.GetSizeBytes()
		}
		all = append(all, blocks...)
	}
}

// allocated returns the allocated blocks of a snapshot from an offset on, from messages of at most limit blocks.
func (d *Driver) allocated(t *testing.T, s *csi.Snapshot, from int64, limit int32) []*csi.BlockMetadata {
	t.Helper()
	in, err := d.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: s.GetSnapshotId(), StartingOffset: from, MaxResults: limit})
	must(t, err)
	return stream(t, limit, s.GetSizeBytes(), func() (int64, csi.BlockMetadataType, []*csi.BlockMetadata, error) {
		m, err := in.Recv()
		return m.GetVolumeCapacityBytes(), m.GetBlockMetadataType(), m.GetBlockMetadata(), err
	})
}

// delta returns the changed blocks between two snapshots from an offset on, from messages of at most limit blocks.
func (d *Driver) delta(t *testing.T, older, newer *csi.Snapshot, from int64, limit int32) []*csi.BlockMetadata {
	t.Helper()
	in, err := d.Control.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{
		BaseSnapshotId: older.GetSnapshotId(), TargetSnapshotId: newer.GetSnapshotId(), StartingOffset: from, MaxResults: limit,
	})
	must(t, err)
	return stream(t, limit, newer.GetSizeBytes(), func() (int64, csi.BlockMetadataType, []*csi.BlockMetadata, error) {
		m, err := in.Recv()
		return m.GetVolumeCapacityBytes(), m.GetBlockMetadataType(), m.GetBlockMetadata(), err
	})
}

// wantZerosOutside fails the test unless there are allocated blocks, and all bytes of content outside of them
// are zero.
func wantZerosOutside(t *testing.T, content []byte, blocks []*csi.BlockMetadata) {
	t.Helper()
	if len(blocks) == 0 {
		t.Error("got no allocated blocks of a volume with data")
	}
	rest := bytes.Clone(content)
	for _, b := range blocks {
		clear(rest[b.GetByteOffset():][:b.GetSizeBytes()])
	}
	if !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("a byte outside the allocated ranges is not zero")
	}
}

// wantDelta fails the test unless the delta turns the older snapshot into the newer one.
func wantDelta(t *testing.T, d *Driver, kind Kind, older, newer *csi.Snapshot) {
	t.Helper()
	have, want := d.snapshotContent(t, older, kind), d.snapshotContent(t, newer, kind)
	blocks := d.delta(t, older, newer, 0, 0)
	if older == newer && len(blocks) > 0 {
		t.Errorf("got %d changed blocks between a snapshot and itself, want none", len(blocks))
	}
	for _, b := range blocks {
		copy(have[b.GetByteOffset():][:b.GetSizeBytes()], want[b.GetByteOffset():])
	}
	if !bytes.Equal(have, want) {
		t.Errorf("snapshot %s with the delta applied differs from %s", older.GetSnapshotId(), newer.GetSnapshotId())
	}
}

// wantPaged fails the test unless small messages have the same blocks as large ones, and a call with an offset
// returns the blocks from the offset on.
func wantPaged(t *testing.T, d *Driver, older, newer *csi.Snapshot) {
	t.Helper()
	for name, get := range map[string]func(from int64, limit int32) []*csi.BlockMetadata{
		"allocated": func(from int64, limit int32) []*csi.BlockMetadata { return d.allocated(t, newer, from, limit) },
		"delta":     func(from int64, limit int32) []*csi.BlockMetadata { return d.delta(t, older, newer, from, limit) },
	} {
		all := get(0, 0)
		if n := len(get(0, 2)); n != len(all) || n < 3 {
			t.Errorf("%s: got %d blocks in small messages, %d in large ones; want the same number, at least 3", name, n, len(all))
		}
		middle := all[len(all)/2]
		rest := get(middle.GetByteOffset(), 3)
		if len(rest) != len(all)-len(all)/2 || rest[0].GetByteOffset() != middle.GetByteOffset() {
			t.Errorf("%s: from block %v on: got %d of %d blocks, the first is %v; want the second half", name, middle, len(rest), len(all), rest[0])
		}
		inside := get(middle.GetByteOffset()+1, 1)
		if len(inside) == 0 || inside[0].GetByteOffset() > middle.GetByteOffset()+middle.GetSizeBytes() {
			t.Errorf("%s: from the second byte of block %v on: got %v, want the rest of the block first", name, middle, inside)
		}
		if end := get(newer.GetSizeBytes(), 0); len(end) > 0 {
			t.Errorf("%s: from the end of the volume on: got %v, want no blocks", name, end)
		}
	}
}

// testChangedBlocksRequests: invalid requests are refused, and a blank volume has no allocated blocks. It
// deletes the older snapshot.
func testChangedBlocksRequests(t *testing.T, d *Driver, kind Kind, older, newer *csi.Snapshot, size int64) {
	for _, tc := range []struct {
		name string
		req  *csi.GetMetadataAllocatedRequest
		code codes.Code
	}{
		{"negative offset", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), StartingOffset: -1}, codes.OutOfRange},
		{"offset past the end", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), StartingOffset: size + 1}, codes.OutOfRange},
		{"negative max_results", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), MaxResults: -1}, codes.InvalidArgument},
		{"no snapshot ID", &csi.GetMetadataAllocatedRequest{}, codes.InvalidArgument},
		{"snapshot does not exist", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId() + "-none"}, codes.NotFound},
		{"foreign snapshot ID", &csi.GetMetadataAllocatedRequest{SnapshotId: "snap-1"}, codes.NotFound},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in, err := d.Control.GetMetadataAllocated(t.Context(), tc.req)
			must(t, err)
			_, err = in.Recv()
			wantCode(t, err, tc.code)
		})
	}
	other := newVolumeOfSize(t, d, kind, size)
	blank := other.snapshot(t)
	in, err := d.Control.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: blank.GetSnapshotId(), TargetSnapshotId: newer.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.InvalidArgument, other.id)
	if got := d.allocated(t, blank, 0, 0); len(got) > 0 {
		t.Errorf("got blocks %v of a blank volume, want none", got)
	}
	d.deleteSnapshot(t, older)
	in, err = d.Control.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: older.GetSnapshotId(), TargetSnapshotId: newer.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.NotFound, "base_snapshot_id", "make a full backup, and keep its snapshot")
}
