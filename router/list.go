package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// ListVolumes implements csi.ControllerServer. Node-local pools come in the order of
// their UUIDs, which stays the same when one moves to another node; a token is the ID
// of the volume that a page ended with. Shared pools come after them, in an order of
// their own.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	entries, next, err := page(ctx, s, req, source[*csi.ListVolumesResponse_Entry]{
		node: func(n *node) lister[*csi.ListVolumesResponse_Entry] {
			return volumes(func(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
				return n.controller.ListVolumes(ctx, req)
			})
		},
		shared: volumes(s.shared.ListVolumes),
		id:     func(e *csi.ListVolumesResponse_Entry) string { return e.GetVolume().GetVolumeId() },
		parse:  volume.ParseID,
	})
	if err != nil {
		return nil, err
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}

func volumes(list func(context.Context, *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error)) lister[*csi.ListVolumesResponse_Entry] {
	return func(ctx context.Context, token string, limit int32) ([]*csi.ListVolumesResponse_Entry, string, error) {
		resp, err := list(ctx, &csi.ListVolumesRequest{StartingToken: token, MaxEntries: limit})
		for _, e := range resp.GetEntries() {
			e.Status = nil // not advertised: LIST_VOLUMES_PUBLISHED_NODES
		}
		return resp.GetEntries(), resp.GetNextToken(), err
	}
}

// ControllerListVolumeHealth implements csi.ControllerServer, as ListVolumes.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	entries, next, err := page(ctx, s, req, source[*csi.VolumeHealth]{
		node: func(n *node) lister[*csi.VolumeHealth] {
			return healths(func(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
				return n.controller.ControllerListVolumeHealth(ctx, req)
			})
		},
		shared: healths(s.shared.ControllerListVolumeHealth),
		id:     (*csi.VolumeHealth).GetVolumeId,
		parse:  volume.ParseID,
	})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, nil
}

func healths(list func(context.Context, *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error)) lister[*csi.VolumeHealth] {
	return func(ctx context.Context, token string, limit int32) ([]*csi.VolumeHealth, string, error) {
		resp, err := list(ctx, &csi.ControllerListVolumeHealthRequest{StartingToken: token, MaxEntries: limit})
		return resp.GetEntries(), resp.GetNextToken(), err
	}
}

// lister lists what comes after a token, and gives the next one.
type lister[E any] func(ctx context.Context, token string, limit int32) ([]E, string, error)

// source is where the entries of a list come from; id is that of an entry, which parse
// reads.
type source[E any] struct {
	node   func(*node) lister[E]
	shared lister[E]
	id     func(E) string
	parse  func(string) (volume.ID, error)
}

// sharedToken stands before the tokens of the list of shared pools.
const sharedToken = "shared "

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

// page fills one page, from the node-local pools and then the shared ones.
func page[E any](
	ctx context.Context, s *Server, req interface {
		GetStartingToken() string
		GetMaxEntries() int32
	}, from source[E],
) (entries []E, next string, err error) {
	limit, err := controllerserver.PageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	limit = min(limit, most)
	token, inShared := strings.CutPrefix(req.GetStartingToken(), sharedToken)
	if !inShared {
		entries, next, err = localPage(ctx, s, token, limit, from)
		if err != nil || next != "" || len(s.sharedPools) == 0 {
			return entries, next, err
		}
		token = ""
	}
	if len(entries) == limit {
		return entries, sharedToken, nil
	}
	more, next, err := from.shared(ctx, token, int32(limit-len(entries)))
	if err != nil {
		return nil, "", err
	}
	if next != "" {
		next = sharedToken + next
	}
	return append(entries, more...), next, nil
}

// localPage fills one page from as many shelves as it takes, some at a time.
func localPage[E any](ctx context.Context, s *Server, token string, limit int, from source[E]) (entries []E, next string, err error) {
	shelves, after, err := s.shelves(ctx, token, from.parse)
	if err != nil {
		return nil, "", err
	}
	for window := 4; len(shelves) > 0; window = min(2*window, fanOut) {
		parts, err := fetchParts(ctx, shelves[:min(window, len(shelves))], after, limit-len(entries), from)
		if err != nil {
			return nil, "", err
		}
		for _, p := range parts {
			if room := limit - len(entries); len(p.entries) > room {
				p.entries, p.next = p.entries[:room], from.id(p.entries[room-1])
			}
			entries, after = append(entries, p.entries...), p.next
			if p.next == "" {
				shelves = shelves[1:]
			}
			if len(entries) == limit && len(shelves) > 0 {
				return entries, cmp.Or(after, from.id(entries[limit-1])), nil
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
func fetchParts[E any](ctx context.Context, some []shelf, after string, limit int, from source[E]) ([]part[E], error) {
	parts := make([]part[E], len(some))
	group, ctx := errgroup.WithContext(ctx)
	for i, shelf := range some {
		last := shelf.id("")
		if i == 0 && after != "" {
			last, _ = from.parse(after) // one of ours
		}
		group.Go(func() error {
			entries, next, err := from.node(shelf.node)(ctx, controllerserver.PoolToken(last), int32(limit))
			if err != nil {
				return shelf.failed(ctx, err)
			}
			for _, e := range entries {
				if last, err = shelf.believe(last, from.id(e), from.parse); err != nil {
					return err
				}
			}
			parts[i].entries = entries
			parts[i].next, err = shelf.readToken(next, last, len(entries), from.parse)
			return err
		})
	}
	return parts, group.Wait()
}

// failed is the answer to a call that lists a shelf. The token was made here: if it
// is stale, the node does not have the pool any more.
func (s shelf) failed(ctx context.Context, err error) error {
	if status.Code(err) == codes.Aborted {
		s.node.ask(ctx, freshness)
		return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: node %q does not list pool %s: %s", s.node.name, s.poolKey, status.Convert(err).Message())
	}
	err = s.node.failed(ctx, err)
	if status.Code(err) == codes.Unavailable {
		return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: %s", status.Convert(err).Message())
	}
	return err
}

// believe reads the ID of an entry, and refuses one that is not of the shelf or does
// not come after another.
func (s shelf) believe(after volume.ID, text string, parse func(string) (volume.ID, error)) (volume.ID, error) {
	id, err := parse(text)
	if err != nil || id != s.id(id.Name) || id.Name <= after.Name {
		return id, volume.Errorf(volume.ErrUnavailable, "node %q listed %q in pool %s after %q: nothing of the list is used; is its driver ours?", s.node.name, text, s.poolKey, after.Name)
	}
	return id, nil
}

// readToken is the ID in a node's token. It is that of the last entry, or
// comes after it: a list gets on.
func (s shelf) readToken(token string, last volume.ID, entries int, parse func(string) (volume.ID, error)) (string, error) {
	if token == "" {
		return "", nil
	}
	id, err := controllerserver.ParsePoolToken(token)
	if err == nil && entries > 0 && id == last {
		return id.String(), nil
	}
	_, err = s.believe(last, id.String(), parse)
	return id.String(), err
}

// shelves are all that is listed after a token, in order, and the token if it is
// within the first. It fails if that would not be all there is.
func (s *Server) shelves(ctx context.Context, token string, parse func(string) (volume.ID, error)) (rest []shelf, after string, err error) {
	var from volume.ID
	if token != "" {
		if from, err = parse(token); err != nil || from.PoolUUID == "" || !slices.Contains(s.backends, from.Backend) {
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
	var out []shelf
	var refused []error
	for _, key := range ns.pools() {
		n, err := ns.holder(ctx, key)
		if err != nil {
			refused = append(refused, ns.withCommand(err))
		}
		for _, b := range backends {
			if n != nil {
				out = append(out, shelf{key, b, n})
			}
		}
	}
	if len(refused) > 0 {
		return nil, incomplete(refused)
	}
	slices.SortFunc(out, shelf.compare)
	return out, nil
}

// pools are all that are announced, in order.
func (ns *nodes) pools() []poolKey {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(ns.announced), poolKey.compare)
}

// withCommand adds to the refusal of a pool what an administrator can do.
func (ns *nodes) withCommand(err error) error {
	if e, ok := errors.AsType[*ownerError](err); ok {
		return fmt.Errorf("%w. Only if %s: %s", err, e.condition, ns.owners.MoveCommand(e.pool.String(), e.candidate()))
	}
	return err
}

// incomplete says why pools are refused, of the first few.
func incomplete(refused []error) error {
	const most = 5
	var texts []string
	for i, err := range refused {
		if i == most {
			texts = append(texts, fmt.Sprintf("and %d more", len(refused)-most))
			break
		}
		texts = append(texts, err.Error())
	}
	return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: %s", strings.Join(texts, "; "))
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
