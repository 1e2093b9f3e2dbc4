package controllerserver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// ListVolumes implements csi.ControllerServer. A token names the volume that a
// page ended with, so it stays good when volumes come and go.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	limit, err := pageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	resp := &csi.ListVolumesResponse{}
	resp.NextToken, err = s.walk(ctx, req.GetStartingToken(), limit, func(b backend.Backend, v volume.Volume) (bool, error) {
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
	limit, err := pageLimit(req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	resp := &csi.ControllerListVolumeHealthResponse{}
	resp.NextToken, err = s.walk(ctx, req.GetStartingToken(), limit, func(b backend.Backend, v volume.Volume) (bool, error) {
		conditions := health(ctx, b, v)
		if len(conditions) > 0 {
			resp.Entries = append(resp.Entries, translate.VolumeHealth(v.ID.String(), conditions))
		}
		return len(conditions) > 0, nil
	})
	return resp, err
}

const (
	// maxPage bounds a page where the request does not, well below what a gRPC
	// message holds.
	maxPage = 5000
	// chunk is how many volumes are read at a time, however few are asked for:
	// each reading sorts a whole pool.
	chunk = 256
)

// walk goes through all volumes after the one that token names, until take has
// taken limit of them (0: maxPage), and returns the token for the rest: the ID of
// the last one it looked at.
func (s *Server) walk(ctx context.Context, token string, limit int, take func(backend.Backend, volume.Volume) (bool, error)) (string, error) {
	if limit == 0 || limit > maxPage {
		limit = maxPage
	}
	rest, after, err := s.resume(token)
	if err != nil {
		return "", err
	}
	for len(rest) > 0 {
		b := rest[0]
		volumes, more, err := b.List(ctx, after, max(limit, chunk))
		if err != nil {
			return "", err
		}
		for i, v := range volumes {
			taken, err := take(b, v)
			if err != nil {
				return "", err
			}
			if taken {
				limit--
			}
			after = v.ID
			if last := i == len(volumes)-1 && !more && len(rest) == 1; limit == 0 && !last {
				return after.String(), nil
			}
		}
		if !more {
			rest, after = rest[1:], volume.ID{}
		}
	}
	return "", nil
}

// resume finds the backends that are still to be listed, and the volume after
// which the first of them goes on.
func (s *Server) resume(token string) ([]backend.Backend, volume.ID, error) {
	all := s.backends.All()
	if token == "" {
		return all, volume.ID{}, nil
	}
	id, err := volume.ParseID(token)
	if err == nil {
		for i, b := range all {
			if b.Name() == id.Backend {
				return all[i:], id, nil
			}
		}
	}
	return nil, id, volume.Errorf(volume.ErrStaleToken, "starting_token %q was not made by this driver: list from the beginning", token)
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
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{
		VolumeHealth: translate.VolumeHealth(v.ID.String(), health(ctx, b, v)),
	}, nil
}
