package router_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
)

// TestPreferred: a volume is made on the first preferred node, or not at all.
func TestPreferred(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "4Gi"), w.pool("fast", "fast", "4Gi"))
	b := w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	resp, err := w.CreateVolume(t.Context(), request("v", preferring("b", "a")))
	must(t, err)
	v := resp.GetVolume()
	if want := "loop:default." + uuid(t, b, "default") + ":v"; v.GetVolumeId() != want || v.GetAccessibleTopology()[0].String() != translate.Topology("b").String() {
		t.Errorf("%v, want %s on b", v, want)
	}
	for name, tc := range map[string]struct {
		change []func(*csi.CreateVolumeRequest)
		want   codes.Code
		says   string
	}{
		"full":                        {[]func(*csi.CreateVolumeRequest){preferring("b", "a"), sized(2048 * mib)}, codes.ResourceExhausted, ""},
		"gone":                        {[]func(*csi.CreateVolumeRequest){preferring("c", "a")}, codes.ResourceExhausted, `"c", which is gone`},
		"no pool":                     {[]func(*csi.CreateVolumeRequest){preferring("b", "a"), inPool("fast")}, codes.ResourceExhausted, `node "b" has no pool "fast"`},
		"pool nobody":                 {[]func(*csi.CreateVolumeRequest){preferring("b", "a"), inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
		"same, nowhere in particular": {[]func(*csi.CreateVolumeRequest){inPool("slow")}, codes.InvalidArgument, `pool="slow"`},
	} {
		_, err := w.CreateVolume(t.Context(), request("w", tc.change...))
		if wantCode(t, err, tc.want, tc.says); t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	if got := len(w.folders("a")) + len(w.folders("fast")) + len(w.folders("b")); got != 1 {
		t.Errorf("%d volumes were made, asked for was one", got)
	}
	if id := w.make("a", "w", inPool("fast")); id != "loop:fast."+uuid(t, a, "fast")+":w" {
		t.Errorf("in pool fast: %s", id)
	}
}

// TestNoPoolOfANode: a class without a pool means one of a node. Where no node has one
// waiting for room would be in vain.
func TestNoPoolOfANode(t *testing.T) {
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e"}}
	w := newWorld(t, func(o *router.Options) { o.SharedPools = []string{nas.Name} })
	w.start("a", nas)
	w.know()
	for name, place := range map[string]func(*csi.CreateVolumeRequest){
		"preferring": preferring("a"), "within": within("a"), "anywhere": func(*csi.CreateVolumeRequest) {},
	} {
		_, err := w.CreateVolume(t.Context(), request("v", place))
		if wantCode(t, err, codes.InvalidArgument, `("nas") in pool`); t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	if room, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || room.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity: %v, %v", room, err)
	}
}

// TestRequisite: without a preference any node of requisite will do.
func TestRequisite(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "4Gi"))
	b := w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	resp, err := w.CreateVolume(t.Context(), request("v", within("b", "c")))
	must(t, err)
	if want := "loop:default." + uuid(t, b, "default") + ":v"; resp.GetVolume().GetVolumeId() != want {
		t.Errorf("%v, want %s", resp, want)
	}
	_, err = w.CreateVolume(t.Context(), request("w", within("c")))
	wantCode(t, err, codes.ResourceExhausted, "no such node")
	_, err = w.CreateVolume(t.Context(), request("w", within("b"), sized(2048*mib)))
	wantCode(t, err, codes.ResourceExhausted, "required_bytes")
	b.Stop(t)
	w.down("b")
	_, err = w.CreateVolume(t.Context(), request("w", within("b", "c")))
	wantCode(t, err, codes.Unavailable, `"b"`)
}

// TestRoomiest: where nothing is asked for the node with most room has the volume;
// asked again, it is the same one.
func TestRoomiest(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	b := w.start("b", w.pool("default", "b", "2Gi"))
	w.start("c", w.pool("other", "c", "8Gi"))
	w.know()
	create := func(name string, change ...func(*csi.CreateVolumeRequest)) string {
		resp, err := w.CreateVolume(t.Context(), request(name, append(change, inPool("default"))...))
		must(t, err)
		return resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]
	}
	if got := create("big", sized(1600*mib)); got != "b" {
		t.Errorf("the first is on %s", got)
	}
	if got := create("big", sized(1600*mib)); got != "b" { // a has more room now
		t.Errorf("asked for again it is on %s", got)
	}
	if got := create("second"); got != "a" {
		t.Errorf("with b full, the second is on %s", got)
	}
	if got := len(w.folders("a")) + len(w.folders("b")) + len(w.folders("c")); got != 2 {
		t.Errorf("%d volumes, want 2", got)
	}
	_, err := w.CreateVolume(t.Context(), request("third", inPool("default"), sized(1024*mib)))
	wantCode(t, err, codes.ResourceExhausted, "required_bytes")
	b.Stop(t) // a node that does not answer is passed over
	await(t, "the fourth", func() bool {
		_, err := w.CreateVolume(t.Context(), request("fourth", inPool("default")))
		if err != nil {
			wantCode(t, err, codes.Unavailable, `"b"`)
		}
		return err == nil
	})
	if got := create("fourth"); got != "a" {
		t.Errorf("with b down, it is on %s", got)
	}
}

// TestNodeFillsUp: the node with most room may turn out to be full after all.
func TestNodeFillsUp(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	full := w.pool("default", "b", "4Gi")
	full.MaxVolumes = 1
	w.start("b", full)
	w.know()
	w.make("b", "first")
	resp, err := w.CreateVolume(t.Context(), request("second"))
	must(t, err)
	if got := resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]; got != "a" {
		t.Errorf("it is on %s", got)
	}
}

// TestNotKnownYet: as long as nobody has said which nodes there are, nothing is said
// to be missing; a volume can be detached.
func TestNotKnownYet(t *testing.T) {
	w := newWorld(t)
	if w.Ready() {
		t.Error("it is ready")
	}
	const id = "loop:default.01234567:v"
	w.refused("a", id, codes.Unavailable, "not known yet")
	_, err := w.CreateVolume(t.Context(), request("v", preferring("a")))
	wantCode(t, err, codes.Unavailable, "not known yet")
	_, err = w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology("a")})
	wantCode(t, err, codes.Unavailable, "not known yet")
	_, err = w.list(0)
	wantCode(t, err, codes.Unavailable, "not known yet")
	w.tell() // there are none
	if !w.Ready() {
		t.Error("it is not ready")
	}
	w.refused("a", id, codes.FailedPrecondition, "no node has pool default.01234567")
	_, err = w.CreateVolume(t.Context(), request("v"))
	wantCode(t, err, codes.ResourceExhausted)
	if ids, err := w.list(0); err != nil || len(ids) > 0 {
		t.Errorf("a list of nothing: %v, %v", ids, err)
	}
}

func TestCapacity(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"), w.pool("fast", "fast", "512Mi"))
	b := w.start("b", w.pool("default", "b", "2Gi"))
	w.know()
	capacity := func(node, pool string) *csi.GetCapacityResponse {
		t.Helper()
		// As external-provisioner sends it: a class's parameters as they stand there.
		req := &csi.GetCapacityRequest{Parameters: map[string]string{"pool": pool, "csi.storage.k8s.io/fstype": "xfs", "csi.storage.k8s.io/node-stage-secret-name": "x"}}
		if node != "" {
			req.AccessibleTopology = translate.Topology(node)
		}
		resp, err := w.GetCapacity(t.Context(), req)
		must(t, err)
		return resp
	}
	onA, onB := capacity("a", "default"), capacity("b", "default")
	if onA.GetAvailableCapacity() == 0 || onB.GetAvailableCapacity() <= onA.GetAvailableCapacity() || onA.GetMinimumVolumeSize().GetValue() < 300*mib {
		t.Errorf("a: %v, b: %v", onA, onB)
	}
	all := capacity("", "default")
	if all.GetAvailableCapacity() != onA.GetAvailableCapacity()+onB.GetAvailableCapacity() || all.GetMaximumVolumeSize().GetValue() != onB.GetMaximumVolumeSize().GetValue() {
		t.Errorf("of all: %v", all)
	}
	for _, none := range [][2]string{{"b", "fast"}, {"c", "default"}, {"a", "slow"}} {
		got := capacity(none[0], none[1])
		if got.GetAvailableCapacity() != 0 || got.GetMaximumVolumeSize() == nil || got.GetMaximumVolumeSize().GetValue() != 0 {
			t.Errorf("of %v: %v", none, got)
		}
	}
	_, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"colour": "red"}})
	wantCode(t, err, codes.InvalidArgument, "colour")
	b.Stop(t)
	w.down("b")
	for _, where := range []*csi.Topology{translate.Topology("b"), nil} {
		_, err = w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: where})
		wantCode(t, err, codes.Unavailable, `"b"`)
	}
	if got := capacity("a", "default"); got.String() != onA.String() {
		t.Errorf("of a, with b down: %v", got)
	}
	w.forget("b")
	if got := capacity("", "default"); got.String() != onA.String() {
		t.Errorf("of all, with b gone: %v", got)
	}
}

// TestNotAskedYet: a volume is not made a second time because the node that has it was
// not asked yet.
func TestNotAskedYet(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "4Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	id := w.make("b", "v")
	p := proxyTo(t, w.hosts["b"])
	p.gate.Lock()
	w.forget("b")
	w.hosts["b"] = p.address()
	w.tell()
	_, err := w.CreateVolume(t.Context(), request("v"))
	wantCode(t, err, codes.Unavailable, `nodes "b" were not asked yet`)
	p.gate.Unlock()
	w.know()
	resp, err := w.CreateVolume(t.Context(), request("v"))
	if err != nil || resp.GetVolume().GetVolumeId() != id {
		t.Errorf("%v, %v, there is %s", resp, err, id)
	}
}
