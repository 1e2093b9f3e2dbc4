package export

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// pageCall is a request for one page of a list.
type pageCall interface {
	GetStartingToken() string
	GetMaxEntries() int32
}

// page returns one page: first the entries of the local pools, which are one list, then those of
// each configured nfs pool. A token is the ID of the last entry, which contains the pool.
func page[E any](ctx context.Context, r *Relay, req pageCall, list relay.List[E]) (proto.Message, error) {
	limit, err := paging.Limit(req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	first, err := r.Pools.listedIn(req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	sections := []paging.Section[E]{section(r, nil, list)}
	for _, c := range r.Pools.options.Pools {
		sections = append(sections, section(r, r.Pools.byName(c.Name), list))
	}
	entries, next, err := paging.Fill(ctx, sections[first:], req.GetStartingToken(), limit, paging.Serial, list.ID)
	if err != nil {
		return nil, err
	}
	return list.Response(entries, next), nil
}

// section lists the pool of a worker, or the local pools if w is nil.
func section[E any](r *Relay, w *Worker, list relay.List[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		return list.Page(ctx, r.at(w), token, int32(limit))
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
		return 0, nil //nolint:nilerr // Local refuses what is not a token
	}
	for i, c := range ps.options.Pools {
		if c.Name == id.Pool {
			return i + 1, nil
		}
	}
	return 0, paging.StaleToken(token)
}

// merged returns the row.merge of a list: the entries of Local, then those of each configured nfs
// pool. Pools that only StorageClasses name are not listed. It fails instead of returning an
// incomplete list.
func merged[E any](list relay.List[E]) func(context.Context, *Relay, proto.Message) (proto.Message, error) {
	return func(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
		return page(ctx, r, req.(pageCall), list)
	}
}

// listSnapshots is the row.merge of ListSnapshots. Only one pool lists one snapshot, or the
// snapshots of one volume.
func listSnapshots(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	q := req.(*csi.ListSnapshotsRequest)
	var w *Worker
	var err error
	switch {
	case q.GetSnapshotId() != "":
		w, err = ofSnapshot(r.Pools, q)
	case q.GetSourceVolumeId() != "":
		w, err = r.Pools.byID(volume.ParseID(q.GetSourceVolumeId()))
	default:
		return page(ctx, r, q, relay.Snapshots)
	}
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
