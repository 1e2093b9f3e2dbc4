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

// TestSharedClasses: these classes are of shared pools, whether or not the nodes are known,
// and whatever topology is requested.
func TestSharedClasses(t *testing.T) {
	w, s := newSharedCluster(t)
	for name, parameters := range map[string]map[string]string{
		"named":  {"pool": "nas"},
		"nfs":    {"backend": "nfs"},
		"images": {"backend": "loop", "pool": "nas"},
		"direct": {"server": "nas.lan", "share": "/export"},
		"inside": {"backend": "loop", "server": "nas.lan", "share": "/export"},
	} {
		s.ids = nil
		if v := w.mustCreate(name, preferring("a"), with(parameters)); v.GetVolumeId() != s.volumes[0] || !slices.Equal(s.ids, []string{"CreateVolume " + name}) {
			t.Errorf("%s: created %v; calls %q", name, v, s.ids)
		}
		for _, where := range []*csi.Topology{nil, translate.Topology("nowhere")} {
			resp, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: parameters, AccessibleTopology: where})
			if err != nil || resp.GetAvailableCapacity() != 7 {
				t.Errorf("%s: capacity at %v: %v, %v", name, where, resp, err)
			}
		}
	}
	wantCode(t, w.create("v", with(map[string]string{"server": "nas.lan"})), codes.InvalidArgument, "share")
	wantCode(t, w.create("v"), codes.Unavailable, "not known yet")

	w.start("a", w.pool("p", "p", "1Gi"))
	w.updateHostsAndWait()
	if id := w.mustCreateOn("a", "v"); !strings.HasPrefix(id, "loop:p.") {
		t.Errorf("a class without a pool: %s", id)
	}
	wantCode(t, w.create("v", inPool("nsa")), codes.InvalidArgument, `pool="nsa"`, `nfs pools of the controller are "nas"`)
}

// TestSharedVolumes: calls by IDs of shared and of unknown volumes go to the shared service. A
// shared volume can be published to every node that exists.
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
	w.setHost("b", "") // its driver is not running
	for _, id := range ids {
		s.ids = nil
		must(t, w.publish("a", id))
		must(t, w.publish("b", id))
		wantCode(t, w.publish("c", id), codes.NotFound, `node_id "c"`)
		must(t, w.unpublish("c", id)) // the node may have been removed
		must(t, w.delete(id))
		publish := "ControllerPublishVolume " + id
		if want := []string{publish, publish, "ControllerUnpublishVolume " + id, "DeleteVolume " + id}; !slices.Equal(s.ids, want) {
			t.Errorf("calls %q, want %q", s.ids, want)
		}
	}
	wantCode(t, w.send(&csi.ControllerPublishVolumeRequest{VolumeId: ids[0], NodeId: "a"}), codes.InvalidArgument, "volume_capability")
}

// TestSharedPages: pages of every size contain each volume of nodes and of shared pools once, and an
// error of the shared service is an error of the list.
func TestSharedPages(t *testing.T) {
	w, s := newSharedCluster(t)
	w.updateHosts()
	if got, err := w.list(0); err != nil || !slices.Equal(got, s.volumes) {
		t.Errorf("without nodes: %q, %v", got, err)
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
			t.Errorf("pages of %d: %q, %v", size, got, err)
		}
		if got, err := listAll(t.Context(), w, relay.VolumeHealths, size); err != nil || !slices.Equal(got, s.volumes) { // the others are healthy
			t.Errorf("health, pages of %d: %q, %v", size, got, err)
		}
	}
	for _, token := range []string{"shared nonsense", s.volumes[1]} {
		wantCode(t, w.send(&csi.ListVolumesRequest{StartingToken: token}), codes.Aborted, "starting_token")
	}
	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range resp.GetEntries() {
		if e.GetStatus() != nil {
			t.Errorf("%s: %v, which is not advertised", e.GetVolume().GetVolumeId(), e.GetStatus())
		}
	}
	s.listError = volume.Errorf(volume.ErrUnavailable, "nas.lan does not answer")
	wantCode(t, w.listError(), codes.Unavailable, "nas.lan does not answer")
}

// stagedShared refuses to copy volumes until the node where they are staged has copied them.
type stagedShared struct {
	fakeShared
	refusal error
	node    *fakeNode
	nodes   map[string][]string // to which volumes are published
}

// newStagedShared returns a test cluster with the shared pool nas and no nodes.
func newStagedShared(t *testing.T) (*testCluster, *stagedShared) {
	t.Helper()
	s := &stagedShared{refusal: errInUse, node: &fakeNode{}}
	return newEmptyCluster(t, sharedBy(s)), s
}

// errInUse is the refusal of a worker.
var errInUse = status.Error(codes.FailedPrecondition, "it is in use")

const fromRecord = "an ID from the record"

func (s *stagedShared) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	var resp proto.Message
	switch req := req.(type) {
	case *csi.ControllerGetVolumeRequest:
		nodes, exists := s.nodes[req.GetVolumeId()]
		if !exists {
			return nil, volume.Errorf(volume.ErrNotFound, "there is none")
		}
		return &csi.ControllerGetVolumeResponse{Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes}}, nil
	case *csi.CreateSnapshotRequest:
		resp = &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: fromRecord}}
	case *csi.CreateVolumeGroupSnapshotRequest:
		resp = &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: fromRecord}}
	case *csi.CreateVolumeRequest:
		resp = &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: fromRecord}}
	default:
		return s.fakeShared.Call(ctx, method, req)
	}
	if calls, _ := s.node.called(); slices.Contains(calls, path.Base(method)) && s.node.refusal == nil {
		return resp, nil
	}
	return nil, s.refusal
}

// TestStagedVolumes: a volume of a shared pool that is staged on a node is copied by the node's
// driver, and the response is made from the record.
func TestStagedVolumes(t *testing.T) {
	w, s := newStagedShared(t)
	b := w.fake()
	s.node = b
	w.updateHostsAndWait()
	w.setHost("c", backendtest.FreeAddress(t)) // does not answer
	w.setHost("d", "")
	const v, other, nowhere, two, away, stopped, gone = "loop:nas:v", "loop:nas:w", "loop:nas:nowhere", "loop:nas:two", "loop:nas:away", "loop:nas:stopped", "loop:nas:gone"
	s.nodes = map[string][]string{v: {"b"}, other: {"b"}, nowhere: nil, two: {"a", "b"}, away: {"c"}, stopped: {"d"}, gone: {"unknown"}}
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
	const groupOfMore = "group of more"
	for name, call := range map[string]func(string) (string, error){"snapshot": snapshot, "group": group(), groupOfMore: group(other, nowhere), "clone": clone} {
		for id, want := range map[string]struct {
			code codes.Code
			says string
		}{
			v:             {codes.OK, ""},
			nowhere:       {codes.FailedPrecondition, "it is in use"},
			two:           {codes.FailedPrecondition, "it is in use"},
			gone:          {codes.FailedPrecondition, "it is in use"},
			"loop:nas:no": {codes.FailedPrecondition, "it is in use"},
			away:          {codes.Unavailable, `node "c" cannot be reached`},
			stopped:       {codes.Unavailable, `node "d": its driver is not running`},
		} {
			if name == groupOfMore && slices.Contains([]string{nowhere, away, stopped, gone}, id) {
				continue // the other volumes are on another node
			}
			t.Run(name+" of "+id, func(t *testing.T) {
				b.refuse(nil)
				got, err := call(id)
				wantCode(t, err, want.code, want.says)
				if err == nil && got != fromRecord {
					t.Errorf("the response has %q", got)
				}
				if calls, _ := b.called(); (len(calls) > 0) != (id == v) {
					t.Errorf("calls of the node: %q", calls)
				}
			})
		}
		b.refuse(status.Error(codes.Aborted, "being copied"), "CreateSnapshot", "CreateVolumeGroupSnapshot", "CreateVolume")
		_, err := call(v)
		wantCode(t, err, codes.Aborted, "being copied")
	}
	// A controller on that node does not see the mount, only the device.
	for _, refusal := range []error{volume.Errorf(volume.ErrPending, "it is being staged"), status.Error(codes.Aborted, "it is being staged")} {
		s.refusal = refusal
		b.refuse(nil)
		if got, err := snapshot(v); err != nil || got != fromRecord {
			t.Errorf("%q, %v", got, err)
		}
	}
	s.refusal = volume.Errorf(volume.ErrUnavailable, "the server does not answer")
	b.refuse(nil)
	_, err := snapshot(v)
	wantCode(t, err, codes.Unavailable, "the server does not answer")
	s.refusal = errInUse
	// Volumes on two nodes have no common point in time.
	_, err = group(away)(v)
	wantCode(t, err, codes.FailedPrecondition, "it is in use")
}

// TestNodeServesCopies: a node's driver passes calls that copy volumes of shared pools to its
// workers, and no other calls.
func TestNodeServesCopies(t *testing.T) {
	w, s := newStagedShared(t)
	w.start("a", w.pool("p", "p", "1Gi"))
	w.updateHostsAndWait()
	const v = "loop:nas:v"
	s.nodes = map[string][]string{v: {"a"}}
	const relayed = `configuration here has no nfs pool "nas"`
	wantCode(t, w.send(&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v}), codes.Unavailable, `node "a"`, relayed)
	wantCode(t, w.send(groupRequest("g", v)), codes.Unavailable, `node "a"`, relayed)
	wantCode(t, w.create("copy", inPool("nas"), fromVolume(v)), codes.InvalidArgument, `"nas"`) // of the class
	own := w.mustCreateOn("a", "own")
	must(t, w.get(own))
	must(t, w.create("own-copy", fromVolume(own)))
}
