package router_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// shared stands for what serves the shared pools: it notes what it is asked for, and
// has a few volumes.
type shared struct {
	controllerserver.Services
	asked   []string
	volumes []string // IDs, in the order in which they are listed
	err     error    // of lists
}

func (s *shared) note(call, of string) { s.asked = append(s.asked, call+" "+of) }

func (s *shared) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	s.note("create", req.GetName())
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: "nfs:nas:" + req.GetName()}}, nil
}

func (s *shared) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{AvailableCapacity: 7}, nil
}

func (s *shared) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	s.note("delete", req.GetVolumeId())
	return &csi.DeleteVolumeResponse{}, nil
}

func (s *shared) ControllerPublishVolume(_ context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	s.note("publish", req.GetVolumeId())
	return &csi.ControllerPublishVolumeResponse{}, nil
}

func (s *shared) ControllerUnpublishVolume(_ context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	s.note("unpublish", req.GetVolumeId())
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (s *shared) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	ids, next, err := s.page(req.GetStartingToken(), req.GetMaxEntries())
	resp := &csi.ListVolumesResponse{NextToken: next}
	for _, id := range ids {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{
			Volume: &csi.Volume{VolumeId: id}, Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: []string{"a"}},
		})
	}
	return resp, err
}

func (s *shared) ControllerListVolumeHealth(_ context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	ids, next, err := s.page(req.GetStartingToken(), req.GetMaxEntries())
	resp := &csi.ControllerListVolumeHealthResponse{NextToken: next}
	for _, id := range ids {
		resp.Entries = append(resp.Entries, &csi.VolumeHealth{VolumeId: id})
	}
	return resp, err
}

// page lists volumes, at most two of a call.
func (s *shared) page(token string, limit int32) ([]string, string, error) {
	i := 0
	if token != "" {
		if i = slices.Index(s.volumes, token) + 1; i == 0 {
			return nil, "", volume.Errorf(volume.ErrStaleToken, "starting_token %q", token)
		}
	}
	end := min(i+int(min(limit, 2)), len(s.volumes))
	if end == len(s.volumes) {
		return s.volumes[i:], "", s.err
	}
	return s.volumes[i:end], s.volumes[end-1], s.err
}

// newSharedWorld has a node a with a pool p, and the shared pool nas.
func newSharedWorld(t *testing.T) (*world, *shared) {
	t.Helper()
	s := &shared{volumes: []string{"loop:nas:x", "nfs:nas:y", "nfs:nas:z"}}
	w := newWorld(t, func(o *router.Options) {
		s.Services = noPools(t)
		o.Shared, o.SharedPools = relay.Controller(s), []string{"nas"}
	})
	return w, s
}

// TestSharedPool: which classes are of shared pools, whether or not it is known which
// nodes there are, and whatever the topology asked for.
func TestSharedPool(t *testing.T) {
	w, s := newSharedWorld(t)
	for name, parameters := range map[string]map[string]string{
		"named":  {"pool": "nas"},
		"nfs":    {"backend": "nfs"},
		"images": {"backend": "loop", "pool": "nas"},
		"direct": {"server": "nas.lan", "share": "/export"},
		"inside": {"backend": "loop", "server": "nas.lan", "share": "/export"},
	} {
		s.asked = nil
		resp, err := w.CreateVolume(t.Context(), request(name, preferring("a"), func(req *csi.CreateVolumeRequest) { req.Parameters = parameters }))
		if err != nil || resp.GetVolume().GetVolumeId() != "nfs:nas:"+name || !slices.Equal(s.asked, []string{"create " + name}) {
			t.Errorf("%s: %v, %v; asked were %q", name, resp, err, s.asked)
		}
		for _, where := range []*csi.Topology{nil, translate.Topology("nowhere")} {
			resp, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: parameters, AccessibleTopology: where})
			if err != nil || resp.GetAvailableCapacity() != 7 {
				t.Errorf("%s: capacity at %v: %v, %v", name, where, resp, err)
			}
		}
	}
	_, err := w.CreateVolume(t.Context(), request("v", func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{"server": "nas.lan"} }))
	wantCode(t, err, codes.InvalidArgument, "share")
	_, err = w.CreateVolume(t.Context(), request("v"))
	wantCode(t, err, codes.Unavailable, "which nodes there are")

	w.start("a", w.pool("p", "p", "1Gi"))
	w.know()
	if id := w.make("a", "v"); !strings.HasPrefix(id, "loop:p.") {
		t.Errorf("a class without a pool: %s", id)
	}
	_, err = w.CreateVolume(t.Context(), request("v", inPool("nsa")))
	wantCode(t, err, codes.InvalidArgument, `pool="nsa"`, `nfs pools of the controller are "nas"`)
}

// TestSharedVolume: calls by the IDs of shared volumes, and by those that are nobody's,
// go to whoever serves them; published they are on any node that there is.
func TestSharedVolume(t *testing.T) {
	w, s := newSharedWorld(t)
	direct, err := volume.DirectPool("fd00::1", "/export/of all")
	must(t, err)
	ids := []string{"nfs:nas:v", "loop:nas:v", "nfs:" + direct + ":v", "static-volume"}
	for _, id := range ids {
		wantCode(t, w.publish("a", id), codes.Unavailable, "which nodes there are")
	}
	w.start("a", w.pool("p", "p", "1Gi"))
	w.know()
	w.hosts["b"] = "" // its driver is not running
	w.tell()
	for _, id := range ids {
		s.asked = nil
		must(t, w.publish("a", id))
		must(t, w.publish("b", id))
		wantCode(t, w.publish("c", id), codes.NotFound, `node_id "c"`)
		must(t, w.unpublish("c", id)) // it may be gone
		_, err := w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
		if want := []string{"publish " + id, "publish " + id, "unpublish " + id, "delete " + id}; !slices.Equal(s.asked, want) {
			t.Errorf("asked were %q, want %q", s.asked, want)
		}
	}
	_, err = w.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: ids[0], NodeId: "a"})
	wantCode(t, err, codes.InvalidArgument, "volume_capability")
}

// TestSharedPages: pages of every size have each volume of nodes and of shared pools
// once, and a list that is not whole is none.
func TestSharedPages(t *testing.T) {
	w, s := newSharedWorld(t)
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.know()
	var ids []string
	for i := range 3 {
		ids = append(ids, w.make("a", fmt.Sprintf("v-%d", i), inPool("p")))
	}
	ids = append(ids, s.volumes...)
	for size := range int32(len(ids) + 2) {
		if got, err := w.list(size); err != nil || !slices.Equal(got, ids) {
			t.Errorf("by pages of %d: %q, %v", size, got, err)
		}
		if got, err := w.listHealth(size); err != nil || !slices.Equal(got, s.volumes) { // the others are healthy
			t.Errorf("health by pages of %d: %q, %v", size, got, err)
		}
	}
	_, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: "shared nonsense"})
	wantCode(t, err, codes.Aborted, "starting_token")
	_, err = w.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: s.volumes[1]})
	wantCode(t, err, codes.Aborted, "starting_token")

	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range resp.GetEntries() {
		if e.GetStatus() != nil {
			t.Errorf("%s: %v, which is not advertised", e.GetVolume().GetVolumeId(), e.GetStatus())
		}
	}
	s.err = volume.Errorf(volume.ErrUnavailable, "nas.lan is silent")
	_, err = w.list(0)
	wantCode(t, err, codes.Unavailable, "nas.lan is silent")
}

// TestSharedWithoutNodes: a cluster may have shared pools alone.
func TestSharedWithoutNodes(t *testing.T) {
	w, s := newSharedWorld(t)
	w.tell()
	if got, err := w.list(0); err != nil || !slices.Equal(got, s.volumes) {
		t.Errorf("listed are %q, %v", got, err)
	}
}

func (w *world) listHealth(pageSize int32) ([]string, error) {
	var ids []string
	for token := ""; ; {
		resp, err := w.ControllerListVolumeHealth(w.t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: pageSize, StartingToken: token})
		if err != nil {
			return nil, err
		}
		for _, e := range resp.GetEntries() {
			ids = append(ids, e.GetVolumeId())
		}
		if token = resp.GetNextToken(); token == "" {
			return ids, nil
		}
	}
}
