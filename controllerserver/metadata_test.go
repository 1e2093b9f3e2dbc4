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

// allocated reads a whole stream, as does delta.
func (w *world) allocated(req *csi.GetMetadataAllocatedRequest) (all []block, messages int, err error) {
	stream, err := w.Control.GetMetadataAllocated(w.t.Context(), req)
	must(w.t, err)
	err = controllerserver.Pass(stream.Recv, func(m *csi.GetMetadataAllocatedResponse) error {
		messages++
		all = append(all, w.blocks(m, req.GetMaxResults())...)
		return nil
	})
	return all, messages, err
}

func (w *world) delta(req *csi.GetMetadataDeltaRequest) (all []block, err error) {
	stream, err := w.Control.GetMetadataDelta(w.t.Context(), req)
	must(w.t, err)
	err = controllerserver.Pass(stream.Recv, func(m *csi.GetMetadataDeltaResponse) error {
		all = append(all, w.blocks(m, req.GetMaxResults())...)
		return nil
	})
	return all, err
}

func (w *world) blocks(m interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}, most int32,
) (all []block) {
	if m.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH || m.GetVolumeCapacityBytes() != 32*mib || most > 0 && len(m.GetBlockMetadata()) > int(most) {
		w.t.Errorf("got message %v", m)
	}
	for _, b := range m.GetBlockMetadata() {
		all = append(all, block{b.GetByteOffset(), b.GetSizeBytes()})
	}
	return all
}

// write writes 64 KiB into the image of a volume that is not attached, at offsets in MiB.
func (w *world) write(id string, at ...int64) {
	w.t.Helper()
	f, err := os.OpenFile(w.image(id), os.O_WRONLY, 0)
	must(w.t, err)
	for _, place := range at {
		_, err := f.WriteAt(bytes.Repeat([]byte{1}, 64<<10), place*mib)
		must(w.t, err)
	}
	must(w.t, f.Sync())
	must(w.t, f.Close())
}

func places(at ...int64) (all []block) {
	for _, place := range at {
		all = append(all, block{place * mib, 64 << 10})
	}
	return all
}

// TestMetadata: the allocated ranges of a snapshot, and the changed ranges between two snapshots, from any
// offset and in messages of any size.
func TestMetadata(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	empty := w.cut("s-0", v).GetSnapshotId()
	w.write(v, 2, 4, 6)
	older := w.cut("s-1", v).GetSnapshotId()
	w.write(v, 4, 31)
	newer := w.cut("s-2", v).GetSnapshotId()

	if got, messages, err := w.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: empty}); err != nil || len(got) > 0 || messages > 0 {
		t.Errorf("of nothing: %v in %d messages, %v", got, messages, err)
	}
	if got, err := w.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: newer, TargetSnapshotId: newer}); err != nil || len(got) > 0 {
		t.Errorf("between one and itself: %v, %v", got, err)
	}
	for size := range int32(5) {
		got, messages, err := w.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, places(2, 4, 6, 31)) || size == 1 && messages != 4 {
			t.Errorf("in messages of %d: %v, %v", size, got, err)
		}
		got, err = w.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, places(4, 31)) {
			t.Errorf("changed in messages of %d: %v, %v", size, got, err)
		}
		got, err = w.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: empty, TargetSnapshotId: newer, MaxResults: size})
		if err != nil || !slices.Equal(got, places(2, 4, 6, 31)) {
			t.Errorf("changed since the beginning in messages of %d: %v, %v", size, got, err)
		}
	}
	for offset, want := range map[int64][]block{5 * mib: places(6, 31), 31*mib + 64<<10: nil, 32 * mib: nil} {
		if got, _, err := w.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: newer, StartingOffset: offset}); err != nil || !slices.Equal(got, want) {
			t.Errorf("from %d: %v, %v", offset, got, err)
		}
	}
	if got, err := w.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer, StartingOffset: 5 * mib}); err != nil || !slices.Equal(got, places(31)) {
		t.Errorf("changed from 5 MiB: %v, %v", got, err)
	}
	// An offset within a range: all ranges end after it.
	got, _, err := w.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: older, StartingOffset: 4*mib + 5000})
	if err != nil || len(got) != 2 || got[0].offset > 4*mib+5000 || got[0].offset+got[0].size != 4*mib+64<<10 {
		t.Errorf("from within a range: %v, %v", got, err)
	}
}

func TestMetadataRefused(t *testing.T) {
	w := newWorld(t)
	v, other, elsewhere := w.make("v", in("a")), w.make("w", in("a")), w.make("x", in("b"))
	s, younger := w.cut("s", v).GetSnapshotId(), w.cut("younger", v).GetSnapshotId()
	ofOther, inB := w.cut("o", other).GetSnapshotId(), w.cut("b", elsewhere).GetSnapshotId()
	dir := w.make("d", directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local", "pool": "a"} })
	ofDir := w.cut("d", dir).GetSnapshotId()
	for name, tc := range map[string]struct {
		req  *csi.GetMetadataAllocatedRequest
		want codes.Code
		says string
	}{
		"no ID":         {&csi.GetMetadataAllocatedRequest{}, codes.InvalidArgument, "snapshot_id"},
		"foreign":       {&csi.GetMetadataAllocatedRequest{SnapshotId: "s"}, codes.NotFound, ""},
		"not there":     {&csi.GetMetadataAllocatedRequest{SnapshotId: s + "x"}, codes.NotFound, ""},
		"a directory":   {&csi.GetMetadataAllocatedRequest{SnapshotId: ofDir}, codes.InvalidArgument, "directory"},
		"negative":      {&csi.GetMetadataAllocatedRequest{SnapshotId: s, StartingOffset: -1}, codes.OutOfRange, "starting_offset -1"},
		"past the end":  {&csi.GetMetadataAllocatedRequest{SnapshotId: s, StartingOffset: 32*mib + 1}, codes.OutOfRange, "starting_offset"},
		"less than one": {&csi.GetMetadataAllocatedRequest{SnapshotId: s, MaxResults: -1}, codes.InvalidArgument, "max_results"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := w.allocated(tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	for name, tc := range map[string]struct {
		req  *csi.GetMetadataDeltaRequest
		want codes.Code
		says string
	}{
		"no base":         {&csi.GetMetadataDeltaRequest{TargetSnapshotId: s}, codes.InvalidArgument, "base_snapshot_id"},
		"no target":       {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s}, codes.InvalidArgument, "target_snapshot_id"},
		"foreign base":    {&csi.GetMetadataDeltaRequest{BaseSnapshotId: "s", TargetSnapshotId: s}, codes.NotFound, ""},
		"foreign target":  {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: "s"}, codes.NotFound, ""},
		"base is missing": {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s + "x", TargetSnapshotId: s}, codes.NotFound, ""},
		"another volume":  {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: ofOther}, codes.InvalidArgument, "one volume"},
		"another pool":    {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: inB}, codes.InvalidArgument, "one volume"},
		"backwards":       {&csi.GetMetadataDeltaRequest{BaseSnapshotId: younger, TargetSnapshotId: s}, codes.InvalidArgument, "younger"},
		"directories":     {&csi.GetMetadataDeltaRequest{BaseSnapshotId: ofDir, TargetSnapshotId: ofDir}, codes.InvalidArgument, "directory"},
		"negative":        {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, StartingOffset: -4096}, codes.OutOfRange, "starting_offset"},
		"past the end":    {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, StartingOffset: 1 << 40}, codes.OutOfRange, "starting_offset"},
		"less than one":   {&csi.GetMetadataDeltaRequest{BaseSnapshotId: s, TargetSnapshotId: younger, MaxResults: -1}, codes.InvalidArgument, "max_results"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.delta(tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	image := strings.Replace(w.image(s), "volumes/s", "snapshots/s/0", 1)
	testenv.Run(t, "chattr", "-i", image)
	must(t, os.Remove(image))
	_, _, err := w.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: s})
	wantCode(t, err, codes.DataLoss, "image is missing")
}
