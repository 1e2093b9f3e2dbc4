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

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// listSpec describes a list. Node-local pools come first, ordered by UUID, so that the order does not change
// when a pool moves to another node. Their token is the ID of the last entry. Shared pools follow in the
// order of their service.
type listSpec[E any] struct {
	relay.List[E]
	// parse parses the ID of an entry.
	parse func(string) (volume.ID, error)
	// verify rejects an entry that a node must not list. If it is nil, only the entry's ID is verified.
	verify func(context.Context, *node, E) error
}

// sharedToken is the prefix of tokens of the shared pools.
const sharedToken = "shared "

// maxPage bounds the entries of a page and of one call to a node. A list keeps up to fanOut*maxPage entries in
// memory.
const maxPage = 1000

func (s *Server) listVolumes(ctx context.Context, req *csi.ListVolumesRequest) (proto.Message, error) {
	resp, err := listPage(ctx, s, req, listSpec[*csi.ListVolumesResponse_Entry]{List: relay.Volumes, parse: volume.ParseID})
	if err != nil {
		return nil, err
	}
	for _, e := range resp.(*csi.ListVolumesResponse).GetEntries() {
		e.Status = nil // LIST_VOLUMES_PUBLISHED_NODES is not advertised
	}
	return resp, nil
}

func (s *Server) listHealth(ctx context.Context, req proto.Message) (proto.Message, error) {
	return listPage(ctx, s, req, listSpec[*csi.VolumeHealth]{List: relay.VolumeHealths, parse: volume.ParseID})
}

// listSnapshots answers ListSnapshots. A request with a filter is sent to the node that has the pool of the
// filter's ID.
func (s *Server) listSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (proto.Message, error) {
	if req.GetSnapshotId() != "" || req.GetSourceVolumeId() != "" {
		return s.callPool(ctx, relay.Snapshots.Method, req)
	}
	return listPage(ctx, s, req, listSpec[*csi.ListSnapshotsResponse_Entry]{
		List: relay.Snapshots, parse: volume.ParseSnapshotID,
		verify: func(ctx context.Context, n *node, e *csi.ListSnapshotsResponse_Entry) error {
			return s.nodes.verifySnapshot(ctx, n, e.GetSnapshot())
		},
	})
}

// listPage returns one page of a list.
func listPage[E any](ctx context.Context, s *Server, req proto.Message, list listSpec[E]) (proto.Message, error) {
	sections := []paging.Section[E]{localSection(s, list)}
	token := req.(interface{ GetStartingToken() string }).GetStartingToken()
	switch {
	case strings.HasPrefix(token, sharedToken):
		sections = []paging.Section[E]{sharedSection(s, list)}
	case len(s.sharedPools) > 0:
		sections = append(sections, sharedSection(s, list))
	}
	return list.Fill(ctx, req, maxPage, sections...)
}

// sharedSection lists the shared pools.
func sharedSection[E any](s *Server, list listSpec[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		entries, next, err := list.Page(ctx, s.shared, strings.TrimPrefix(token, sharedToken), int32(limit))
		if next != "" {
			next = sharedToken + next
		}
		return entries, next, err
	}
}

// localSection lists the node-local pools. Each pool has one section per backend.
func localSection[E any](s *Server, list listSpec[E]) paging.Section[E] {
	return func(ctx context.Context, token string, limit int) ([]E, string, error) {
		parts, after, err := s.partsAfter(ctx, token, list.parse)
		if err != nil {
			return nil, "", err
		}
		sections := make([]paging.Section[E], len(parts))
		for i, p := range parts {
			sections[i] = func(ctx context.Context, after string, limit int) ([]E, string, error) {
				return listPart(ctx, p, after, limit, list)
			}
		}
		return paging.Fill(ctx, sections, after, limit, fanOut, list.ID)
	}
}

// poolPart is the part of a pool that belongs to one backend. The pool's node lists it.
type poolPart struct {
	poolKey
	backend string
	node    *node
}

// id returns the ID of a volume or snapshot in the part.
func (p poolPart) id(name string) volume.ID {
	return volume.ID{Backend: p.backend, Pool: p.name, PoolUUID: p.uuid, Name: name}
}

// compare orders parts by pool, then by backend.
func (p poolPart) compare(o poolPart) int {
	return cmp.Or(p.poolKey.compare(o.poolKey), strings.Compare(p.backend, o.backend))
}

// listPart lists the entries of a part that follow an ID. It rejects entries of other parts and
// entries in the wrong order.
func listPart[E any](ctx context.Context, p poolPart, after string, limit int, list listSpec[E]) ([]E, string, error) {
	last := p.id("")
	if after != "" {
		last, _ = list.parse(after) // the ID of an entry of this part
	}
	entries, next, err := list.Page(ctx, p.node.service, controllerserver.PoolToken(last), int32(limit))
	if err != nil {
		return nil, "", p.listError(ctx, err)
	}
	for _, e := range entries {
		if list.verify != nil {
			err = list.verify(ctx, p.node, e)
		}
		if err == nil {
			last, err = p.verifyNext(last, list.ID(e), list.parse)
		}
		if err != nil {
			return nil, "", err
		}
	}
	next, err = p.readToken(next, last, len(entries), list.parse)
	return entries, next, err
}

// listError returns the error for a failed call. A node that rejects the router's token with ABORTED no
// longer has the pool.
func (p poolPart) listError(ctx context.Context, err error) error {
	if status.Code(err) == codes.Aborted {
		p.node.requestPools(ctx, freshness)
		return incomplete(fmt.Sprintf("node %q does not list pool %s: %s", p.node.name, p.poolKey, status.Convert(err).Message()))
	}
	err = p.node.callError(ctx, err)
	if status.Code(err) == codes.Unavailable {
		return incomplete(status.Convert(err).Message())
	}
	return err
}

// verifyNext parses the ID of an entry. It rejects an ID of another part, and an ID that does not follow
// last.
func (p poolPart) verifyNext(last volume.ID, text string, parse func(string) (volume.ID, error)) (volume.ID, error) {
	id, err := parse(text)
	if err != nil || id != p.id(id.Name) || id.Name <= last.Name {
		return id, p.node.rejected("listed %q in pool %s after %q", text, p.poolKey, last.Name)
	}
	return id, nil
}

// readToken returns the ID in a node's token. It rejects an ID before the last entry and, if there are no
// entries, an ID that does not follow last, because such a list would not end.
func (p poolPart) readToken(token string, last volume.ID, entries int, parse func(string) (volume.ID, error)) (string, error) {
	if token == "" {
		return "", nil
	}
	id, err := controllerserver.ParsePoolToken(token)
	if err == nil && entries > 0 && id == last {
		return id.String(), nil
	}
	_, err = p.verifyNext(last, id.String(), parse)
	return id.String(), err
}

// partsAfter returns the parts that follow a token, in order. If the token is the ID of an entry of the
// first of these parts, after is the token, otherwise after is empty. partsAfter fails if a node or a pool
// is unavailable.
func (s *Server) partsAfter(ctx context.Context, token string, parse func(string) (volume.ID, error)) (rest []poolPart, after string, err error) {
	kinds := s.kinds.OnNodes()
	var from volume.ID
	if token != "" {
		if from, err = parse(token); err != nil || from.PoolUUID == "" || !slices.Contains(kinds.Names(), from.Backend) {
			return nil, "", paging.StaleToken(token)
		}
	}
	parts, err := s.nodes.parts(ctx, kinds)
	if err != nil {
		return nil, "", err
	}
	i, found := slices.BinarySearchFunc(parts, poolPart{poolKey: keyOf(from), backend: from.Backend}, poolPart.compare)
	if found {
		after = token
	}
	return parts[i:], after, nil
}

// parts returns the parts of all pools in order: one for each kind of volume that the pool can contain. It fails if a node or a pool
// is unavailable.
func (ns *nodes) parts(ctx context.Context, kinds backend.Kinds) ([]poolPart, error) {
	all, err := ns.all()
	if err != nil {
		return nil, err
	}
	if err := ns.checkComplete(ctx, all); err != nil {
		return nil, err
	}
	ns.mu.RLock()
	pools := slices.SortedFunc(maps.Keys(ns.announced.open), poolKey.compare)
	ns.mu.RUnlock()
	var parts []poolPart
	var refused []string
	for _, key := range pools {
		n, err := ns.serving(ctx, key)
		if e, ok := errors.AsType[*ownerError](err); ok {
			err = fmt.Errorf("%w. Only if %s: %s", err, e.condition, ns.owners.MoveCommand(key.String(), e.candidate))
		}
		if err != nil {
			refused = append(refused, err.Error())
		}
		if n == nil {
			continue
		}
		v := n.view()
		for _, k := range kinds {
			if v.mayContain(k, key.name) {
				parts = append(parts, poolPart{key, k.Name, n})
			}
		}
	}
	if len(refused) > 0 {
		return nil, incomplete(firstFew(refused, "; "))
	}
	slices.SortFunc(parts, poolPart.compare)
	return parts, nil
}

// incomplete returns the error for a response that would lack nodes or pools.
func incomplete(reason string) error {
	return volume.Errorf(volume.ErrUnavailable, "an answer would be incomplete: %s", reason)
}

// checkComplete fails if a node or a pool is unavailable. It first requests the pools of such nodes again.
func (ns *nodes) checkComplete(ctx context.Context, all []*node) error {
	silent, closed := unavailable(all, "")
	ns.requestPools(ctx, slices.Concat(silent, closed))
	silent, closed = unavailable(all, "")
	switch {
	case len(silent) > 0:
		return incomplete(fmt.Sprintf("no answer from %s: check the driver's pods there", quoted(names(silent))))
	case len(closed) > 0:
		return incomplete(fmt.Sprintf("a pool is not open on %s: check the driver's log there", quoted(names(closed))))
	}
	return nil
}
