package export

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// page returns the row.merge of a list: first the entries of the local pools, which are one list, then those
// of each configured nfs pool. Pools that only StorageClasses name are not listed. An incomplete list is an
// error. A token is the ID of the last entry, which contains the pool.
func page[E any](list relay.List[E]) func(context.Context, *Relay, proto.Message) (proto.Message, error) {
	return func(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
		first, err := r.Pools.listedIn(req.(interface{ GetStartingToken() string }).GetStartingToken())
		if err != nil {
			return nil, err
		}
		sections := []paging.Section[E]{list.Section(r.Local)}
		for _, c := range r.Pools.options.Pools {
			sections = append(sections, list.Section(r.at(r.Pools.byName(c.Name))))
		}
		return list.Fill(ctx, req, paging.MaxPage, sections[first:]...)
	}
}

// at returns the service of a worker; Local if w is nil.
func (r *Relay) at(w *Worker) relay.Service {
	if w == nil {
		return r.Local
	}
	return workerService{worker: w}
}

// listedIn returns the section in which a list continues after a token: 0 for the local pools, 1
// for the first nfs pool (ErrStaleToken).
func (ps *Pools) listedIn(token string) (int, error) {
	id, err := volume.ParseSnapshotID(token) // or a volume's
	if err != nil || !id.Shared() {
		return 0, nil //nolint:nilerr // Local refuses an invalid token
	}
	for i, c := range ps.options.Pools {
		if c.Name == id.Pool {
			return i + 1, nil
		}
	}
	return 0, paging.StaleToken(token)
}

// listSnapshots is the row.merge of ListSnapshots. With a filter, the pool of the filter's ID answers.
func listSnapshots(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	if q := req.(*csi.ListSnapshotsRequest); q.GetSnapshotId() == "" && q.GetSourceVolumeId() == "" {
		return page(relay.Snapshots)(ctx, r, q)
	}
	w, err := ofIDs(r.Pools, req)
	if err != nil {
		return nil, err
	}
	return r.at(w).Call(ctx, relay.Snapshots.Method, req)
}

// storageHealth adds the last reports of the workers and the silent servers to the response of
// Local. CSI requires one message per status and reason.
func storageHealth(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	resp, err := relay.Call[*csi.NodeGetStorageHealthResponse](ctx, r.Local, csi.Node_NodeGetStorageHealth_FullMethodName, req)
	if err != nil {
		return nil, err
	}
	for _, w := range r.Pools.all() {
		for _, h := range w.storageHealth() {
			addHealth(resp, h)
		}
	}
	return resp, nil
}

func addHealth(resp *csi.NodeGetStorageHealthResponse, h *csi.NodeGetStorageHealthResponse_StorageBackendHealth) {
	for _, have := range resp.GetBackendHealth() {
		if have.GetStatus() == h.GetStatus() && have.GetReason() == h.GetReason() {
			have.Message += "; " + h.GetMessage()
			return
		}
	}
	resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
		Status: h.GetStatus(), Reason: h.GetReason(), Message: h.GetMessage(),
	})
}
