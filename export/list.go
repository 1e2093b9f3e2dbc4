package export

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// mergePages returns a row.merge for a list. The list has one section for all local pools, and then a section
// for each configured nfs pool. Pools that only a StorageClass names are not listed. If a section fails, the
// call fails. A token is the ID of the last entry of a page, and the pool in the ID identifies the section.
func mergePages[E any](list relay.List[E]) func(context.Context, *Relay, proto.Message) (proto.Message, error) {
	return func(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
		first, err := r.Pools.sectionOf(req.(interface{ GetStartingToken() string }).GetStartingToken())
		if err != nil {
			return nil, err
		}
		sections := []paging.Section[E]{list.Section(r.Local)}
		for _, c := range r.Pools.options.Pools {
			sections = append(sections, list.Section(r.serviceOf(r.Pools.byName(c.Name))))
		}
		return list.Fill(ctx, req, paging.MaxPage, sections[first:]...)
	}
}

// Services returns the services of the configured nfs pools, by the names of the pools.
func (r *Relay) Services() map[string]relay.Service {
	services := map[string]relay.Service{}
	for _, c := range r.Pools.options.Pools {
		services[c.Name] = r.serviceOf(r.Pools.byName(c.Name))
	}
	return services
}

// serviceOf returns the service of a worker; Local if w is nil.
func (r *Relay) serviceOf(w *Worker) relay.Service {
	if w == nil {
		return r.Local
	}
	return workerService{worker: w}
}

// sectionOf returns the index of the section that a token identifies: 0 for the local pools, 1 for the
// first configured nfs pool. It returns ErrStaleToken if the nfs pool is not configured.
func (ps *Pools) sectionOf(token string) (int, error) {
	id, err := volume.ParseSnapshotID(token) // also parses volume IDs
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

// listSnapshots is the row.merge of ListSnapshots. A request with a filter goes to the pool
// of the ID in the filter.
func listSnapshots(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	if q := req.(*csi.ListSnapshotsRequest); q.GetSnapshotId() == "" && q.GetSourceVolumeId() == "" {
		return mergePages(relay.Snapshots)(ctx, r, q)
	}
	w, err := ofIDs(r.Pools, req)
	if err != nil {
		return nil, err
	}
	return r.serviceOf(w).Call(ctx, relay.Snapshots.Method, req)
}

// storageHealth returns the response of Local with two additions: the health that each worker reported
// last, and the servers that do not answer. CSI requires one entry per status and reason.
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

// addHealth adds an entry. If the response has an entry with the same status and reason, it adds only the
// message.
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
