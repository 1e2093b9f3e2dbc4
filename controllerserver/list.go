package controllerserver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// ListVolumes implements csi.ControllerServer. A token is the ID of the last volume of a
// page, so it stays valid while volumes are created and deleted.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	entries, next, err := page(ctx, s.volumes(), req, func(b backend.Backend, v volume.Volume) (*csi.ListVolumesResponse_Entry, error) {
		nodes, err := publishedNodes(ctx, b, v)
		return &csi.ListVolumesResponse_Entry{
			Volume: s.message(v),
			Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: nodes},
		}, err
	})
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, err
}

// ControllerListVolumeHealth implements csi.ControllerServer: it lists the volumes that have
// a condition.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	entries, next, err := page(ctx, s.volumes(), req, func(b backend.Backend, v volume.Volume) (*csi.VolumeHealth, error) {
		if conditions := health(ctx, b, v); len(conditions) > 0 {
			return translate.VolumeHealth(v.ID.String(), conditions), nil
		}
		return nil, nil
	})
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, err
}

// chunk is the minimum number of objects that are read at a time, because each read sorts a whole pool.
const chunk = 256

// listing lists volumes or snapshots, called objects here.
type listing[O any] struct {
	backends []backend.Backend // that can have such objects
	without  []string          // names of the backends that cannot have such objects
	list     func(b backend.Backend, ctx context.Context, after volume.ID, limit int) (objects []O, more bool, err error)
	id       func(O) volume.ID
	parse    func(string) (volume.ID, error)
}

func (s *Server) volumes() listing[volume.Volume] {
	return listing[volume.Volume]{
		backends: s.backends.All(), list: backend.Backend.List,
		id: func(v volume.Volume) volume.ID { return v.ID }, parse: volume.ParseID,
	}
}

// pageCall is a request for a page of a list.
type pageCall interface {
	GetStartingToken() string
	GetMaxEntries() int32
}

// page returns the entries of the page that a request specifies, and the token of the next page. entry
// returns the entry of an object, or nil to omit the object.
func page[O, E any](ctx context.Context, l listing[O], req pageCall, entry func(backend.Backend, O) (*E, error)) ([]*E, string, error) {
	limit, err := paging.Limit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	return fill(ctx, l, req.GetStartingToken(), limit, entry)
}

// listed is an entry of a page, and the token of the list after it.
type listed[E any] struct {
	entry *E
	token string
}

// fill returns the page of at most limit entries after a token, and the token of the next page. A token is
// the ID of an object, or a result of PoolToken.
func fill[O, E any](ctx context.Context, l listing[O], token string, limit int, entry func(backend.Backend, O) (*E, error)) ([]*E, string, error) {
	backends, err := l.resume(token)
	if err != nil {
		return nil, "", err
	}
	var sections []paging.Section[listed[E]]
	for _, b := range backends {
		sections = append(sections, func(ctx context.Context, token string, limit int) ([]listed[E], string, error) {
			return fillFrom(ctx, l, b, token, limit, entry)
		})
	}
	found, next, err := paging.Fill(ctx, sections, token, limit, paging.Serial, func(e listed[E]) string { return e.token })
	if err != nil {
		return nil, "", err
	}
	var entries []*E
	for _, e := range found {
		entries = append(entries, e.entry)
	}
	return entries, next, nil
}

// fillFrom is the paging.Section of one backend. With a PoolToken it lists only one pool of the backend.
func fillFrom[O, E any](ctx context.Context, l listing[O], b backend.Backend, token string, limit int, entry func(backend.Backend, O) (*E, error)) (found []listed[E], next string, err error) {
	after, onePool, _ := l.position(token) // resume has checked the token
	for {
		objects, more, err := l.list(b, ctx, after, max(limit, chunk))
		if err != nil {
			return nil, "", err
		}
		for i, o := range objects {
			if onePool && !samePool(l.id(o), after) {
				return found, "", nil
			}
			e, err := entry(b, o)
			if err != nil {
				return nil, "", err
			}
			if after, next = l.id(o), l.id(o).String(); onePool {
				next = PoolToken(after)
			}
			if e != nil {
				found = append(found, listed[E]{e, next})
			}
			if end := i == len(objects)-1 && !more; len(found) == limit && !end {
				return found, next, nil
			}
		}
		if !more {
			return found, "", nil
		}
	}
}

// position parses a token. onePool reports whether the list ends with the pool of after.
func (l listing[O]) position(token string) (after volume.ID, onePool bool, err error) {
	if token == "" {
		return volume.ID{}, false, nil
	}
	if after, err = ParsePoolToken(token); err == nil {
		return after, true, nil
	}
	after, err = l.parse(token)
	return after, false, err
}

// resume returns the backends that the list after a token contains, in order.
func (l listing[O]) resume(token string) ([]backend.Backend, error) {
	after, onePool, err := l.position(token)
	if err == nil && token == "" {
		return l.backends, nil
	}
	i := slices.IndexFunc(l.backends, func(b backend.Backend) bool { return b.Name() == after.Backend })
	switch {
	case err == nil && onePool && slices.Contains(l.without, after.Backend):
		return nil, nil // the backend has no such objects, so the list is empty
	case err != nil || i < 0:
		return nil, paging.StaleToken(token)
	case onePool:
		return l.backends[i : i+1], nil
	}
	return l.backends[i:], nil
}

func samePool(a, b volume.ID) bool { return a.Pool == b.Pool && a.PoolUUID == b.PoolUUID }

// poolTokenPrefix begins tokens for one pool.
const poolTokenPrefix = "pool "

// PoolToken returns a starting_token for the volumes or snapshots of one backend in one pool that
// follow an ID; all of them if the name in the ID is empty. The controller's driver lists the pools of
// many nodes with such tokens. An orchestrator receives one only when it lists the snapshots of one
// volume.
func PoolToken(after volume.ID) string { return poolTokenPrefix + after.String() }

// ParsePoolToken is the inverse of PoolToken. It returns ErrStaleToken for every other token.
func ParsePoolToken(token string) (volume.ID, error) {
	text, ok := strings.CutPrefix(token, poolTokenPrefix)
	if !ok {
		return volume.ID{}, paging.StaleToken(token)
	}
	rest, nameless := strings.CutSuffix(text, ":")
	if nameless {
		text = rest + ":-" // ParseSnapshotID requires a name
	}
	id, err := volume.ParseSnapshotID(text) // volume IDs have the same format
	if err != nil {
		return volume.ID{}, paging.StaleToken(token)
	}
	if nameless {
		id.Name = ""
	}
	return id, nil
}

// publishedNodes returns the nodes to which a volume is published. It returns none if the backend does not
// record publications or the record cannot be read.
func publishedNodes(ctx context.Context, b backend.Backend, v volume.Volume) ([]string, error) {
	p, ok := b.(backend.Publisher)
	if !ok {
		return nil, nil
	}
	nodes, err := p.PublishedNodes(ctx, v)
	if errors.Is(err, volume.ErrDamaged) { // the nodes are unknown; calls for the volume return the error
		return nil, nil
	}
	return nodes, err
}

// health returns the conditions of a volume. It returns none if the backend does not check volumes.
func health(ctx context.Context, b backend.Backend, v volume.Volume) []backend.Condition {
	if h, ok := b.(backend.HealthChecker); ok {
		return h.Health(ctx, v)
	}
	return nil
}

// ControllerGetVolume implements csi.ControllerServer.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	b, v, err := s.volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	nodes, err := publishedNodes(ctx, b, v)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: s.message(v),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes},
	}, nil
}

// ControllerGetVolumeHealth implements csi.ControllerServer.
func (s *Server) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	b, v, err := s.volume(ctx, req.GetVolumeId())
	if errors.Is(err, volume.ErrDamaged) { // health reports the damage
		v.ID, err = volume.ParseID(req.GetVolumeId())
	}
	if id, invalid := volume.ParseID(req.GetVolumeId()); invalid == nil && id.Shared() && b != nil && errors.Is(err, volume.ErrUnavailable) {
		return &csi.ControllerGetVolumeHealthResponse{
			VolumeHealth: translate.VolumeHealth(id.String(), []backend.Condition{backend.PoolUnavailable(err)}),
		}, nil
	}
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{
		VolumeHealth: translate.VolumeHealth(v.ID.String(), health(ctx, b, v)),
	}, nil
}
