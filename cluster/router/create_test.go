package router_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
)

// TestTopology: a volume is created on the first preferred node or not at all; without a
// preference, on a node of requisite.
func TestTopology(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("default", "a", "4Gi"), w.pool("fast", "fast", "4Gi"))
	w.start("b")
	w.updateHostsAndWait()
	onB := "loop:" + w.poolID("b", "default")
	if v := w.mustCreate("v", preferring("b", "a")); v.GetVolumeId() != onB+":v" || nodeOf(v) != "b" {
		t.Errorf("created %v, want it in %s", v, onB)
	}
	for name, tc := range map[string]struct {
		changes []change
		want    codes.Code
		says    string
	}{
		"full":                        {[]change{preferring("b", "a"), sized(2048 * mib)}, codes.ResourceExhausted, ""},
		"no node":                     {[]change{preferring("c", "a")}, codes.ResourceExhausted, `"c", which does not exist`},
		"no pool there":               {[]change{preferring("b", "a"), inPool("fast")}, codes.ResourceExhausted, `node "b" has no pool "fast"`},
		"no pool anywhere":            {[]change{preferring("b", "a"), inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
		"no pool and no preference":   {[]change{inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
		"no node of requisite":        {[]change{within("c")}, codes.ResourceExhausted, "no such node"},
		"the node of requisite, full": {[]change{within("b"), sized(2048 * mib)}, codes.ResourceExhausted, "required_bytes"},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, w.create("w", tc.changes...), tc.want, tc.says) })
	}
	w.wantVolumes(map[string]int{"a": 0, "fast": 0, "b": 1})
	if id := w.mustCreate("r", within("b", "c")).GetVolumeId(); id != onB+":r" {
		t.Errorf("created %s, want it in %s", id, onB)
	}
	if id := w.mustCreateOn("a", "w", inPool("fast")); id != "loop:"+w.poolID("a", "fast")+":w" {
		t.Errorf("created %s, want it in pool fast", id)
	}
	w.stopDriver("b")
	wantCode(t, w.create("x", within("b", "c")), codes.Unavailable, `"b"`)
}

// TestNoNodeLocalPool: a class without a pool means a node-local one. If no node has one,
// the call fails with INVALID_ARGUMENT instead of waiting for capacity.
func TestNoNodeLocalPool(t *testing.T) {
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e"}}
	w := newEmptyCluster(t, func(o *router.Options) { o.SharedPools = []string{nas.Name} })
	w.start("a", nas)
	w.updateHostsAndWait()
	for name, place := range map[string]change{"preferring": preferring("a"), "within": within("a"), "anywhere": anywhere} {
		t.Run(name, func(t *testing.T) {
			wantCode(t, w.create("v", place), codes.InvalidArgument, `("nas") in pool`)
		})
	}
	w.wantNoCapacity("")
}

// TestMostCapacity: without a topology the node with most capacity gets the volume, and a
// repeated call returns the same volume. Nodes that do not answer are left out.
func TestMostCapacity(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	w.start("b", w.pool("default", "b", "2Gi"))
	w.start("c", w.pool("other", "c", "8Gi"))
	w.updateHostsAndWait()
	wantOn := func(node, name string, changes ...change) {
		t.Helper()
		if got := nodeOf(w.mustCreate(name, append(changes, inPool("default"))...)); got != node {
			t.Errorf("%s is on %s, want %s", name, got, node)
		}
	}
	wantOn("b", "big", sized(1600*mib))
	wantOn("b", "big", sized(1600*mib)) // a has more capacity now
	wantOn("a", "second")
	w.wantVolumes(map[string]int{"a": 1, "b": 1, "c": 0})
	wantCode(t, w.create("third", inPool("default"), sized(1024*mib)), codes.ResourceExhausted, "required_bytes")
	w.drivers["b"].Stop(t)
	await(t, "the fourth volume", func() bool {
		err := w.create("fourth", inPool("default"))
		if err != nil {
			wantCode(t, err, codes.Unavailable, `"b"`)
		}
		return err == nil
	})
	wantOn("a", "fourth")
}

// TestNextNode: if the node with most capacity cannot create the volume, the next one does.
func TestNextNode(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	full := w.pool("default", "b", "4Gi")
	full.MaxVolumes = 1
	w.start("b", full)
	w.updateHostsAndWait()
	w.mustCreateOn("b", "first")
	if got := nodeOf(w.mustCreate("second")); got != "a" {
		t.Errorf("created on %s, want a", got)
	}
}

func TestCapacity(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("default", "a", "1Gi"), w.pool("fast", "fast", "512Mi"))
	w.start("b", w.pool("default", "b", "2Gi"))
	w.updateHostsAndWait()
	capacity := func(node, pool string) *csi.GetCapacityResponse {
		t.Helper()
		// external-provisioner sends all parameters of a class.
		req := &csi.GetCapacityRequest{Parameters: map[string]string{"pool": pool, "csi.storage.k8s.io/fstype": "xfs", "csi.storage.k8s.io/node-stage-secret-name": "x"}}
		if node != "" {
			req.AccessibleTopology = translate.Topology(node)
		}
		resp, err := w.GetCapacity(t.Context(), req)
		must(t, err)
		return resp
	}
	onA, onB, all := capacity("a", "default"), capacity("b", "default"), capacity("", "default")
	if onA.GetAvailableCapacity() == 0 || onB.GetAvailableCapacity() <= onA.GetAvailableCapacity() || onA.GetMinimumVolumeSize().GetValue() < 300*mib {
		t.Errorf("a: %v, b: %v", onA, onB)
	}
	if all.GetAvailableCapacity() != onA.GetAvailableCapacity()+onB.GetAvailableCapacity() || all.GetMaximumVolumeSize().GetValue() != onB.GetMaximumVolumeSize().GetValue() {
		t.Errorf("all nodes: %v", all)
	}
	for _, none := range [][2]string{{"b", "fast"}, {"c", "default"}, {"a", "slow"}} {
		got := capacity(none[0], none[1])
		if got.GetAvailableCapacity() != 0 || got.GetMaximumVolumeSize() == nil || got.GetMaximumVolumeSize().GetValue() != 0 {
			t.Errorf("%v: %v", none, got)
		}
	}
	wantCode(t, w.send(&csi.GetCapacityRequest{Parameters: map[string]string{"colour": "red"}}), codes.InvalidArgument, "colour")
	w.stopDriver("b")
	for _, node := range []string{"b", ""} {
		_, err := w.capacity(node)
		wantCode(t, err, codes.Unavailable, `"b"`)
	}
	if got := capacity("a", "default"); got.String() != onA.String() {
		t.Errorf("a, while b is down: %v, want %v", got, onA)
	}
	w.removeHosts("b")
	if got := capacity("", "default"); got.String() != onA.String() {
		t.Errorf("all nodes, without b: %v, want %v", got, onA)
	}
}

// unconfirmed is a test cluster where node a creates the volume v, and the call for it was canceled.
type unconfirmed struct {
	*testCluster
	node  *blocked // a
	retry change   // of the repeated calls
}

func newUnconfirmed(t *testing.T, first, retry change) *unconfirmed {
	t.Helper()
	u := &unconfirmed{newEmptyCluster(t), newBlocked(), retry}
	u.startWith("a", u.node.kind(), u.pool("default", "a", "2Gi"))
	u.start("b", u.pool("default", "b", "1900Mi"))
	u.updateHostsAndWait()
	ctx, cancel := context.WithCancel(t.Context())
	call := make(chan error, 1)
	go func() { call <- u.sendWith(ctx, request("v", first)) }()
	<-u.node.entered
	cancel()
	wantCode(t, <-call, codes.Canceled)
	return u
}

// finish unblocks node a, which creates the volume.
func (u *unconfirmed) finish() {
	close(u.node.release)
	must(u.t, <-u.node.ended)
}

// finishAndDie is finish; then node a's driver stops.
func (u *unconfirmed) finishAndDie() {
	u.finish()
	u.drivers["a"].Stop(u.t)
}

// refused repeats the call until it fails with a code and a text. It never succeeds.
func (u *unconfirmed) refused(want codes.Code, says string) {
	u.t.Helper()
	await(u.t, says, func() bool {
		err := u.create("v", u.retry)
		if err == nil {
			u.t.Fatal("the volume was created again")
		}
		return code(err) == want && strings.Contains(err.Error(), says)
	})
}

// wantOn repeats the call until it succeeds. The volume must be on a node, and on no other.
func (u *unconfirmed) wantOn(node string) {
	u.t.Helper()
	await(u.t, "the volume", func() bool {
		resp, err := u.CreateVolume(u.t.Context(), request("v", u.retry))
		if err != nil {
			return false
		}
		if got := nodeOf(resp.GetVolume()); got != node {
			u.t.Errorf("the volume is on %s, want %s", got, node)
		}
		return true
	})
	if node == "a" {
		u.wantVolumes(map[string]int{"b": 0})
	}
}

// TestUnconfirmedCreate: a volume that a node may have created, or is creating, is created on no other
// node while that node exists, whether or not the repeated call prefers another node.
func TestUnconfirmedCreate(t *testing.T) {
	const unknown = "may have been created"
	tests := map[string]func(*unconfirmed){
		"back": func(u *unconfirmed) {
			u.finishAndDie()
			u.refused(codes.Unavailable, unknown)
			u.start("a", u.pool("default", "a", "2Gi"))
			u.updateHosts()
			u.wantOn("a")
		},
		"removed": func(u *unconfirmed) {
			u.finishAndDie()
			u.refused(codes.Unavailable, unknown)
			u.removeHosts("a")
			u.wantOn("b")
		},
		"under way": func(u *unconfirmed) {
			u.mustCreateOn("a", "other", sized(512*mib)) // b has more capacity now
			u.refused(codes.Aborted, "still under way")
			u.finish()
			u.wantOn("a")
		},
		"dying": func(u *unconfirmed) {
			u.refused(codes.Aborted, "still under way")
			u.finishAndDie()
			u.refused(codes.Unavailable, unknown)
		},
		"no disk": func(u *unconfirmed) {
			u.finishAndDie()
			u.start("a", u.closedPool("default", "a"))
			u.updateHosts()
			u.refused(codes.Unavailable, "requireMount")
		},
		"again": func(u *unconfirmed) {
			u.finishAndDie()
			u.removeHosts("a")
			u.addHost("a")
			u.refused(codes.Unavailable, unknown)
		},
		// The router's refusal to call a node is no answer of the node.
		"disk moved": func(u *unconfirmed) {
			u.finish()
			u.replaceOwner("a", "c")
			u.refused(codes.Unavailable, `is recorded for node "c", and "a" announces it`)
			u.stopDriver("a")
			for range 3 {
				u.refused(codes.Unavailable, `"a"`)
			}
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(newUnconfirmed(t, anywhere, anywhere)) })
		t.Run(name+" elsewhere", func(t *testing.T) {
			test(newUnconfirmed(t, preferring("a", "b"), preferring("b", "a")))
		})
	}
	t.Run("excluded", func(t *testing.T) {
		u := newUnconfirmed(t, preferring("a"), preferring("b"))
		u.finish()
		for range 2 {
			u.refused(codes.ResourceExhausted, "requisite")
		}
		u.wantVolumes(map[string]int{"a": 1, "b": 0})
	})
	t.Run("excluded empty", func(t *testing.T) {
		u := newUnconfirmed(t, preferring("a"), preferring("b"))
		u.node.release <- errors.New("no volume")
		u.wantOn("b")
		u.wantVolumes(map[string]int{"a": 0, "b": 1})
	})
}

// TestPublishedBeforeForwarding: a volume that a node published before a controller called it
// is unpublished on the node too, and can be deleted.
func TestPublishedBeforeForwarding(t *testing.T) {
	w := newEmptyCluster(t)
	a := w.start("a")
	forwarded := a.Options
	a.Stop(t)
	a.Options.Services, a.Options.Config.Forwarding = []string{"controller", "node"}, nil
	a.Restart(t)
	v, err := a.Control.CreateVolume(t.Context(), request("v"))
	must(t, err)
	id := v.GetVolume().GetVolumeId()
	_, err = a.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "a", VolumeCapability: capability()})
	must(t, err)
	a.Stop(t)
	a.Options = forwarded
	a.Restart(t)
	w.updateHostsAndWait()
	wantCode(t, w.delete(id), codes.FailedPrecondition, "published")
	must(t, w.unpublish("a", id))
	must(t, w.delete(id))
}
