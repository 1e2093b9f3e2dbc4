package export

import (
	"context"

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

// page fills one page: from the local pools, which are one list, then from each configured
// nfs pool. A token is the ID of the last entry, which also names the pool.
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
		sections = append(sections, section(r, r.Pools.named(c.Name), list))
	}
	entries, next, err := paging.Fill(ctx, sections[first:], req.GetStartingToken(), limit, paging.Serial, list.ID)
	if err != nil {
		return nil, err
	}
	return list.Response(entries, next), nil
}

// section lists the pool of a worker; nil for the local pools.
func section[E any](r *Relay, w *Worker, list relay.List[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		return list.Page(ctx, r.at(w, false), token, int32(limit))
	}
}

// listedIn tells where a list continues after a token: 0 is the local pools, 1 the first
// nfs pool.
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
