package export

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/relay/relaytest"
	"github.com/trivet-csi/trivet/volume"
)

// These methods of fake return the name of their pool, as an ID or as an error message. The name shows which
// worker answered.

func (f *fake) CreateSnapshot(context.Context, *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: f.job.Pool.Name}}, nil
}

func (f *fake) GetSnapshot(context.Context, *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	return &csi.GetSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: f.job.Pool.Name}}, nil
}

func (f *fake) DeleteSnapshot(context.Context, *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return nil, status.Error(codes.InvalidArgument, f.job.Pool.Name)
}

func (f *fake) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	return snapshotPage(req, f.job.Pool.Name, "nfs:"+f.job.Pool.Name+":s", "nfs:"+f.job.Pool.Name+":t.000")
}

func (f *fake) CreateVolumeGroupSnapshot(context.Context, *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: f.job.Pool.Name}}, nil
}

func (f *fake) GetVolumeGroupSnapshot(context.Context, *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: f.job.Pool.Name}}, nil
}

func (f *fake) DeleteVolumeGroupSnapshot(context.Context, *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	return nil, status.Error(codes.InvalidArgument, f.job.Pool.Name)
}

func (f *fake) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	for i := range req.GetMaxResults() {
		if err := stream.Send(&csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: int64(i)}); err != nil {
			return err
		}
	}
	f.act(req.GetSnapshotId())
	return status.Error(codes.OutOfRange, f.job.Pool.Name)
}

func (f *fake) GetMetadataDelta(_ *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	return stream.Send(&csi.GetMetadataDeltaResponse{VolumeCapacityBytes: 7})
}

// snapshotPage returns a page of ids. For a request with a filter it returns only the ID filtered.
func snapshotPage(req *csi.ListSnapshotsRequest, filtered string, ids ...string) (*csi.ListSnapshotsResponse, error) {
	if req.GetSnapshotId() != "" || req.GetSourceVolumeId() != "" {
		ids = []string{filtered}
	}
	resp := &csi.ListSnapshotsResponse{}
	for _, id := range ids {
		if id <= req.GetStartingToken() {
			continue
		}
		if n := len(resp.Entries); n > 0 && n == int(req.GetMaxEntries()) {
			resp.NextToken = resp.Entries[n-1].Snapshot.SnapshotId
			break
		}
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: &csi.Snapshot{SnapshotId: id}})
	}
	return resp, nil
}

func (l *local) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	return snapshotPage(req, "local", "loop:p.01234567:a", "loop:p.01234567:b.000", "loop:p.01234567:b.001")
}

// allocated calls GetMetadataAllocated, and then received for each message.
func (w *testDriver) allocated(ctx context.Context, req *csi.GetMetadataAllocatedRequest, received func()) error {
	return w.relay.Stream(ctx, csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName, req, func(any) error { received(); return nil })
}

// TestSnapshotCalls: the worker of the pool in an ID answers; Local answers for local pools.
func TestSnapshotCalls(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t), startServer(t))
	c, ctx := relaytest.Controller(w.relay), t.Context()
	inPool := func(pool, name string) string { return "nfs:" + pool + ":" + name }
	calls := map[string]func(pool string) (string, error){
		"create": func(pool string) (string, error) {
			resp, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: inPool(pool, "v")})
			return resp.GetSnapshot().GetSnapshotId(), err
		},
		"get": func(pool string) (string, error) {
			resp, err := c.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: inPool(pool, "s.001")})
			return resp.GetSnapshot().GetSnapshotId(), err
		},
		"delete": func(pool string) (string, error) {
			_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: inPool(pool, "s")})
			return messageOf(err, codes.InvalidArgument)
		},
		"list by snapshot ID": func(pool string) (string, error) {
			resp, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: inPool(pool, "s")})
			return firstID(resp), err
		},
		"list by volume ID": func(pool string) (string, error) {
			resp, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: inPool(pool, "v")})
			return firstID(resp), err
		},
		"create group": func(pool string) (string, error) {
			resp, err := c.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{inPool(pool, "v"), inPool(pool, "w")}})
			return resp.GetGroupSnapshot().GetGroupSnapshotId(), err
		},
		"get group": func(pool string) (string, error) {
			resp, err := c.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: inPool(pool, "g.group")})
			return resp.GetGroupSnapshot().GetGroupSnapshotId(), err
		},
		"delete group": func(pool string) (string, error) {
			_, err := c.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: inPool(pool, "g.group")})
			return messageOf(err, codes.InvalidArgument)
		},
		"allocated": func(pool string) (string, error) {
			return messageOf(w.allocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: inPool(pool, "s")}, func() {}), codes.OutOfRange)
		},
	}
	for name, call := range calls {
		if got, err := call("nas1"); err != nil || got != "nas1" {
			t.Errorf("%s in pool nas1: answered by %q, %v; want nas1", name, got, err)
		}
		if _, err := call("missing"); !errors.Is(err, volume.ErrUnavailable) {
			t.Errorf("%s in an unknown pool: got %v, want ErrUnavailable", name, err)
		}
		if got, err := call("p.01234567"); status.Code(err) != codes.Unimplemented && got != "local" {
			t.Errorf("%s in a local pool: answered by %q, %v; want Local, which returns Unimplemented or \"local\"", name, got, err)
		}
	}
	_, err := c.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{inPool("nas0", "v"), inPool("nas1", "v")}})
	if !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a group snapshot of volumes in two pools: got %v, want ErrPrecondition", err)
	}
	var changed []int64
	delta := &csi.GetMetadataDeltaRequest{BaseSnapshotId: inPool("nas1", "s"), TargetSnapshotId: inPool("nas1", "t")}
	err = w.relay.Stream(ctx, csi.SnapshotMetadata_GetMetadataDelta_FullMethodName, delta, func(m any) error {
		changed = append(changed, m.(*csi.GetMetadataDeltaResponse).GetVolumeCapacityBytes())
		return nil
	})
	if err != nil || !slices.Equal(changed, []int64{7}) {
		t.Errorf("GetMetadataDelta: got %v, %v; want one message with 7", changed, err)
	}
}

// messageOf returns the message of an error that has the code. It returns any other error as an error.
func messageOf(err error, code codes.Code) (string, error) {
	if status.Code(err) == code {
		return status.Convert(err).Message(), nil
	}
	return "", err
}

// firstID returns the ID of the first entry, or an empty string if there is none.
func firstID(resp *csi.ListSnapshotsResponse) string {
	if len(resp.GetEntries()) == 0 {
		return ""
	}
	return resp.GetEntries()[0].GetSnapshot().GetSnapshotId()
}

// TestStreamFails: a stream fails if the call is canceled or the worker exits.
func TestStreamFails(t *testing.T) {
	w := newDriver(t, testIntervals, startServer(t))
	ctx, cancel := context.WithCancel(t.Context())
	messages := 0
	err := w.allocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: "nfs:nas0:hang", MaxResults: 5}, func() {
		if messages++; messages == 5 {
			cancel()
		}
	})
	if status.Code(err) != codes.Canceled {
		t.Errorf("canceled call: got %v, want Canceled", err)
	}
	err = w.allocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: "nfs:nas0:exit", MaxResults: 3}, func() {})
	if !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("call to a worker that exits: got %v, want ErrUnavailable", err)
	}
}
