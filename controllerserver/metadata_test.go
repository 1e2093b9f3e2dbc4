package controllerserver_test

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// block is a range of bytes.
type block struct{ offset, size int64 }

// allocated reads all messages of GetMetadataAllocated.
func (d *testDriver) allocated(req *csi.GetMetadataAllocatedRequest) (all []block, messages int, err error) {
	stream, err := d.Control.GetMetadataAllocated(d.t.Context(), req)
	must(d.t, err)
	err = controllerserver.Pass(stream.Recv, func(m *csi.GetMetadataAllocatedResponse) error {
		messages++
		all = append(all, d.blocks(m, req.GetMaxResults())...)
		return nil
	})
	return all, messages, err
}

// delta reads all messages of GetMetadataDelta.
func (d *testDriver) delta(req *csi.GetMetadataDeltaRequest) (all []block, err error) {
	stream, err := d.Control.GetMetadataDelta(d.t.Context(), req)
	must(d.t, err)
	err = controllerserver.Pass(stream.Recv, func(m *csi.GetMetadataDeltaResponse) error {
		all = append(all, d.blocks(m, req.GetMaxResults())...)
		return nil
	})
	return all, err
}

// blocks returns the blocks of a message. It fails the test unless the message has a variable block length, the
// volume size 32 MiB, and at most the given number of blocks. If the number is 0, any number is
// allowed.
func (d *testDriver) blocks(m interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}, most int32,
) (all []block) {
	if m.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH || m.GetVolumeCapacityBytes() != 32*mib || most > 0 && len(m.GetBlockMetadata()) > int(most) {
		d.t.Errorf("got message %v, want variable length, 32 MiB, and at most %d blocks (0 means any number)", m, most)
	}
	for _, b := range m.GetBlockMetadata() {
		all = append(all, block{b.GetByteOffset(), b.GetSizeBytes()})
	}
	return all
}

// write writes 64 KiB at each of some offsets, in MiB, into the image of a volume that is not attached.
func (d *testDriver) write(id string, at ...int64) {
	d.t.Helper()
	f, err := os.OpenFile(d.imagePath(id), os.O_WRONLY, 0)
	must(d.t, err)
	for _, offset := range at {
		_, err := f.WriteAt(bytes.Repeat([]byte{1}, 64<<10), offset*mib)
		must(d.t, err)
	}
	must(d.t, f.Sync())
	must(d.t, f.Close())
}

// written returns the blocks that write writes.
func written(at ...int64) (all []block) {
	for _, offset := range at {
		all = append(all, block{offset * mib, 64 << 10})
	}
	return all
}

// TestMetadata: the calls return the allocated ranges of a snapshot, and the changed ranges between two
// snapshots, from any offset and in messages of any size.
func TestMetadata(t *testing.T) {
	d := newTestDriver(t)
	v := d.createVolume("v")
	empty := d.createSnapshot("s-0", v).GetSnapshotId()
	d.write(v, 2, 4, 6)
	older := d.createSnapshot("s-1", v).GetSnapshotId()
	d.write(v, 4, 31)
	newer := d.createSnapshot("s-2", v).GetSnapshotId()

	if got, messages, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: empty}); err != nil || len(got) > 0 || messages > 0 {
		t.Errorf("of an empty volume: got %v in %d messages, %v; want none", got, messages, err)
	}
	if got, err := d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: newer, TargetSnapshotId: newer}); err != nil || len(got) > 0 {
		t.Errorf("between a snapshot and itself: got %v, %v; want none", got, err)
	}
	for size := range int32(5) {
		got, messages, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, written(2, 4, 6, 31)) || size == 1 && messages != 4 {
			t.Errorf("allocated, max_results %d: got %v in %d messages, %v; want the blocks at 2, 4, 6 and 31 MiB", size, got, messages, err)
		}
		got, err = d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, written(4, 31)) {
			t.Errorf("changed, max_results %d: got %v, %v; want the blocks at 4 and 31 MiB", size, got, err)
		}
		got, err = d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: empty, TargetSnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, written(2, 4, 6, 31)) {
			t.Errorf("changed since the empty snapshot, max_results %d: got %v, %v; want the blocks at 2, 4, 6 and 31 MiB", size, got, err)
		}
	}
	for offset, want := range map[int64][]block{5 * mib: written(6, 31), 31*mib + 64<<10: nil, 32 * mib: nil} {
		if got, _, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: newer, StartingOffset: offset}); err != nil || !slices.Equal(got, want) {
			t.Errorf("allocated from byte %d: got %v, %v; want %v", offset, got, err, want)
		}
	}
	if got, err := d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer, StartingOffset: 5 * mib}); err != nil || !slices.Equal(got, written(31)) {
		t.Errorf("changed from 5 MiB: got %v, %v; want the block at 31 MiB", got, err)
	}
	// From an offset within a range, the first range ends after the offset.
	got, _, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: older, StartingOffset: 4*mib + 5000})
	if err != nil || len(got) != 2 || got[0].offset > 4*mib+5000 || got[0].offset+got[0].size != 4*mib+64<<10 {
		t.Errorf("allocated from within a range: got %v, %v; want the end of the block at 4 MiB and the block at 6 MiB", got, err)
	}
}

// TestMetadataRefused: invalid requests are refused, and a missing image of a snapshot is reported as DATA_LOSS.
func TestMetadataRefused(t *testing.T) {
	d := newTestDriver(t)
	v, other, elsewhere := d.createVolume("v", in("a")), d.createVolume("w", in("a")), d.createVolume("x", in("b"))
	s, younger := d.createSnapshot("s", v).GetSnapshotId(), d.createSnapshot("younger", v).GetSnapshotId()
	ofOther, inB := d.createSnapshot("o", other).GetSnapshotId(), d.createSnapshot("b", elsewhere).GetSnapshotId()
	dir := d.createVolume("d", directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local", "pool": "a"} })
	ofDir := d.createSnapshot("d", dir).GetSnapshotId()
	for name, tc := range map[string]struct {
		req  *csi.GetMetadataAllocatedRequest
		want codes.Code
		says string
	}{
		"no ID":                {&csi.GetMetadataAllocatedRequest{}, codes.InvalidArgument, "snapshot_id"},
		"foreign ID":           {&csi.GetMetadataAllocatedRequest{SnapshotId: "s"}, codes.NotFound, ""},
		"not existing":         {&csi.GetMetadataAllocatedRequest{SnapshotId: s + "x"}, codes.NotFound, ""},
		"a directory":          {&csi.GetMetadataAllocatedRequest{SnapshotId: ofDir}, codes.InvalidArgument, "directory"},
		"negative offset":      {&csi.GetMetadataAllocatedRequest{SnapshotId: s, StartingOffset: -1}, codes.OutOfRange, "starting_offset -1"},
		"offset past the end":  {&csi.GetMetadataAllocatedRequest{SnapshotId: s, StartingOffset: 32*mib + 1}, codes.OutOfRange, "starting_offset"},
		"negative max_results": {&csi.GetMetadataAllocatedRequest{SnapshotId: s, MaxResults: -1}, codes.InvalidArgument, "max_results"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := d.allocated(tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	for name, tc := range map[string]struct {
		req  *csi.GetMetadataDeltaRequest
		want codes.Code
		says string
	}{
		"no base":              {&csi.GetMetadataDeltaRequest{TargetSnapshotId: s}, codes.InvalidArgument, "base_snapshot_id"},
		"no target":            {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s}, codes.InvalidArgument, "target_snapshot_id"},
		"foreign base":         {&csi.GetMetadataDeltaRequest{BaseSnapshotId: "s", TargetSnapshotId: s}, codes.NotFound, ""},
		"foreign target":       {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: "s"}, codes.NotFound, ""},
		"target is unknown":    {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: s + "x"}, codes.NotFound, "is not in pool"},
		"base does not exist":  {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s + "x", TargetSnapshotId: s}, codes.NotFound, "make a full backup, and keep its snapshot"},
		"of two volumes":       {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: ofOther}, codes.InvalidArgument, "one volume"},
		"in two pools":         {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: inB}, codes.InvalidArgument, "one volume"},
		"base is newer":        {&csi.GetMetadataDeltaRequest{BaseSnapshotId: younger, TargetSnapshotId: s}, codes.InvalidArgument, "younger"},
		"directories":          {&csi.GetMetadataDeltaRequest{BaseSnapshotId: ofDir, TargetSnapshotId: ofDir}, codes.InvalidArgument, "directory"},
		"negative offset":      {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, StartingOffset: -4096}, codes.OutOfRange, "starting_offset"},
		"offset past the end":  {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, StartingOffset: 1 << 40}, codes.OutOfRange, "starting_offset"},
		"negative max_results": {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, MaxResults: -1}, codes.InvalidArgument, "max_results"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.delta(tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	image := strings.Replace(d.imagePath(s), "volumes/s", "snapshots/s/0", 1)
	testenv.Run(t, "chattr", "-i", image) // the driver makes images of snapshots immutable
	must(t, os.Remove(image))
	_, _, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: s})
	wantCode(t, err, codes.DataLoss, "image is missing")
}
