package router_test

import (
	"context"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// staged stands for what serves shared pools whose volumes are in use: it refuses to copy
// them until their node has.
type staged struct {
	*shared
	refusal error
	liar    *liar
	nodes   map[string][]string // where volumes are published
}

// copied is nil once the node was asked, which made what is asked for.
func (s *staged) copied(call, name string) error {
	s.note(call, name)
	s.liar.mu.Lock()
	defer s.liar.mu.Unlock()
	if slices.Contains(s.liar.lie.asked, call) && s.liar.lie.refusal == nil {
		return nil
	}
	return s.refusal
}

func (s *staged) ControllerGetVolume(_ context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	nodes, there := s.nodes[req.GetVolumeId()]
	if !there {
		return nil, volume.Errorf(volume.ErrNotFound, "there is none")
	}
	return &csi.ControllerGetVolumeResponse{Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodes}}, nil
}

func (s *staged) CreateSnapshot(_ context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: "the record's"}}, s.copied("create", req.GetName())
}

func (s *staged) CreateVolumeGroupSnapshot(_ context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: &csi.VolumeGroupSnapshot{GroupSnapshotId: "the record's"}}, s.copied("create group", req.GetName())
}

func (s *staged) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: "the record's"}}, s.copied("create volume", req.GetName())
}

var errInUse = status.Error(codes.FailedPrecondition, "it is in use") // as a worker says it

// TestStagedElsewhere: an image of a shared pool that a node has is copied by that node's
// driver, and what the record says is the answer.
func TestStagedElsewhere(t *testing.T) {
	s := &staged{shared: &shared{}, refusal: errInUse}
	s.Services = noPools(t)
	w := newWorld(t, func(o *router.Options) { o.Shared, o.SharedPools = relay.Controller(s), []string{"nas"} })
	liar := w.lie()
	s.liar = liar
	w.know()
	w.hosts["c"] = backendtest.FreeAddress(t) // nobody answers there
	w.hosts["d"] = ""
	w.tell()
	const v, other, nowhere, two, away, stopped, gone = "loop:nas:v", "loop:nas:w", "loop:nas:nowhere", "loop:nas:two", "loop:nas:away", "loop:nas:stopped", "loop:nas:gone"
	s.nodes = map[string][]string{v: {"b"}, other: {"b"}, nowhere: nil, two: {"a", "b"}, away: {"c"}, stopped: {"d"}, gone: {"nobody"}}
	snapshot := func(id string) (string, error) {
		resp, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: id})
		return resp.GetSnapshot().GetSnapshotId(), err
	}
	group := func(ids ...string) func(string) (string, error) {
		return func(id string) (string, error) {
			resp, err := w.group("n", append([]string{id}, ids...)...)
			return resp.GetGroupSnapshotId(), err
		}
	}
	clone := func(id string) (string, error) {
		resp, err := w.CreateVolume(t.Context(), request("n", inPool("nas"), ofVolume(id)))
		return resp.GetVolume().GetVolumeId(), err
	}
	for name, call := range map[string]func(string) (string, error){
		"create": snapshot, "create group": group(), "create group of more": group(other, nowhere), "create volume": clone,
	} {
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
			if name == "create group of more" && (id == nowhere || id == away || id == stopped || id == gone) {
				continue // the others are on another node
			}
			liar.say(func() { liar.lie = lie{} })
			got, err := call(id)
			wantCode(t, err, want.code, want.says)
			if err == nil && got != "the record's" {
				t.Errorf("the answer is %q", got)
			}
			if asked := liar.says("").asked; (len(asked) > 1) != (id == v) {
				t.Errorf("the node was asked %q", asked)
			}
			if t.Failed() {
				t.Fatalf("so ended %s of %s", name, id)
			}
		}
		liar.say(func() { liar.lie = lie{refusal: status.Error(codes.Aborted, "being copied")} })
		_, err := call(v)
		if wantCode(t, err, codes.Aborted, "being copied"); t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	// The controller may be on that node, and not see what is mounted there.
	for _, err := range []error{volume.Errorf(volume.ErrPending, "it is being staged"), status.Error(codes.Aborted, "it is being staged")} {
		s.refusal = err
		liar.say(func() { liar.lie = lie{} })
		if got, err := snapshot(v); err != nil || got != "the record's" {
			t.Errorf("%q, %v", got, err)
		}
	}
	s.refusal = volume.Errorf(volume.ErrUnavailable, "the server is silent")
	liar.say(func() { liar.lie = lie{} })
	_, err := snapshot(v)
	wantCode(t, err, codes.Unavailable, "the server is silent")
	s.refusal = errInUse
	// A group whose volumes are on two nodes has no moment.
	_, err = group(away)(v)
	wantCode(t, err, codes.FailedPrecondition, "it is in use")
}

// TestMemberServesCopies: a node's driver sends on what it is asked of shared pools, and
// nothing else of them.
func TestMemberServesCopies(t *testing.T) {
	s := &staged{shared: &shared{}, refusal: errInUse}
	s.Services = noPools(t)
	w := newWorld(t, func(o *router.Options) { o.Shared, o.SharedPools = relay.Controller(s), []string{"nas"} })
	s.liar = &liar{}
	w.start("a", w.pool("p", "p", "1Gi"))
	w.know()
	const v = "loop:nas:v"
	s.nodes = map[string][]string{v: {"a"}}
	const relayed = `configuration here has no nfs pool "nas"`
	_, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v})
	wantCode(t, err, codes.Unavailable, `node "a"`, relayed)
	_, err = w.group("g", v)
	wantCode(t, err, codes.Unavailable, `node "a"`, relayed)
	_, err = w.CreateVolume(t.Context(), request("copy", inPool("nas"), ofVolume(v)))
	wantCode(t, err, codes.InvalidArgument, `"nas"`) // of the class
	must(t, w.get(w.make("a", "own")))
	_, err = w.CreateVolume(t.Context(), request("own-copy", ofVolume(w.make("a", "own"))))
	must(t, err)
}
