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

// testChanges: the changes between two snapshots of a raw volume turn the older into the newer
// one. Outside of the allocated ranges there are zeros.
func testChanges(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	l := newSized(t, d, kind, size)
	l.up(t)
	rng := rand.NewChaCha8([32]byte{})
	var snapshots []*csi.Snapshot
	for range 4 {
		scribble(t, rng, l.target, size)
		if kind.Has(RestCopies) {
			l.down(t)
		}
		snapshots = append(snapshots, l.snapshot(t))
		if kind.Has(RestCopies) {
			l.up(t)
		}
	}
	for i, newer := range snapshots {
		content := d.snapshotContent(t, newer)
		wantZerosOutside(t, content, d.allocated(t, newer, 0, 0))
		for _, older := range snapshots[:i+1] {
			wantDelta(t, d, older, newer)
		}
	}
	wantPaged(t, d, snapshots[0], snapshots[3])
	testChangeRequests(t, d, kind, snapshots[0], snapshots[1], size)
}

// scribble writes, clears and punches blocks of a device at random.
func scribble(t *testing.T, source *rand.ChaCha8, device string, size int64) {
	t.Helper()
	rng := rand.New(source)
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	for range 30 {
		at, n := rng.Int64N(size/4096-16)*4096, (1+rng.Int64N(16))*4096
		switch rng.IntN(6) {
		case 0:
			err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n)
		case 1:
			err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, at, n)
		default:
			b := make([]byte, n)
			_, _ = source.Read(b)
			_, err = f.WriteAt(b, at)
		}
		must(t, err)
	}
	must(t, f.Sync())
}

// snapshotContent is the content of the image of a snapshot.
func (d *Driver) snapshotContent(t *testing.T, s *csi.Snapshot) []byte {
	t.Helper()
	l := life{id: s.GetSnapshotId()}
	b, err := os.ReadFile(filepath.Join(d.Pool(), "snapshots", l.name(), "0/image"))
	must(t, err)
	if int64(len(b)) != s.GetSizeBytes() {
		t.Errorf("the image of %v has %d bytes", s, len(b))
	}
	return b
}

// stream reads the blocks that a call returns: in order, without overlap, and at most limit in
// a message.
func stream(t *testing.T, limit int32, size int64, receive func() (size int64, of csi.BlockMetadataType, blocks []*csi.BlockMetadata, err error)) (all []*csi.BlockMetadata) {
	t.Helper()
	end := int64(0)
	for {
		capacity, of, blocks, err := receive()
		if errors.Is(err, io.EOF) {
			return all
		}
		must(t, err)
		if capacity != size || of != csi.BlockMetadataType_VARIABLE_LENGTH || len(blocks) == 0 || limit > 0 && len(blocks) > int(limit) {
			t.Fatalf("a message of %d blocks, of type %v and a volume of %d bytes", len(blocks), of, capacity)
		}
		for _, b := range blocks {
			if b.GetByteOffset() < end || b.GetSizeBytes() <= 0 || b.GetByteOffset()+b.GetSizeBytes() > size {
				t.Errorf("after %d bytes there is the block %v", end, b)
			}
			end = b.GetByteOffset() + b.GetSizeBytes()
		}
		all = append(all, blocks...)
	}
}

func (d *Driver) allocated(t *testing.T, s *csi.Snapshot, from int64, limit int32) []*csi.BlockMetadata {
	t.Helper()
	in, err := d.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: s.GetSnapshotId(), StartingOffset: from, MaxResults: limit})
	must(t, err)
	return stream(t, limit, s.GetSizeBytes(), func() (int64, csi.BlockMetadataType, []*csi.BlockMetadata, error) {
		m, err := in.Recv()
		return m.GetVolumeCapacityBytes(), m.GetBlockMetadataType(), m.GetBlockMetadata(), err
	})
}

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

func wantZerosOutside(t *testing.T, content []byte, blocks []*csi.BlockMetadata) {
	t.Helper()
	if len(blocks) == 0 {
		t.Error("a snapshot that was written to has no blocks")
	}
	rest := bytes.Clone(content)
	for _, b := range blocks {
		clear(rest[b.GetByteOffset():][:b.GetSizeBytes()])
	}
	if !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("a block outside the allocated ranges is not zero")
	}
}

// wantDelta applies a delta to the older of two snapshots.
func wantDelta(t *testing.T, d *Driver, older, newer *csi.Snapshot) {
	t.Helper()
	have, want := d.snapshotContent(t, older), d.snapshotContent(t, newer)
	blocks := d.delta(t, older, newer, 0, 0)
	if older == newer && len(blocks) > 0 && d.sharesBlocks(t) {
		t.Errorf("a snapshot differs from itself in %d blocks", len(blocks))
	}
	for _, b := range blocks {
		copy(have[b.GetByteOffset():][:b.GetSizeBytes()], want[b.GetByteOffset():])
	}
	if !bytes.Equal(have, want) {
		t.Errorf("with the delta %s is not %s", older.GetSnapshotId(), newer.GetSnapshotId())
	}
}

// wantPaged: small messages have the same content, and a call with an offset has the rest.
func wantPaged(t *testing.T, d *Driver, older, newer *csi.Snapshot) {
	t.Helper()
	for name, get := range map[string]func(from int64, limit int32) []*csi.BlockMetadata{
		"allocated": func(from int64, limit int32) []*csi.BlockMetadata { return d.allocated(t, newer, from, limit) },
		"delta":     func(from int64, limit int32) []*csi.BlockMetadata { return d.delta(t, older, newer, from, limit) },
	} {
		all := get(0, 0)
		if n := len(get(0, 2)); n != len(all) || n < 3 {
			t.Errorf("%s: in small messages there are %d blocks, in large ones %d", name, n, len(all))
		}
		middle := all[len(all)/2]
		rest := get(middle.GetByteOffset(), 3)
		if len(rest) != len(all)-len(all)/2 || rest[0].GetByteOffset() != middle.GetByteOffset() {
			t.Errorf("%s: from block %v on there are %d of %d, the first is %v", name, middle, len(rest), len(all), rest[0])
		}
		inside := get(middle.GetByteOffset()+1, 1)
		if len(inside) == 0 || inside[0].GetByteOffset() > middle.GetByteOffset()+middle.GetSizeBytes() {
			t.Errorf("%s: from the second byte of %v on there is %v", name, middle, inside)
		}
		if end := get(newer.GetSizeBytes(), 0); len(end) > 0 {
			t.Errorf("%s: at the end there is %v", name, end)
		}
	}
}

func testChangeRequests(t *testing.T, d *Driver, kind Kind, older, newer *csi.Snapshot, size int64) {
	for _, tc := range []struct {
		name string
		req  *csi.GetMetadataAllocatedRequest
		code codes.Code
	}{
		{"negative offset", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), StartingOffset: -1}, codes.OutOfRange},
		{"offset past the end", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), StartingOffset: size + 1}, codes.OutOfRange},
		{"negative number", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId(), MaxResults: -1}, codes.InvalidArgument},
		{"no snapshot", &csi.GetMetadataAllocatedRequest{}, codes.InvalidArgument},
		{"not there", &csi.GetMetadataAllocatedRequest{SnapshotId: newer.GetSnapshotId() + "-none"}, codes.NotFound},
		{"foreign", &csi.GetMetadataAllocatedRequest{SnapshotId: "snap-1"}, codes.NotFound},
	} {
		t.Run(tc.name, func(t *testing.T) {
			in, err := d.Control.GetMetadataAllocated(t.Context(), tc.req)
			must(t, err)
			_, err = in.Recv()
			wantCode(t, err, tc.code)
		})
	}
	other := newSized(t, d, kind, size)
	of := other.snapshot(t)
	in, err := d.Control.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: of.GetSnapshotId(), TargetSnapshotId: newer.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.InvalidArgument, other.id)
	if got := d.allocated(t, of, 0, 0); len(got) > 0 {
		t.Errorf("in the snapshot of a blank volume there is %v", got)
	}
	d.drop(t, older)
	in, err = d.Control.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: older.GetSnapshotId(), TargetSnapshotId: newer.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.NotFound)
}
