package router_test

import (
	"context"
	"crypto/x509"
	"net"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// fakeNode is a node's driver with a valid certificate. A test sets its responses; the default is an empty
// response.
type fakeNode struct {
	relay.Service // nil: Stream is not implemented

	mu        sync.Mutex
	answers   map[string]proto.Message // responses by type name
	refused   []string                 // methods that fail with the error refusal
	refusal   error
	calls     []string // methods of the calls, without GetPluginInfo
	manifests int      // number of GetPluginInfo calls
}

// fakeVolume is a volume in the pool that a new fakeNode announces.
var fakeVolume = volume.ID{Backend: "loop", Pool: "default", PoolUUID: "fedcba98", Name: "v"}

// fake starts a fakeNode as node b.
func (w *testCluster) fake() *fakeNode {
	w.t.Helper()
	dir := w.t.TempDir()
	w.Certify(w.t, dir, pki.NodeURI(backendtest.DriverName, "b"), x509.ExtKeyUsageServerAuth)
	config := pki.OpenDirectory(dir).Server(pki.ControllerURI(backendtest.DriverName))
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	f := &fakeNode{}
	f.announce(map[string]string{"default": fakeVolume.PoolUUID})
	relay.Register(server, f, append(relay.ControllerServices, &csi.Identity_ServiceDesc)...)
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
	w.addresses["b"] = port.Addr().String()
	w.hosts["b"] = w.addresses["b"]
	return f
}

func (f *fakeNode) Call(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := path.Base(method)
	if name == "GetPluginInfo" {
		f.manifests++
	} else {
		f.calls = append(f.calls, name)
	}
	if slices.Contains(f.refused, name) {
		return nil, f.refusal
	}
	if resp := f.answers[name+"Response"]; resp != nil {
		return resp, nil
	}
	empty, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName("csi.v1." + name + "Response"))
	return empty.New().Interface(), err
}

// answer sets the responses of methods.
func (f *fakeNode) answer(responses ...proto.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.answers == nil {
		f.answers = map[string]proto.Message{}
	}
	for _, r := range responses {
		f.answers[string(r.ProtoReflect().Descriptor().Name())] = r
	}
}

// announce sets the UUIDs of the node's pools by name. All are directories.
func (f *fakeNode) announce(pools map[string]string) {
	kinds := map[string]string{}
	for name := range pools {
		kinds[name] = string(pool.KindDirectory)
	}
	f.answer(&csi.GetPluginInfoResponse{Manifest: identity.Manifest(pools, nil, kinds)})
}

// refuse makes these methods, and no others, fail with err. It clears the recorded calls.
func (f *fakeNode) refuse(err error, methods ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls, f.manifests, f.refused, f.refusal = nil, 0, methods, err
}

// called returns the recorded calls without GetPluginInfo, and the number of GetPluginInfo calls.
func (f *fakeNode) called() ([]string, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls), f.manifests
}

// accessible returns a volume that is accessible from nodes.
func accessible(id string, nodes ...string) *csi.Volume {
	return &csi.Volume{VolumeId: id, AccessibleTopology: topologies(nodes)}
}

// fakeShared is a service for shared pools that contains a few volumes.
type fakeShared struct {
	fakeNode
	ids       []string // recorded calls: "METHOD VOLUME_ID", or "CreateVolume NAME"
	volumes   []string // IDs in the order of ListVolumes
	listError error
}

// newSharedCluster returns a test cluster with the shared pool nas and no nodes.
func newSharedCluster(t *testing.T) (*testCluster, *fakeShared) {
	t.Helper()
	s := &fakeShared{volumes: []string{"loop:nas:x", "nfs:nas:y", "nfs:nas:z"}}
	s.answer(&csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: s.volumes[0]}}, &csi.GetCapacityResponse{AvailableCapacity: 7})
	return newEmptyCluster(t, sharedBy(s)), s
}

// sharedBy makes s the service of the shared pool nas.
func sharedBy(s relay.Service) func(*router.Options) {
	return func(o *router.Options) { o.Shared, o.SharedPools = s, []string{"nas"} }
}

func (s *fakeShared) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	switch req := req.(type) {
	case *csi.ListVolumesRequest:
		ids, next, err := s.page(req.GetStartingToken(), req.GetMaxEntries())
		resp := &csi.ListVolumesResponse{NextToken: next}
		for _, id := range ids {
			resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{
				Volume: &csi.Volume{VolumeId: id}, Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: []string{"a"}},
			})
		}
		return resp, err
	case *csi.ControllerListVolumeHealthRequest:
		ids, next, err := s.page(req.GetStartingToken(), req.GetMaxEntries())
		resp := &csi.ControllerListVolumeHealthResponse{NextToken: next}
		for _, id := range ids {
			resp.Entries = append(resp.Entries, &csi.VolumeHealth{VolumeId: id})
		}
		return resp, err
	case *csi.CreateVolumeRequest:
		s.ids = append(s.ids, "CreateVolume "+req.GetName())
	case interface{ GetVolumeId() string }:
		s.ids = append(s.ids, path.Base(method)+" "+req.GetVolumeId())
	}
	return s.fakeNode.Call(ctx, method, req)
}

// page returns at most limit and at most two volumes after the volume token, and the token of the next page. It
// fails with listError if the test has set it.
func (s *fakeShared) page(token string, limit int32) (ids []string, next string, err error) {
	i := slices.Index(s.volumes, token) + 1
	if token != "" && i == 0 {
		return nil, "", volume.Errorf(volume.ErrStaleToken, "starting_token %q", token)
	}
	end := min(i+int(min(limit, 2)), len(s.volumes))
	if end < len(s.volumes) {
		next = s.volumes[end-1]
	}
	return s.volumes[i:end], next, s.listError
}

// blocked is a backend that blocks Get of the volume "blocked" and Create of the volume "v" until the test
// releases them.
type blocked struct {
	backend.Backend
	entered chan struct{} // receives a value when a call is blocked
	release chan error    // the test sends the result of a blocked call: an error, or nil to let Create continue
	ended   chan error    // receives the results of created volumes and of ended contexts
}

func newBlocked() *blocked {
	return &blocked{entered: make(chan struct{}, 9), release: make(chan error), ended: make(chan error, 9)}
}

// kind returns the kind loop with b as its backend. b passes the other calls to the backend of loop.
func (b *blocked) kind() backend.Kind {
	kind := loop.Kind
	kind.New = func(pools *pool.Set) backend.Backend {
		b.Backend = loop.New(pools)
		return b
	}
	return kind
}

// Get returns the error that the test sends to release, or the error of ctx.
func (b *blocked) Get(ctx context.Context, id volume.ID) (v volume.Volume, err error) {
	if id.Name != "blocked" {
		return b.Backend.Get(ctx, id)
	}
	b.entered <- struct{}{}
	select {
	case err = <-b.release:
	case <-ctx.Done():
		err = ctx.Err()
		b.ended <- err
	}
	return v, err
}

// Create continues when ctx ends, like the creation of an image.
func (b *blocked) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	if spec.CoName != "v" {
		return b.Backend.Create(ctx, spec)
	}
	b.entered <- struct{}{}
	if err := <-b.release; err != nil {
		return volume.Volume{}, err
	}
	v, err := b.Backend.Create(ctx, spec)
	b.ended <- err
	return v, err
}

// blockedGet returns a test cluster with the nodes a and b, and a ControllerGetVolume that is blocked on
// node a. id is the ID of its volume.
func blockedGet(t *testing.T) (w *testCluster, b *blocked, id string, call <-chan error) {
	t.Helper()
	w, b = newEmptyCluster(t), newBlocked()
	w.startWith("a", b.kind())
	w.start("b")
	w.updateHostsAndWait()
	id = "loop:" + w.poolID("a", "default") + ":blocked"
	return w, b, id, w.beginBlocked(t.Context(), b, id)
}

// proxy forwards TCP connections.
type proxy struct {
	listener net.Listener
	target   string
	gate     sync.RWMutex // the proxy transfers no bytes while gate is locked
	// received is the number of bytes from the node. When it reaches cutAt, if that is not 0, all connections end.
	received, cutAt atomic.Int64
	done            sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
}

// proxy starts a proxy to a node, and sets the proxy's address as that of the node. updateHosts passes it to
// the router.
func (w *testCluster) proxy(node string) *proxy {
	w.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(w.t.Context(), "tcp", "127.0.0.1:0")
	must(w.t, err)
	p := &proxy{listener: l, target: w.addresses[node]}
	w.hosts[node] = l.Addr().String()
	p.done.Go(p.accept)
	w.t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.done.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		p.done.Go(func() { p.copy(client, server, &p.received) })
		p.done.Go(func() { p.copy(server, client, new(atomic.Int64)) })
	}
}

// copy transfers bytes in one direction until one of the connections ends, and counts them.
func (p *proxy) copy(to, from net.Conn, count *atomic.Int64) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if total, cutAt := count.Add(int64(n)), p.cutAt.Load(); cutAt > 0 && total >= cutAt {
			p.cut()
			return
		}
		p.gate.RLock()
		_, err = to.Write(buf[:n])
		p.gate.RUnlock()
		if err != nil {
			return
		}
	}
}

// used reports whether the proxy has connections.
func (p *proxy) used() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns) > 0
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}
