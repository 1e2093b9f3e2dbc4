package controllerserver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// ListVolumes implements csi.ControllerServer. A token names the volume that a
// page ended with, so it stays good when volumes come and go.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	limit, err := PageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	resp := &csi.ListVolumesResponse{}
	resp.NextToken, err = walk(ctx, s.volumes(), req.GetStartingToken(), limit, func(b backend.Backend, v volume.Volume) (bool, error) {
		nodes, err := publishedNodes(ctx, b, v)
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{
			Volume: s.message(v),
			Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: nodes},
		})
		return true, err
	})
	return resp, err
}

// ControllerListVolumeHealth implements csi.ControllerServer: the volumes that
// something is wrong with.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	limit, err := PageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	resp := &csi.ControllerListVolumeHealthResponse{}
	resp.NextToken, err = walk(ctx, s.volumes(), req.GetStartingToken(), limit, func(b backend.Backend, v volume.Volume) (bool, error) {
		conditions := health(ctx, b, v)
		if len(conditions) > 0 {
			resp.Entries = append(resp.Entries, translate.VolumeHealth(v.ID.String(), conditions))
		}
		return len(conditions) > 0, nil
	})
	return resp, err
}

// chunk is how many entries are read at a time, however few are asked for: each
// reading sorts a whole pool.
const chunk = 256

// listing is how one kind of things is listed.
type listing[E any] struct {
	backends []backend.Backend // that have such things
	list     func(b backend.Backend, ctx context.Context, after volume.ID, limit int) (entries []E, more bool, err error)
	id       func(E) volume.ID
	parse    func(string) (volume.ID, error)
}

func (s *Server) volumes() listing[volume.Volume] {
	return listing[volume.Volume]{
		backends: s.backends.All(), list: backend.Backend.List,
		id: func(v volume.Volume) volume.ID { return v.ID }, parse: volume.ParseID,
	}
}

// walk goes through all that is listed after what token names, until take has taken
// limit of it, and returns the token for the rest: the ID of the last one it looked at.
func walk[E any](ctx context.Context, l listing[E], token string, limit int, take func(backend.Backend, E) (bool, error)) (string, error) {
	w, err := l.resume(token)
	if err != nil {
		return "", err
	}
	for len(w.rest) > 0 {
		b := w.rest[0]
		entries, more, err := l.list(b, ctx, w.after, max(limit, chunk))
		if err != nil {
			return "", err
		}
		for i, e := range entries {
			if w.onePool && !samePool(l.id(e), w.after) {
				return "", nil
			}
			taken, err := take(b, e)
			if err != nil {
				return "", err
			}
			if taken {
				limit--
			}
			w.after = l.id(e)
			if last := i == len(entries)-1 && !more && len(w.rest) == 1; limit == 0 && !last {
				return w.token(), nil
			}
		}
		if !more {
			w.rest, w.after = w.rest[1:], volume.ID{}
		}
	}
	return "", nil
}

// walker is how far a walk has come.
type walker struct {
	// rest are the backends that are still to be listed.
	rest []backend.Backend
	// after is where the first of them goes on.
	after volume.ID
	// onePool: the walk ends with the pool of after.
	onePool bool
}

func (w walker) token() string {
	if w.onePool {
		return PoolToken(w.after)
	}
	return w.after.String()
}

func samePool(a, b volume.ID) bool { return a.Pool == b.Pool && a.PoolUUID == b.PoolUUID }

// poolToken begins tokens for one pool.
const poolToken = "pool "

// PoolToken is a starting_token for the volumes or snapshots that one backend has in one
// pool, after one of them; its name may be empty. The driver of the controller lists the
// pools of many nodes with it; the orchestrator gets one for the snapshots of a volume
// alone.
func PoolToken(after volume.ID) string { return poolToken + after.String() }

// ParsePoolToken is the inverse of PoolToken (ErrStaleToken).
func ParsePoolToken(token string) (volume.ID, error) {
	text, ok := strings.CutPrefix(token, poolToken)
	if !ok {
		return volume.ID{}, staleToken(token)
	}
	rest, nameless := strings.CutSuffix(text, ":")
	if nameless {
		text = rest + ":-"
	}
	id, err := volume.ParseSnapshotID(text) // or a volume's
	if err != nil {
		return volume.ID{}, staleToken(token)
	}
	if nameless {
		id.Name = ""
	}
	return id, nil
}

func staleToken(token string) error {
	return volume.Errorf(volume.ErrStaleToken, "starting_token %q was not made by this driver: list from the beginning", token)
}

// resume reads a token.
func (l listing[E]) resume(token string) (walker, error) {
	all := l.backends
	if token == "" {
		return walker{rest: all}, nil
	}
	id, err := ParsePoolToken(token)
	onePool := err == nil
	if !onePool {
		id, err = l.parse(token)
	}
	i := slices.IndexFunc(all, func(b backend.Backend) bool { return b.Name() == id.Backend })
	switch {
	case err != nil || i < 0:
		return walker{}, staleToken(token)
	case onePool:
		return walker{rest: all[i : i+1], after: id, onePool: true}, nil
	}
	return walker{rest: all[i:], after: id}, nil
}

func publishedNodes(ctx context.Context, b backend.Backend, v volume.Volume) ([]string, error) {
	p, ok := b.(backend.Publisher)
	if !ok {
		return nil, nil
	}
	nodes, err := p.PublishedNodes(ctx, v)
	if errors.Is(err, volume.ErrDamaged) { // nobody knows; its calls say so
		return nil, nil
	}
	return nodes, err
}

func health(ctx context.Context, b backend.Backend, v volume.Volume) []backend.Condition {
	if h, ok := b.(backend.HealthChecker); ok {
		return h.Health(ctx, v)
	}
	return nil
}

// ControllerGetVolume implements csi.ControllerServer.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	b, v, err := s.backends.Volume(ctx, req.GetVolumeId())
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
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	b, v, err := s.backends.Volume(ctx, req.GetVolumeId())
	if errors.Is(err, volume.ErrDamaged) {
		v.ID, err = volume.ParseID(req.GetVolumeId())
	}
	if id, invalid := volume.ParseID(req.GetVolumeId()); invalid == nil && id.Shared() && errors.Is(err, volume.ErrUnavailable) {
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
