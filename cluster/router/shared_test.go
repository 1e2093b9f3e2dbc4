package router_test

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// TestSharedClasses: calls for classes of shared pools go to the shared service, even before the nodes are known,
// and for every requested topology.
func TestSharedClasses(t *testing.T) {
	w, s := newSharedCluster(t)
	for name, parameters := range map[string]map[string]string{
		"pool":              {"pool": "nas"},
		"kind nfs":          {"backend": "nfs"},
		"images":            {"backend": "loop", "pool": "nas"},
		"server and share":  {"server": "nas.lan", "share": "/export"},
		"images on a share": {"backend": "loop", "server": "nas.lan", "share": "/export"},
	} {
		s.ids = nil
		if v := w.mustCreate(name, preferring("a"), with(parameters)); v.GetVolumeId() != s.volumes[0] || !slices.Equal(s.ids, []string{"CreateVolume " + name}) {
			t.Errorf("%s: got volume %v and calls %q, want %s by the shared service", name, v, s.ids, s.volumes[0])
		}
		for _, topology := range []*csi.Topology{nil, translate.Topology("nowhere")} {
			resp, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: parameters, AccessibleTopology: topology})
			if err != nil || resp.GetAvailableCapacity() != 7 {
				t.Errorf("%s: capacity at %v: got %v, %v, want 7", name, topology, resp, err)
			}
		}
	}
	wantCode(t, w.create("v", with(map[string]string{"server": "nas.lan"})), codes.InvalidArgument, "share")
	wantCode(t, w.create("v"), codes.Unavailable, "not known yet")

	w.start("a", w.pool("p", "p", "1Gi"))
	w.updateHostsAndWait()
	if id := w.mustCreateOn("a", "v"); !strings.HasPrefix(id, "loop:p.") {
		t.Errorf("class without a pool: got %s, want a volume in pool p", id)
	}
	wantCode(t, w.create("v", inPool("nsa")), codes.InvalidArgument, `pool="nsa"`, `"nas"`)
}

// TestSharedVolumes: calls for shared volumes and for IDs of other drivers go to the shared service. A shared
// volume can be published to every node that exists.
func TestSharedVolumes(t *testing.T) {
	w, s := newSharedCluster(t)
	direct, err := volume.DirectPool("fd00::1", "/export/of all")
	must(t, err)
	ids := []string{"nfs:nas:v", "loop:nas:v", "nfs:" + direct + ":v", "static-volume"}
	for _, id := range ids {
		wantCode(t, w.publish("a", id), codes.Unavailable, "not known yet")
	}
	w.start("a")
	w.updateHostsAndWait()
	w.setHost("b", "") // the driver of b is not running
	for _, id := range ids {
		s.ids = nil
		must(t, w.publish("a", id))
		must(t, w.publish("b", id))
		wantCode(t, w.publish("c", id), codes.NotFound, `node_id "c"`)
		must(t, w.unpublish("c", id)) // an unpublish call may come after the node was removed
		must(t, w.delete(id))
		publish := "ControllerPublishVolume " + id
		if want := []string{publish, publish, "ControllerUnpublishVolume " + id, "DeleteVolume " + id}; !slices.Equal(s.ids, want) {
			t.Errorf("got calls %q, want %q", s.ids, want)
		}
	}
	wantCode(t, w.send(&csi.ControllerPublishVolumeRequest{VolumeId: ids[0], NodeId: "a"}), codes.InvalidArgument, "volume_capability")
}

// TestSharedPages: pages of every size contain each volume of node-local and shared pools once. If the shared
// service fails, the list fails.
func TestSharedPages(t *testing.T) {
	w, s := newSharedCluster(t)
	w.updateHosts()
	if got, err := w.list(0); err != nil || !slices.Equal(got, s.volumes) {
		t.Errorf("without nodes: got %q, %v, want %q", got, err, s.volumes)
	}
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.updateHostsAndWait()
	var ids []string
	for i := range 3 {
		ids = append(ids, w.mustCreateOn("a", fmt.Sprintf("v-%d", i), inPool("p")))
	}
	ids = append(ids, s.volumes...)
	for size := range int32(len(ids) + 2) {
		if got, err := w.list(size); err != nil || !slices.Equal(got, ids) {
			t.Errorf("pages of %d: got %q, %v, want %q", size, got, err, ids)
		}
		if got, err := listAll(t.Context(), w, relay.VolumeHealths, size); err != nil || !slices.Equal(got, s.volumes) { // the volumes on node a are healthy
			t.Errorf("health, pages of %d: got %q, %v, want %q", size, got, err, s.volumes)
		}
	}
	for _, token := range []string{"shared nonsense", s.volumes[1]} {
		wantCode(t, w.send(&csi.ListVolumesRequest{StartingToken: token}), codes.Aborted, "starting_token")
	}
	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range resp.GetEntries() {
		if e.GetStatus() != nil {
			t.Errorf("volume %s: got status %v, want none, because LIST_VOLUMES_PUBLISHED_NODES is not advertised", e.GetVolume().GetVolumeId(), e.GetStatus())
		}
	}
	s.listError = volume.Errorf(volume.ErrUnavailable, "nas.lan does not answer")
	wantCode(t, w.listError(), codes.Unavailable, "nas.lan does not answer")
}

// stagedShared is a shared service that refuses to copy volumes until the node where they are staged has copied
// them.
type stagedShared struct {
	fakeShared
	refusal error               // the error of a refused call
	node    *fakeNode           // the node where volumes are staged
	nodes   map[string][]string // by volume ID: the nodes to which the volume is published
}

// newStagedShared returns a test cluster with the shared pool nas and no nodes.
func newStagedShared(t *testing.T) (*testCluster, *stagedShared) {
	t.Helper()
	s := &stagedShared{refusal: errInUse, node: &fakeNode{}}
	return newEmptyCluster(t, sharedBy(s)), s
}

// errInUse is the error of the shared service for a staged volume.
var errInUse = status.Error(codes.FailedPrecondition, "it is in use")

// recordedID is the ID of each copy that stagedShared returns.
const recordedID = "an ID from the record"

func (s *stagedShared) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	var resp proto.Message
	switch req := req.(type) {
	case *csi.ControllerGetVolumeRequest:
		nodes, exists := s.nodes[req.GetVolumeId()]
		if !exists {
			return nil, volume.Errorf(volume.ErrNotFound, "no such volume")
		}
		return &csi.ControllerGetVolumeResponse{Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes}}, nil
	case *csi.CreateSnapshotRequest:
		resp = &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: recordedID}}
	case *csi.CreateVolumeGroupSnapshotRequest:
		resp = &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: recordedID}}
	case *csi.CreateVolumeRequest:
		resp = &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: recordedID}}
	default:
		return s.fakeShared.Call(ctx, method, req)
	}
	if calls, _ := s.node.called(); slices.Contains(calls, path.Base(method)) && s.node.refusal == nil {
		return resp, nil
	}
	return nil, s.refusal
}

// TestStagedVolumes: if a volume of a shared pool is staged on a node, the node's driver copies it, and the
// response comes from the shared service.
func TestStagedVolumes(t *testing.T) {
	w, s := newStagedShared(t)
	b := w.fake()
	s.node = b
	w.updateHostsAndWait()
	w.setHost("c", backendtest.FreeAddress(t))
	w.setHost("d", "")
	const (
		staged, alsoStaged = "loop:nas:v", "loop:nas:w" // on node b
		unpublished        = "loop:nas:unpublished"
		onTwoNodes         = "loop:nas:on-two-nodes"
		unreachable        = "loop:nas:unreachable" // on node c, which does not answer
		stopped            = "loop:nas:stopped"     // on node d, whose driver is not running
		onUnknownNode      = "loop:nas:on-unknown-node"
	)
	s.nodes = map[string][]string{staged: {"b"}, alsoStaged: {"b"}, unpublished: nil, onTwoNodes: {"a", "b"}, unreachable: {"c"}, stopped: {"d"}, onUnknownNode: {"unknown"}}
	snapshot := func(id string) (string, error) {
		resp, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: id})
		return resp.GetSnapshot().GetSnapshotId(), err
	}
	group := func(ids ...string) func(string) (string, error) {
		return func(id string) (string, error) {
			resp, err := w.CreateVolumeGroupSnapshot(t.Context(), groupRequest("n", append([]string{id}, ids...)...))
			return resp.GetGroupSnapshot().GetGroupSnapshotId(), err
		}
	}
	clone := func(id string) (string, error) {
		resp, err := w.CreateVolume(t.Context(), request("n", inPool("nas"), fromVolume(id)))
		return resp.GetVolume().GetVolumeId(), err
	}
	const groupOfThree = "group of three"
	for name, call := range map[string]func(string) (string, error){"snapshot": snapshot, "group": group(), groupOfThree: group(alsoStaged, unpublished), "clone": clone} {
		for id, want := range map[string]struct {
			code codes.Code
			text string
		}{
			staged:        {codes.OK, ""},
			unpublished:   {codes.FailedPrecondition, "it is in use"},
			onTwoNodes:    {codes.FailedPrecondition, "it is in use"},
			onUnknownNode: {codes.FailedPrecondition, "it is in use"},
			"loop:nas:no": {codes.FailedPrecondition, "it is in use"}, // ControllerGetVolume fails with NOT_FOUND
			unreachable:   {codes.Unavailable, `node "c" cannot be reached`},
			stopped:       {codes.Unavailable, `node "d": its driver is not running`},
		} {
			if name == groupOfThree && slices.Contains([]string{unpublished, unreachable, stopped, onUnknownNode}, id) {
				continue // the group contains a volume on node b too
			}
			t.Run(name+" of "+id, func(t *testing.T) {
				b.refuse(nil)
				got, err := call(id)
				wantCode(t, err, want.code, want.text)
				if err == nil && got != recordedID {
					t.Errorf("got ID %q, want %q", got, recordedID)
				}
				if calls, _ := b.called(); (len(calls) > 0) != (id == staged) {
					t.Errorf("got calls %q on node b, want calls only for %s", calls, staged)
				}
			})
		}
		b.refuse(status.Error(codes.Aborted, "being copied"), "CreateSnapshot", "CreateVolumeGroupSnapshot", "CreateVolume")
		_, err := call(staged)
		wantCode(t, err, codes.Aborted, "being copied")
	}
	// A controller on node b sees the device but not the mount, as during staging.
	for _, refusal := range []error{volume.Errorf(volume.ErrPending, "it is being staged"), status.Error(codes.Aborted, "it is being staged")} {
		s.refusal = refusal
		b.refuse(nil)
		if got, err := snapshot(staged); err != nil || got != recordedID {
			t.Errorf("refusal %v: got %q, %v, want %q", refusal, got, err, recordedID)
		}
	}
	s.refusal = volume.Errorf(volume.ErrUnavailable, "the server does not answer")
	b.refuse(nil)
	_, err := snapshot(staged)
	wantCode(t, err, codes.Unavailable, "the server does not answer")
	s.refusal = errInUse
	// A group of volumes on two nodes cannot be copied at one point in time.
	_, err = group(unreachable)(staged)
	wantCode(t, err, codes.FailedPrecondition, "it is in use")
}

// TestNodeServesCopies: the router sends calls that copy a staged volume of a shared pool to the volume's node. The
// calls fail, because the node's driver has no such pool.
func TestNodeServesCopies(t *testing.T) {
	w, s := newStagedShared(t)
	w.start("a", w.pool("p", "p", "1Gi"))
	w.updateHostsAndWait()
	const v = "loop:nas:v"
	s.nodes = map[string][]string{v: {"a"}}
	const relayed = `configuration of this driver has no nfs pool "nas"`
	wantCode(t, w.send(&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v}), codes.Unavailable, `node "a"`, relayed)
	wantCode(t, w.send(groupRequest("g", v)), codes.Unavailable, `node "a"`, relayed)
	wantCode(t, w.create("copy", inPool("nas"), fromVolume(v)), codes.InvalidArgument, `"nas"`) // the driver validates the class
	own := w.mustCreateOn("a", "own")
	must(t, w.get(own))
	must(t, w.create("own-copy", fromVolume(own)))
}
