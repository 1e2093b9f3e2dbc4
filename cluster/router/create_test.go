package router_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
)

// TestTopology: a volume is created only on the first preferred node. Without a preferred topology it is created
// on a requisite node.
func TestTopology(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("default", "a", "4Gi"), w.pool("fast", "fast", "4Gi"))
	w.start("b")
	w.updateHostsAndWait()
	onB := "loop:" + w.poolID("b", "default")
	if v := w.mustCreate("v", preferring("b", "a")); v.GetVolumeId() != onB+":v" || nodeOf(v) != "b" {
		t.Errorf("got %v, want a volume in %s", v, onB)
	}
	for name, tc := range map[string]struct {
		changes []change
		code    codes.Code
		text    string
	}{
		"preferred node is full":            {[]change{preferring("b", "a"), sized(2048 * mib)}, codes.ResourceExhausted, `node "b": `},
		"preferred node does not exist":     {[]change{preferring("c", "a")}, codes.ResourceExhausted, `"c", which does not exist`},
		"preferred node has no such pool":   {[]change{preferring("b", "a"), inPool("fast")}, codes.ResourceExhausted, `node "b" has no pool "fast"`},
		"no node has the pool":              {[]change{preferring("b", "a"), inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
		"no node has the pool, no topology": {[]change{inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
		"requisite node does not exist":     {[]change{within("c")}, codes.ResourceExhausted, "no such node"},
		"requisite node is full":            {[]change{within("b"), sized(2048 * mib)}, codes.ResourceExhausted, "required_bytes"},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, w.create("w", tc.changes...), tc.code, tc.text) })
	}
	w.wantVolumes(map[string]int{"a": 0, "fast": 0, "b": 1})
	if id := w.mustCreate("r", within("b", "c")).GetVolumeId(); id != onB+":r" {
		t.Errorf("got %s, want a volume in %s", id, onB)
	}
	wantCode(t, w.send(&csi.ControllerExpandVolumeRequest{VolumeId: onB + ":r", CapacityRange: &csi.CapacityRange{RequiredBytes: 2048 * mib}}), codes.OutOfRange, `node "b": `)
	if id := w.mustCreateOn("a", "w", inPool("fast")); id != "loop:"+w.poolID("a", "fast")+":w" {
		t.Errorf("got %s, want a volume in pool fast", id)
	}
	w.stopDriver("b")
	wantCode(t, w.create("x", within("b", "c")), codes.Unavailable, `"b"`)
}

// TestNoNodeLocalPool: a class without a pool requires a node-local pool. If no node has one, CreateVolume fails
// with INVALID_ARGUMENT instead of RESOURCE_EXHAUSTED.
func TestNoNodeLocalPool(t *testing.T) {
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e"}}
	w := newEmptyCluster(t, func(o *router.Options) { o.SharedPools = []string{nas.Name} })
	w.start("a", nas)
	w.updateHostsAndWait()
	for name, topology := range map[string]change{"preferring": preferring("a"), "within": within("a"), "anywhere": anywhere} {
		t.Run(name, func(t *testing.T) {
			wantCode(t, w.create("v", topology), codes.InvalidArgument, "no pool is the default", `("nas")`)
		})
	}
	if got, err := w.capacity("a"); err != nil || got.GetAvailableCapacity() != 1<<60 {
		t.Errorf("capacity: got %v, %v, want 1 EiB", got, err)
	}
}

// TestMostCapacity: without a topology, the volume is created on the node with the most capacity, a repeated call
// returns the same volume, and nodes that do not answer are not used.
func TestMostCapacity(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	w.start("b", w.pool("default", "b", "2Gi"))
	w.start("c", w.pool("other", "c", "8Gi"))
	w.updateHostsAndWait()
	wantOn := func(node, name string, changes ...change) {
		t.Helper()
		if got := nodeOf(w.mustCreate(name, append(changes, inPool("default"))...)); got != node {
			t.Errorf("volume %s: got node %s, want %s", name, got, node)
		}
	}
	wantOn("b", "big", sized(1600*mib))
	wantOn("b", "big", sized(1600*mib)) // a has more capacity now
	wantOn("a", "second")
	w.wantVolumes(map[string]int{"a": 1, "b": 1, "c": 0})
	wantCode(t, w.create("third", inPool("default"), sized(1024*mib)), codes.ResourceExhausted, "required_bytes")
	w.drivers["b"].Stop(t)
	await(t, "the volume fourth to be created", func() bool {
		err := w.create("fourth", inPool("default"))
		if err != nil {
			wantCode(t, err, codes.Unavailable, `"b"`)
		}
		return err == nil
	})
	wantOn("a", "fourth")
}

// TestNextNode: if the node with the most capacity cannot create the volume, the next node creates it.
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

// TestCapacity: the capacity of all nodes is the sum of their capacities, and a node without the pool has none.
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
		t.Errorf("got %v for node a and %v for node b, want more on b and a minimum size of 300 MiB", onA, onB)
	}
	if all.GetAvailableCapacity() != onA.GetAvailableCapacity()+onB.GetAvailableCapacity() || all.GetMaximumVolumeSize().GetValue() != onB.GetMaximumVolumeSize().GetValue() {
		t.Errorf("all nodes: got %v, want the sum of %v and %v", all, onA, onB)
	}
	for _, at := range []struct{ node, pool string }{{"b", "fast"}, {"c", "default"}} {
		got := capacity(at.node, at.pool)
		if got.GetAvailableCapacity() != 0 || got.GetMaximumVolumeSize() == nil || got.GetMaximumVolumeSize().GetValue() != 0 {
			t.Errorf("pool %s of node %s: got %v, want 0", at.pool, at.node, got)
		}
	}
	w.stopDriver("b")
	for _, node := range []string{"b", ""} {
		_, err := w.capacity(node)
		wantCode(t, err, codes.Unavailable, `"b"`)
	}
	if got := capacity("a", "default"); got.String() != onA.String() {
		t.Errorf("node a while the driver of b is stopped: got %v, want %v", got, onA)
	}
	w.removeHosts("b")
	if got := capacity("", "default"); got.String() != onA.String() {
		t.Errorf("all nodes after b was removed: got %v, want %v", got, onA)
	}
}

// TestCapacityOfInvalidClass: for a class that CreateVolume refuses on every node, the capacity is large enough for
// every claim, so that the scheduler selects a node and the claim gets the error of CreateVolume. A pool that only
// another node has gives a node no capacity.
func TestCapacityOfInvalidClass(t *testing.T) {
	w := newEmptyCluster(t, func(o *router.Options) {
		o.SharedPools = []string{"nas"}
		o.Kinds = append(o.Kinds, disk.Kind)
	})
	w.start("a", w.pool("ssd", "ssd", "1Gi"))
	b := w.fake()
	b.answer(&csi.GetPluginInfoResponse{Manifest: identity.Manifest(
		map[string]string{"nvme": "fedcba98"}, nil, map[string]string{"nvme": "disks"},
	)})
	w.updateHosts()
	await(t, "both nodes", func() bool { _, err := w.capacity(""); return err == nil })
	tests := map[string]struct {
		class map[string]string
		texts []string // of the error of CreateVolume; none if the class is valid
	}{
		"unknown parameter":       {map[string]string{"pol": "ssd"}, []string{"did you mean pool?"}},
		"unknown backend":         {map[string]string{"backend": "lop"}, []string{"did you mean loop?"}},
		"parameter of other kind": {map[string]string{"wipe": "zero"}, []string{"belongs to backend lvm and disk"}},
		"mkfs options":            {map[string]string{"mkfsOptions": "-K"}, []string{"mkfsOptions", "-K"}},
		"unknown pool":            {map[string]string{"pool": "sssd"}, []string{`pool="sssd"`, `"ssd"`, `"nas"`, "did you mean ssd?"}},
		"pool of another kind":    {map[string]string{"backend": "disk", "pool": "ssd"}, []string{"backend disk cannot use", `"nvme"`}},
		"shared pool":             {map[string]string{"backend": "disk", "pool": "nas"}, []string{"backend disk cannot use", `"nvme"`}},
		"unknown export":          {map[string]string{"backend": "nfs", "pool": "ssd"}, []string{"backend nfs cannot use", `"nas"`}},
		"pool of another node":    {map[string]string{"backend": "disk", "pool": "nvme"}, nil},
		"no pool":                 {map[string]string{"backend": "disk"}, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: tc.class, AccessibleTopology: translate.Topology("a")})
			if tc.texts == nil {
				if err != nil || got.GetAvailableCapacity() != 0 {
					t.Errorf("got %v, %v, want 0", got, err)
				}
				wantCode(t, w.create("v", preferring("a"), with(tc.class)), codes.ResourceExhausted, "can be created on another node")
				return
			}
			if err != nil || got.GetAvailableCapacity() != 1<<60 || got.GetMaximumVolumeSize().GetValue() != 1<<60 {
				t.Errorf("got %v, %v, want 1 EiB", got, err)
			}
			wantCode(t, w.create("v", preferring("a"), with(tc.class)), codes.InvalidArgument, tc.texts...)
		})
	}
}

// unconfirmed is a test cluster in which node a still creates the volume v after the call was canceled.
type unconfirmed struct {
	*testCluster
	node  *blocked // the backend of node a
	retry change   // the topology of repeated calls
}

// newUnconfirmed creates the cluster, calls CreateVolume with the topology first, and cancels the call while
// node a is blocked in it.
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

// finish releases node a, which creates the volume.
func (u *unconfirmed) finish() {
	close(u.node.release)
	must(u.t, <-u.node.ended)
}

// finishAndStop releases node a, which creates the volume, and then stops its driver.
func (u *unconfirmed) finishAndStop() {
	u.finish()
	u.drivers["a"].Stop(u.t)
}

// awaitRefusal repeats the call until it fails with the code and the text. If the call succeeds, the test fails.
func (u *unconfirmed) awaitRefusal(want codes.Code, text string) {
	u.t.Helper()
	await(u.t, "error "+text, func() bool {
		err := u.create("v", u.retry)
		if err == nil {
			u.t.Fatal("CreateVolume succeeded, want a refusal")
		}
		return code(err) == want && strings.Contains(err.Error(), text)
	})
}

// awaitVolumeOn repeats the call until it succeeds. The test fails unless the volume is on the node. If that is
// node a, node b must have no volume.
func (u *unconfirmed) awaitVolumeOn(node string) {
	u.t.Helper()
	await(u.t, "CreateVolume to succeed", func() bool {
		resp, err := u.CreateVolume(u.t.Context(), request("v", u.retry))
		if err != nil {
			return false
		}
		if got := nodeOf(resp.GetVolume()); got != node {
			u.t.Errorf("got a volume on node %s, want %s", got, node)
		}
		return true
	})
	if node == "a" {
		u.wantVolumes(map[string]int{"b": 0})
	}
}

// TestUnconfirmedCreate: while a node exists that may have created a volume, or is creating it, the volume is
// created on no other node, even if the repeated call prefers another node.
func TestUnconfirmedCreate(t *testing.T) {
	const mayExist = "may have been created"
	tests := map[string]func(*unconfirmed){
		"node returns": func(u *unconfirmed) {
			u.finishAndStop()
			u.awaitRefusal(codes.Unavailable, mayExist)
			u.start("a", u.pool("default", "a", "2Gi"))
			u.updateHosts()
			u.awaitVolumeOn("a")
		},
		"node removed": func(u *unconfirmed) {
			u.finishAndStop()
			u.awaitRefusal(codes.Unavailable, mayExist)
			u.removeHosts("a")
			u.awaitVolumeOn("b")
		},
		"create pending": func(u *unconfirmed) {
			u.mustCreateOn("a", "other", sized(512*mib)) // b has more capacity now
			u.awaitRefusal(codes.Aborted, "still under way")
			u.finish()
			u.awaitVolumeOn("a")
		},
		"node stops": func(u *unconfirmed) {
			u.awaitRefusal(codes.Aborted, "still under way")
			u.finishAndStop()
			u.awaitRefusal(codes.Unavailable, mayExist)
		},
		"pool closed": func(u *unconfirmed) {
			u.finishAndStop()
			u.start("a", u.closedPool("default", "a"))
			u.updateHosts()
			u.awaitRefusal(codes.Unavailable, "requireMount")
		},
		"node added again": func(u *unconfirmed) {
			u.finishAndStop()
			u.removeHosts("a")
			u.addHost("a")
			u.awaitRefusal(codes.Unavailable, mayExist)
		},
		// A refusal by the router itself does not mean that node a has no volume.
		"other owner": func(u *unconfirmed) {
			u.finish()
			u.replaceOwner("a", "c")
			u.awaitRefusal(codes.Unavailable, `is recorded for node "c", and "a" announces it`)
			u.stopDriver("a")
			for range 3 {
				u.awaitRefusal(codes.Unavailable, `"a"`)
			}
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(newUnconfirmed(t, anywhere, anywhere)) })
		// The repeated call prefers another node.
		t.Run(name+", prefers b", func(t *testing.T) {
			test(newUnconfirmed(t, preferring("a", "b"), preferring("b", "a")))
		})
	}
	t.Run("retry excludes the node", func(t *testing.T) {
		u := newUnconfirmed(t, preferring("a"), preferring("b"))
		u.finish()
		for range 2 {
			u.awaitRefusal(codes.ResourceExhausted, "requisite")
		}
		u.wantVolumes(map[string]int{"a": 1, "b": 0})
	})
	t.Run("excluded node has no volume", func(t *testing.T) {
		u := newUnconfirmed(t, preferring("a"), preferring("b"))
		u.node.release <- errors.New("no volume")
		u.awaitVolumeOn("b")
		u.wantVolumes(map[string]int{"a": 0, "b": 1})
	})
}

// TestPublishedBeforeForwarding: if a node published a volume before a central controller called it, the router's
// unpublish call removes the node's record, so that the volume can be deleted.
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
