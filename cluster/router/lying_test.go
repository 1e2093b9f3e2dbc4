package router_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// liar is a node's driver with a good certificate that answers what it likes.
type liar struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer

	mu       sync.Mutex
	asked    int // for the manifest
	manifest map[string]string
	volume   *csi.Volume // that it answers with
	listed   []string    // IDs
	token    string
	refusal  error // of lists
	lie      lie
}

// lie starts one, as node b.
func (w *world) lie() *liar {
	w.t.Helper()
	dir := w.t.TempDir()
	w.Certify(w.t, dir, pki.NodeURI(backendtest.DriverName, "b"), x509.ExtKeyUsageServerAuth)
	config := pki.OpenDirectory(dir).Server(pki.ControllerURI(backendtest.DriverName))
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	l := &liar{manifest: identity.Manifest(map[string]string{"default": own.PoolUUID})}
	csi.RegisterIdentityServer(server, l)
	csi.RegisterControllerServer(server, l)
	csi.RegisterGroupControllerServer(server, l)
	port, err := (&net.ListenConfig{}).Listen(w.t.Context(), "tcp", "127.0.0.1:0")
	must(w.t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(port) }()
	w.t.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			w.t.Error(err)
		}
	})
	w.hosts["b"] = port.Addr().String()
	return l
}

// own is a volume of the liar's own pool.
var own = volume.ID{Backend: "loop", Pool: "default", PoolUUID: "fedcba98", Name: "v"}

func (l *liar) say(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

func (l *liar) answer() *csi.Volume {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.volume
}

func (l *liar) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	return &csi.GetPluginInfoResponse{Manifest: l.manifest}, nil
}

func (l *liar) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{}, nil
}

func (l *liar) CreateVolume(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{Volume: l.answer()}, l.says("create volume").refusal
}

func (l *liar) DeleteVolume(context.Context, *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	l.says("delete volume")
	return &csi.DeleteVolumeResponse{}, nil
}

func (l *liar) ControllerGetVolume(context.Context, *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return &csi.ControllerGetVolumeResponse{Volume: l.answer()}, nil
}

func (l *liar) ControllerGetVolumeHealth(context.Context, *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: l.answer().GetVolumeId()}}, nil
}

func (l *liar) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	resp := &csi.ListVolumesResponse{NextToken: l.token}
	if l.token == "same" {
		resp.NextToken = req.GetStartingToken()
	}
	for _, id := range l.listed {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: id}})
	}
	return resp, l.refusal
}

func at(id, node string) *csi.Volume {
	return &csi.Volume{VolumeId: id, AccessibleTopology: []*csi.Topology{translate.Topology(node)}}
}

// TestLies: nothing of an answer that is not the node's to give is passed on.
func TestLies(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	onA := w.make("a", "v")
	liar := w.lie()
	w.know()
	other := own
	other.Name = "w"
	nobody := own
	nobody.PoolUUID = "00000000"
	const rejected = "check which driver runs"
	for name, answer := range map[string]*csi.Volume{
		"nothing":            nil,
		"another's volume":   at(onA, "b"),
		"another's node":     at(own.String(), "a"),
		"two nodes":          {VolumeId: own.String(), AccessibleTopology: topologies([]string{"b", "a"})},
		"no node":            {VolumeId: own.String()},
		"one thing more":     {VolumeId: own.String(), AccessibleTopology: []*csi.Topology{{Segments: map[string]string{translate.TopologyKey: "b", "zone": "z"}}}},
		"another volume":     at(other.String(), "b"),
		"nobody's pool":      at(nobody.String(), "b"),
		"a shared pool":      at("loop:default:v", "b"),
		"what is no ID":      at("v", "b"),
		"a very long ID":     at(strings.Repeat("v", 1<<20), "b"),
		"what was asked for": at(own.String(), "b"),
	} {
		t.Run(name, func(t *testing.T) {
			liar.say(func() { liar.volume = answer })
			created, err := w.CreateVolume(t.Context(), request("v", preferring("b")))
			got, getErr := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: own.String()})
			if name == "what was asked for" {
				if err != nil || getErr != nil || created.GetVolume().GetVolumeId() != own.String() {
					t.Errorf("%v, %v, %v", created, err, getErr)
				}
				return
			}
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			wantCode(t, getErr, codes.Unavailable, `node "b"`, rejected)
			if created != nil || got != nil {
				t.Errorf("passed on: %v, %v", created, got)
			}
			if answer.GetVolumeId() != own.String() {
				_, err = w.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: own.String()})
				wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			}
		})
	}
	must(t, w.get(onA))
}

// TestLyingList: neither another's volumes nor tokens that lead nowhere get into a list.
func TestLyingList(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	onA := w.make("a", "v")
	liar := w.lie()
	w.know()
	if ids, err := w.list(0); err != nil || len(ids) != 1 {
		t.Fatalf("%q, %v", ids, err)
	}
	first := own
	first.Name = "a"
	for name, tc := range map[string]struct {
		ids   []string
		token string
	}{
		"another's volume":       {[]string{onA}, ""},
		"what is no ID":          {[]string{"v"}, ""},
		"twice":                  {[]string{own.String(), own.String()}, ""},
		"backwards":              {[]string{own.String(), first.String()}, ""},
		"a token that is none":   {nil, "garbage"},
		"the token it was given": {nil, "same"},
		"another's token":        {nil, "pool " + onA},
		"a token that goes back": {[]string{own.String()}, controllerserver.PoolToken(first)},
		"over and over":          {[]string{own.String()}, controllerserver.PoolToken(own)},
	} {
		liar.say(func() { liar.listed, liar.token = tc.ids, tc.token })
		ids, err := w.list(0)
		if err == nil || len(ids) > 0 {
			t.Errorf("%s: %q", name, ids)
			continue
		}
		if wantCode(t, err, codes.Unavailable, `node "b"`, "check which driver runs"); t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	// A token made here that a node does not know is not its caller's fault.
	liar.say(func() { liar.refusal = status.Error(codes.Aborted, "what pool?") })
	_, err := w.list(0)
	wantCode(t, err, codes.Unavailable, "incomplete", `node "b"`, "what pool?")
	liar.say(func() { liar.refusal = nil })
	// More than was asked for is cut off, and what is cut off is not lost.
	liar.say(func() { liar.listed, liar.token = []string{first.String(), own.String()}, "" })
	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	if err != nil || len(resp.GetEntries()) != 1 || resp.GetNextToken() == "" {
		t.Errorf("%v, %v", resp, err)
	}
}

// TestLyingManifest: a node that says to have another's pool gets nothing of it; one
// that says what cannot be is not believed, and goes on with what it has.
func TestLyingManifest(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	onA := w.make("a", "v")
	liar := w.lie()
	liar.say(func() {
		liar.manifest = map[string]string{
			"": "", "pool.": "", "pool.default": own.PoolUUID, "pool.A": "01234567", "pool.x": "xxxxxxxx", "pool.y": strings.Repeat("0", 1<<20), "pool.z:": "01234567",
		}
	})
	w.know()
	liar.say(func() { liar.volume = at(own.String(), "b") })
	must(t, w.get(own.String()))
	must(t, w.get(onA))
	address := w.hosts["b"]
	w.forget("b")
	liar.say(func() { liar.manifest = identity.Manifest(map[string]string{"default": uuid(t, a, "default")}) })
	w.hosts["b"] = address
	w.tell()
	w.know()
	must(t, w.publish("a", onA))
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, `recorded for node "a", and "b" announces it`)
}

// TestImpostor: another node that announces the pool of a node that is gone gets no call for it.
// Neither it nor a new controller changes whose pool it is.
func TestImpostor(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	id, pool := w.make("a", "v"), uuid(t, a, "default")
	address := w.hosts["a"]
	w.forget("a")
	liar := w.lie()
	liar.say(func() {
		liar.manifest = identity.Manifest(map[string]string{"default": pool})
		liar.volume = at(id, "b")
	})
	w.tell()
	await(t, "the impostor's manifest", func() bool {
		liar.mu.Lock()
		defer liar.mu.Unlock()
		return liar.asked > 0
	})
	_, err := w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.FailedPrecondition, `"a"`, `"b"`)
	liar.say(func() {
		if len(liar.lie.asked) > 0 {
			t.Errorf("the impostor was called: %q", liar.lie.asked)
		}
	})
	w.hosts["a"] = address
	w.tell()
	await(t, "node a", func() bool { return w.get(id) == nil })
}

// TestManyPools: a node that announces ever more pools fills no record, and others' new
// pools are served.
func TestManyPools(t *testing.T) {
	w := newWorld(t)
	liar := w.lie()
	pools := map[string]string{}
	for i := range 1000 {
		pools[fmt.Sprintf("pool-%d", i)] = fmt.Sprintf("%08x", i)
	}
	liar.say(func() { liar.manifest = identity.Manifest(pools) })
	w.tell()
	await(t, "what is on record", func() bool { return len(w.options.Owners.Known()) > 0 })
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	must(t, w.get(w.make("a", "v")))
	if n := len(w.options.Owners.Known()); n != 101 {
		t.Errorf("%d pools are on record", n)
	}
}

// TestAnothersCertificate: a node is known by its own certificate, not by its address.
func TestAnothersCertificate(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	onA := w.make("a", "v")
	w.hosts["b"] = w.hosts["a"]
	w.tell()
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, `node "b" cannot be reached`, "certificate of spiffe://csi.trivet.dev/node/a, expected is spiffe://csi.trivet.dev/node/b")
	must(t, w.get(onA))
}
