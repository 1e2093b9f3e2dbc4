package router

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// ListVolumes implements csi.ControllerServer. Pools come in the order of their
// UUIDs, which stays the same when one moves to another node; a token is the ID of
// the volume that a page ended with.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	entries, next, err := page(ctx, s, req, func(ctx context.Context, n *node, token string, limit int32) ([]*csi.ListVolumesResponse_Entry, string, error) {
		resp, err := n.controller.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: token, MaxEntries: limit})
		for _, e := range resp.GetEntries() {
			e.Status = nil // not advertised: LIST_VOLUMES_PUBLISHED_NODES
		}
		return resp.GetEntries(), resp.GetNextToken(), err
	}, func(e *csi.ListVolumesResponse_Entry) string { return e.GetVolume().GetVolumeId() })
	if err != nil {
		return nil, err
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}

// ControllerListVolumeHealth implements csi.ControllerServer, as ListVolumes.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	entries, next, err := page(ctx, s, req, func(ctx context.Context, n *node, token string, limit int32) ([]*csi.VolumeHealth, string, error) {
		resp, err := n.controller.ControllerListVolumeHealth(ctx, &csi.ControllerListVolumeHealthRequest{StartingToken: token, MaxEntries: limit})
		return resp.GetEntries(), resp.GetNextToken(), err
	}, (*csi.VolumeHealth).GetVolumeId)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, nil
}

// shelf is what one backend has in one pool: what is listed as one.
type shelf struct {
	poolKey
	backend string
	node    *node
}

func (s shelf) id(name string) volume.ID {
	return volume.ID{Backend: s.backend, Pool: s.name, PoolUUID: s.uuid, Name: name}
}

func (s shelf) compare(o shelf) int {
	return cmp.Or(s.poolKey.compare(o.poolKey), strings.Compare(s.backend, o.backend))
}

// most bounds the entries of a page, and of one call to a node, and so what a list
// keeps in memory: fanOut times that.
const most = 1000

// page fills one page from as many shelves as it takes, some at a time. fetch lists
// one shelf of a node after a token; id is that of an entry's volume.
func page[E any](
	ctx context.Context, s *Server, req interface {
		GetStartingToken() string
		GetMaxEntries() int32
	},
	fetch func(ctx context.Context, n *node, token string, limit int32) ([]E, string, error),
	id func(E) string,
) (entries []E, next string, err error) {
	limit, err := controllerserver.PageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	limit = min(limit, most)
	shelves, after, err := s.shelves(ctx, req.GetStartingToken())
	if err != nil {
		return nil, "", err
	}
	for window := 4; len(shelves) > 0; window = min(2*window, fanOut) {
		parts, err := fetchParts(ctx, shelves[:min(window, len(shelves))], after, limit-len(entries), fetch, id)
		if err != nil {
			return nil, "", err
		}
		for _, p := range parts {
			if room := limit - len(entries); len(p.entries) > room {
				p.entries, p.next = p.entries[:room], id(p.entries[room-1])
			}
			entries, after = append(entries, p.entries...), p.next
			if p.next == "" {
				shelves = shelves[1:]
			}
			if len(entries) == limit && len(shelves) > 0 {
				return entries, cmp.Or(after, id(entries[limit-1])), nil
			}
			if p.next != "" {
				break
			}
		}
	}
	return entries, "", nil
}

// part is what one call brought of one shelf; next is the ID after which it goes on,
// empty at its end.
type part[E any] struct {
	entries []E
	next    string
}

// fetchParts calls the nodes of some shelves at once; after is where the first one
// goes on.
func fetchParts[E any](
	ctx context.Context, some []shelf, after string, limit int,
	fetch func(ctx context.Context, n *node, token string, limit int32) ([]E, string, error),
	id func(E) string,
) ([]part[E], error) {
	parts := make([]part[E], len(some))
	group, ctx := errgroup.WithContext(ctx)
	for i, shelf := range some {
		from := shelf.id("")
		if i == 0 && after != "" {
			from, _ = volume.ParseID(after) // one of ours
		}
		group.Go(func() error {
			entries, next, err := fetch(ctx, shelf.node, controllerserver.PoolToken(from), int32(limit))
			if err != nil {
				return shelf.failed(ctx, err)
			}
			for _, e := range entries {
				if from, err = shelf.believe(from, id(e)); err != nil {
					return err
				}
			}
			parts[i].entries = entries
			parts[i].next, err = shelf.readToken(next, from, len(entries))
			return err
		})
	}
	return parts, group.Wait()
}

// failed is the answer to a call that lists a shelf. The token was made here: if it
// is stale, the node does not have the pool any more.
func (s shelf) failed(ctx context.Context, err error) error {
	if status.Code(err) != codes.Aborted {
		return s.node.failed(ctx, err)
	}
	s.node.ask(ctx, freshness)
	return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: node %q does not list pool %s: %s", s.node.name, s.poolKey, status.Convert(err).Message())
}

// believe reads the ID of an entry, and refuses one that is not of the shelf or does
// not come after another.
func (s shelf) believe(after volume.ID, text string) (volume.ID, error) {
	id, err := volume.ParseID(text)
	if err != nil || id != s.id(id.Name) || id.Name <= after.Name {
		return id, volume.Errorf(volume.ErrUnavailable, "node %q listed volume %q in pool %s after %q: nothing of the list is used; is its driver ours?", s.node.name, text, s.poolKey, after.Name)
	}
	return id, nil
}

// readToken is the volume ID in a node's token. It is that of the last entry, or
// comes after it: a list gets on.
func (s shelf) readToken(token string, last volume.ID, entries int) (string, error) {
	if token == "" {
		return "", nil
	}
	id, err := controllerserver.ParsePoolToken(token)
	if err == nil && entries > 0 && id == last {
		return id.String(), nil
	}
	_, err = s.believe(last, id.String())
	return id.String(), err
}

// shelves are all that is listed after a token, in order, and the token if it is
// within the first. It fails if that would not be all there is.
func (s *Server) shelves(ctx context.Context, token string) (rest []shelf, after string, err error) {
	var from volume.ID
	if token != "" {
		if from, err = volume.ParseID(token); err != nil || from.PoolUUID == "" || !slices.Contains(s.backends, from.Backend) {
			return nil, "", volume.Errorf(volume.ErrStaleToken, "starting_token %q was not made by this driver: list from the beginning", token)
		}
	}
	shelves, err := s.nodes.shelves(ctx, s.backends)
	if err != nil {
		return nil, "", err
	}
	start := shelf{poolKey: keyOf(from), backend: from.Backend}
	i, there := slices.BinarySearchFunc(shelves, start, shelf.compare)
	if there {
		after = token
	}
	return shelves[i:], after, nil
}

// shelves are those of all nodes.
func (ns *nodes) shelves(ctx context.Context, backends []string) ([]shelf, error) {
	all, err := ns.all()
	if err != nil {
		return nil, err
	}
	if err := ns.complete(ctx, all); err != nil {
		return nil, err
	}
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	var out []shelf
	for key, claims := range ns.owners {
		if len(claims) > 1 {
			return nil, volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: %w", conflict(key, claims))
		}
		for _, b := range backends {
			out = append(out, shelf{key, b, claims[0]})
		}
	}
	slices.SortFunc(out, shelf.compare)
	return out, nil
}

// complete refuses an answer that would leave nodes or pools out. Those in doubt are
// asked anew before.
func (ns *nodes) complete(ctx context.Context, all []*node) error {
	silent, closed := unsure(all, "")
	ns.ask(ctx, slices.Concat(silent, closed))
	silent, closed = unsure(all, "")
	switch {
	case len(silent) > 0:
		return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: there is none from %s", list(names(silent)))
	case len(closed) > 0:
		return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: a pool is not open on %s: see the driver's log there", list(names(closed)))
	}
	return nil
}
