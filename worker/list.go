package worker

import (
	"context"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// page fills one page from as many pools as it takes: the local ones, whose worker is
// nil, are one list, and come first. A token is the ID after which the list goes on, and
// tells in which pool; the first pool that has nothing after it is followed by the next.
func page[E any](
	ctx context.Context, ps *Pools, req interface {
		GetStartingToken() string
		GetMaxEntries() int32
	},
	fetch func(ctx context.Context, w *Worker, token string, limit int32) ([]E, string, error),
	id func(E) string,
) (entries []E, next string, err error) {
	limit, err := controllerserver.PageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	token := req.GetStartingToken()
	at, err := ps.listedIn(token)
	if err != nil {
		return nil, "", err
	}
	for ; at <= len(ps.options.Pools); at++ {
		var w *Worker
		if at > 0 {
			w = ps.named(ps.options.Pools[at-1].Name)
		}
		more, next, err := fetch(ctx, w, token, int32(limit-len(entries)))
		if err != nil {
			return nil, "", err
		}
		entries = append(entries, more...)
		switch {
		case next != "":
			return entries, next, nil
		case len(entries) == limit && at < len(ps.options.Pools):
			return entries, id(entries[limit-1]), nil
		}
		token = ""
	}
	return entries, "", nil
}

// listedIn tells where a token goes on: 0 for the local pools, 1 for the first nfs
// pool.
func (ps *Pools) listedIn(token string) (int, error) {
	id, err := volume.ParseSnapshotID(token) // or a volume's
	if err != nil || !id.Shared() {
		return 0, nil //nolint:nilerr // whoever lists the local ones refuses what is no token
	}
	for i, c := range ps.options.Pools {
		if c.Name == id.Pool {
			return i + 1, nil
		}
	}
	return 0, stale(token)
}
