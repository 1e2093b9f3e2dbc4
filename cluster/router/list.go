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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// source is where the entries of a list come from. Node-local pools are listed in the order
// of their UUIDs, which stays the same when a pool moves to another node; a token is the ID
// of the last entry. Shared pools follow, in an order of their own.
type source[E any] struct {
	list relay.List[E]
	// parse reads the ID of an entry.
	parse func(string) (volume.ID, error)
	// edit changes an entry, and verify refuses one of a node; nil: no entry.
	edit   func(E)
	verify func(context.Context, *node, E) error
}

// withoutStatus: LIST_VOLUMES_PUBLISHED_NODES is not advertised.
func withoutStatus(e *csi.ListVolumesResponse_Entry) { e.Status = nil }

// pageCall is a request for one page of a list.
type pageCall interface {
	GetStartingToken() string
	GetMaxEntries() int32
}

// paged makes the serve function of a row that lists.
func paged[E any](from source[E]) func(*Server, context.Context, proto.Message) (proto.Message, error) {
	return func(s *Server, ctx context.Context, req proto.Message) (proto.Message, error) {
		return page(ctx, s, req.(pageCall), from)
	}
}

// page answers with one page.
func page[E any](ctx context.Context, s *Server, req pageCall, from source[E]) (proto.Message, error) {
	entries, next, err := fillPage(ctx, s, req, from)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if from.edit != nil {
			from.edit(e)
		}
	}
	return from.list.Response(entries, next), nil
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

// fillPage takes the entries of one page from the node-local pools and then the shared ones.
func fillPage[E any](ctx context.Context, s *Server, req pageCall, from source[E]) ([]E, string, error) {
	limit, err := paging.Limit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	sections := []paging.Section[E]{localSection(s, from)}
	if len(s.sharedPools) > 0 {
		sections = append(sections, sharedSection(s, from))
	}
	if strings.HasPrefix(req.GetStartingToken(), sharedToken) {
		sections = []paging.Section[E]{sharedSection(s, from)}
	}
	return paging.Fill(ctx, sections, req.GetStartingToken(), min(limit, most), paging.Serial, from.list.ID)
}

// sharedSection lists the shared pools.
func sharedSection[E any](s *Server, from source[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		entries, next, err := from.list.Page(ctx, s.shared, strings.TrimPrefix(token, sharedToken), int32(limit))
		if next != "" {
			next = sharedToken + next
		}
		return entries, next, err
	}
}

// localSection lists the node-local pools, of which each shelf is a section.
func localSection[E any](s *Server, from source[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		shelves, after, err := s.shelves(ctx, token, from.parse)
		if err != nil {
			return nil, "", err
		}
		sections := make([]paging.Section[E], len(shelves))
		for i, shelf := range shelves {
			sections[i] = func(ctx context.Context, after string, limit int) ([]E, string, error) {
				return listShelf(ctx, shelf, after, limit, from)
			}
		}
		return paging.Fill(ctx, sections, after, limit, fanOut, from.list.ID)
	}
}

// listShelf calls the node of a shelf for the entries after an ID, and refuses what is not
// of the shelf or not in order.
func listShelf[E any](ctx context.Context, s shelf, after string, limit int, from source[E]) ([]E, string, error) {
	last := s.id("")
	if after != "" {
		last, _ = from.parse(after) // the ID of an entry of the shelf
	}
	entries, next, err := from.list.Page(ctx, s.node.service, controllerserver.PoolToken(last), int32(limit))
	if err != nil {
		return nil, "", s.failed(ctx, err)
	}
	for _, e := range entries {
		if from.verify != nil {
			err = from.verify(ctx, s.node, e)
		}
		if err == nil {
			last, err = s.verify(last, from.list.ID(e), from.parse)
		}
		if err != nil {
			return nil, "", err
		}
	}
	next, err = s.readToken(next, last, len(entries), from.parse)
	return entries, next, err
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

// verify reads the ID of an entry, and refuses one that is not of the shelf or does not
// come after the one before.
func (s shelf) verify(after volume.ID, text string, parse func(string) (volume.ID, error)) (volume.ID, error) {
	id, err := parse(text)
	if err != nil || id != s.id(id.Name) || id.Name <= after.Name {
		return id, s.node.rejected("listed %q in pool %s after %q", text, s.poolKey, after.Name)
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
	_, err = s.verify(last, id.String(), parse)
	return id.String(), err
}

// shelves are all that is listed after a token, in order, and the token if it is
// within the first. It fails if that would not be all there is.
func (s *Server) shelves(ctx context.Context, token string, parse func(string) (volume.ID, error)) (rest []shelf, after string, err error) {
	var from volume.ID
	if token != "" {
		if from, err = parse(token); err != nil || from.PoolUUID == "" || !slices.Contains(s.kinds.OnNodes().Names(), from.Backend) {
			return nil, "", paging.StaleToken(token)
		}
	}
	shelves, err := s.nodes.shelves(ctx, s.kinds.OnNodes().Names())
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
