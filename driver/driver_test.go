package driver_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { backendtest.Main(m) }

// options returns the options of a driver with a pool in a temporary directory.
func options(t *testing.T, kinds ...backend.Kind) driver.Options {
	t.Helper()
	dir := t.TempDir()
	return driver.Options{
		Endpoint: "unix://" + dir + "/csi.sock", NodeID: "node", StateDir: dir + "/state",
		Name: "csi.trivet.dev", Version: "v0", Services: []string{"controller", "node"},
		Config: driver.Config{
			Pools:             []pool.Config{{Name: "default", Directory: pool.Directory{Path: dir + "/pool"}}},
			MaxVolumesPerNode: 10,
		},
		Kinds: kinds,
	}
}

// stuck is a backend whose Get blocks until the test sends an error to release. Get then returns that error.
type stuck struct {
	backend.Backend
	ignoresContext bool          // Get continues to block after its context has ended
	entered        chan struct{} // receives a value at the start of each Get
	release        chan error
}

func newStuck() *stuck { return &stuck{entered: make(chan struct{}, 9), release: make(chan error)} }

func (s *stuck) kind() backend.Kind {
	kind := loop.Kind
	kind.New = func(*pool.Set) backend.Backend { return s }
	return kind
}
func (s *stuck) Name() string { return "loop" }

func (s *stuck) Get(ctx context.Context, id volume.ID) (volume.Volume, error) {
	s.entered <- struct{}{}
	select {
	case err := <-s.release:
		return volume.Volume{ID: id, Block: true}, err
	case <-s.ended(ctx):
		return volume.Volume{}, ctx.Err()
	}
}

func (s *stuck) ended(ctx context.Context) <-chan struct{} {
	if s.ignoresContext {
		return nil
	}
	return ctx.Done()
}

// stage stages a volume of the stuck backend.
func stage(ctx context.Context, d *backendtest.Driver) error {
	_, err := d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: "loop:default.01234567:v", StagingTargetPath: "/nowhere",
		VolumeCapability: backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	})
	return err
}

// create creates a volume of a kind and a size in MiB.
func create(t *testing.T, d *backendtest.Driver, kind backendtest.Kind, size int64) *csi.Volume {
	t.Helper()
	return createNamed(t, d, "v", kind, size)
}

func createNamed(t *testing.T, d *backendtest.Driver, name string, kind backendtest.Kind, size int64) *csi.Volume {
	t.Helper()
	resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size * mib},
		VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	})
	must(t, err)
	return resp.GetVolume()
}

// wantMetrics fails the test unless /metrics contains the texts.
func wantMetrics(t *testing.T, address string, wants ...string) {
	t.Helper()
	_, page := get(t, address, "/metrics")
	for _, want := range wants {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
}

// TestSecondCallIsAborted: while a call for a volume is running, a second call for the volume and a CreateVolume
// with its name are Aborted.
func TestSecondCallIsAborted(t *testing.T) {
	s := newStuck()
	d := backendtest.StartWith(t, options(t, s.kind()))
	first := make(chan error, 1)
	go func() { first <- stage(t.Context(), d) }()
	<-s.entered
	wantCode(t, stage(t.Context(), d), codes.Aborted, "NodeStageVolume")
	_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v"})
	wantCode(t, err, codes.Aborted)
	s.release <- volume.Errorf(volume.ErrNotFound, "missing")
	wantCode(t, <-first, codes.NotFound)
	go func() { s.release <- volume.Errorf(volume.ErrNotFound, "missing") }()
	wantCode(t, stage(t.Context(), d), codes.NotFound)
}

// TestCodes: each kind of error becomes its gRPC code, with an unchanged message.
func TestCodes(t *testing.T) {
	s := newStuck()
	d := backendtest.StartWith(t, options(t, s.kind()))
	for _, tc := range []struct {
		err  error
		want codes.Code
	}{
		{volume.ErrInvalid, codes.InvalidArgument},
		{volume.ErrNotFound, codes.NotFound},
		{volume.ErrIncompatible, codes.AlreadyExists},
		{volume.ErrOutOfRange, codes.OutOfRange},
		{volume.ErrExhausted, codes.ResourceExhausted},
		{volume.ErrPrecondition, codes.FailedPrecondition},
		{volume.ErrPending, codes.Aborted},
		{volume.ErrStaleToken, codes.Aborted},
		{volume.ErrUnavailable, codes.Unavailable},
		{volume.ErrDamaged, codes.DataLoss},
		{volume.Errorf(volume.ErrUnavailable, "pool: %w", volume.ErrPrecondition), codes.Unavailable},
		{&os.PathError{Op: "write", Path: "/x", Err: syscall.ENOSPC}, codes.ResourceExhausted},
		{&os.PathError{Op: "mkdir", Path: "/x", Err: syscall.EROFS}, codes.FailedPrecondition},
		{&os.PathError{Op: "ioctl", Path: "/x", Err: syscall.EPERM}, codes.FailedPrecondition},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{io.ErrUnexpectedEOF, codes.Internal},
	} {
		go func() { <-s.entered; s.release <- tc.err }()
		err := stage(t.Context(), d)
		if status.Code(err) != tc.want || status.Convert(err).Message() != tc.err.Error() || len(status.Convert(err).Details()) > 0 {
			t.Errorf("error %v: got %v, want code %v with the same message", tc.err, err, tc.want)
		}
	}
}

// TestPanicIsAnError: a call that panics fails with Internal, and the driver continues to serve.
func TestPanicIsAnError(t *testing.T) {
	s := newStuck()
	d := backendtest.StartWith(t, options(t, s.kind()))
	go func() { <-s.entered; s.release <- nil }()
	// Get succeeds. Then the call panics, because stuck does not implement Attach.
	err := stage(t.Context(), d)
	wantCode(t, err, codes.Internal, "panicked")
	if _, err := d.Identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
		t.Errorf("Probe after the panic: %v", err)
	}
}

// TestDrain: the driver ends only after a running call has returned.
func TestDrain(t *testing.T) {
	s := newStuck()
	d := backendtest.StartWith(t, options(t, s.kind()))
	call := make(chan error, 1)
	go func() { call <- stage(t.Context(), d) }()
	<-s.entered
	stopped := make(chan struct{})
	go func() { d.Stop(t); close(stopped) }()
	select {
	case <-stopped:
		t.Fatal("the driver ended during a running call")
	case s.release <- volume.Errorf(volume.ErrNotFound, "missing"):
	}
	wantCode(t, <-call, codes.NotFound)
	<-stopped
}

// TestDrainTimeout: the driver ends although a call hangs.
func TestDrainTimeout(t *testing.T) {
	s := newStuck()
	s.ignoresContext = true
	o := options(t, s.kind())
	o.DrainTime = 100 * time.Millisecond
	d := backendtest.StartWith(t, o)
	call := make(chan error, 1)
	go func() { call <- stage(t.Context(), d) }()
	<-s.entered
	d.Stop(t) // fails the test unless Run returns nil
	s.release <- volume.Errorf(volume.ErrNotFound, "missing")
	if err := <-call; err == nil {
		t.Error("the call succeeded although the driver had ended")
	}
}

// TestSocket: a driver replaces the socket of an ended driver, but not that of a running driver.
func TestSocket(t *testing.T) {
	o := options(t)
	path := strings.TrimPrefix(o.Endpoint, "unix://")
	stale, err := net.Listen("unix", path)
	must(t, err)
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, stale.Close())
	d := backendtest.StartWith(t, o)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: got %v, error %v, want mode 0600", info, err)
	}
	second := options(t)
	second.Endpoint = o.Endpoint
	wantRefused(t, second, "another driver is listening on that socket")
	if _, err := d.Identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
		t.Errorf("Probe of the first driver: %v", err)
	}
}

// wantRefused fails the test unless the driver does not start, with an error that contains the text, and has
// closed the state directory.
func wantRefused(t *testing.T, o driver.Options, says string) {
	t.Helper()
	if err := driver.Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("got error %v, want one with %q", err, says)
	}
	fds, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	for _, fd := range fds {
		if path, err := os.Readlink(fd); err == nil && path == o.StateDir {
			t.Errorf("the state directory %s is still open", path)
		}
	}
}

// TestRunRefuses: the driver refuses invalid options, and a socket path or state directory that is a file.
func TestRunRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	for _, tc := range []struct {
		name   string
		change func(*driver.Options)
		says   string
	}{
		{"no node ID", func(o *driver.Options) { o.NodeID = "" }, "--node-id is missing"},
		{"node ID of 257 bytes", func(o *driver.Options) { o.NodeID = strings.Repeat("n", 257) }, "--node-id has 257 bytes"},
		{"registry of a controller", func(o *driver.Options) { o.Services, o.Registry = []string{"controller"}, "/r" }, `--plugins-registry "/r" is for a driver that serves the node`},
		{"unknown service", func(o *driver.Options) { o.Services = []string{"nodes"} }, `--services "nodes"`},
		{"TCP endpoint", func(o *driver.Options) { o.Endpoint = "tcp://localhost:1" }, "must be unix:///"},
		{"relative endpoint", func(o *driver.Options) { o.Endpoint = "unix://x.sock" }, "must be unix:///"},
		{"missing directory of the socket", func(o *driver.Options) { o.Endpoint = "unix:///nowhere/at/all/csi.sock" }, "its directory does not exist"},
		{"socket is a file", func(o *driver.Options) { o.Endpoint = "unix://" + file }, "is not a socket: remove it"},
		{"state is a file", func(o *driver.Options) { o.StateDir = file }, "--state-dir " + file},
		{"state directory without a writable file", func(o *driver.Options) {
			must(t, os.MkdirAll(filepath.Join(o.StateDir, "usable"), 0o700))
		}, "usable: is a directory: give the driver a directory that it can write"},
		{"no pod UID", func(o *driver.Options) { o.Config.Kubernetes = &driver.Kubernetes{KubeletDir: "/"} }, "POD_UID"},
		{"kubeletDir without pods", func(o *driver.Options) {
			o.Config.Kubernetes, o.PodUID = &driver.Kubernetes{KubeletDir: "/tmp"}, "uid"
		}, `kubernetes.kubeletDir "/tmp"`},
		{"invalid HTTP address", func(o *driver.Options) { o.HTTPAddress = "127.0.0.1:none" }, "--http-address 127.0.0.1:none"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := options(t)
			tc.change(&o)
			wantRefused(t, o, tc.says)
		})
	}
	if b, err := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("the file at the socket path was changed: %q, %v", b, err)
	}
}

// get reads a page of the driver's HTTP server.
func get(t *testing.T, address, path string) (int, string) {
	t.Helper()
	resp, err := http.Get("http://" + address + path)
	must(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp.StatusCode, string(b)
}

// TestHTTP: the HTTP server serves health and metrics, but no profiles.
func TestHTTP(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	_, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: create(t, d, kind, 32).GetVolumeId(), NodeId: o.NodeID, VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	})
	must(t, err)
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(t, o.HTTPAddress, path); code != http.StatusOK || body != "ok\n" {
			t.Errorf("%s: got %d %q, want 200 ok", path, code, body)
		}
	}
	wantMetrics(t, o.HTTPAddress,
		`csi_plugin_operations_seconds_bucket{driver_name="csi.trivet.dev",grpc_status_code="OK",method_name="/csi.v1.Identity/Probe",le="0.0005"}`,
		`trivet_calls_in_flight{`, `trivet_pool_up{pool="default"} 1`, `trivet_pool_promised_bytes{pool="default"} 3.3554432e+07`, `trivet_volumes{backend="loop",pool="default"} 1`, `trivet_pool_published_volumes{pool="default"} 1`,
		`trivet_pool_other_pools_bytes{pool="default"} 0`, `trivet_pool_trash_entries{pool="default"} 0`, `trivet_pool_trash_stuck_entries{pool="default"} 0`,
		`trivet_pool_size_bytes{`, `trivet_pool_used_bytes{`, `trivet_build_info{`)
	if code, _ := get(t, o.HTTPAddress, "/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("/debug/pprof/ with profiles disabled: got status %d, want 404", code)
	}
}

// TestProfilesEnabled: with pprof in the configuration, the HTTP server serves profiles.
func TestProfilesEnabled(t *testing.T) {
	o := options(t)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pprof = true
	backendtest.StartWith(t, o)
	if code, _ := get(t, o.HTTPAddress, "/debug/pprof/cmdline"); code != http.StatusOK {
		t.Errorf("/debug/pprof/cmdline: got status %d, want 200", code)
	}
}

// TestUnusableState: Probe and /healthz fail while the state directory is read-only.
func TestUnusableState(t *testing.T) {
	testenv.RequireRoot(t)
	o := options(t)
	o.StateDir = filepath.Join(testenv.Filesystem(t, "ext4", "64M"), "state")
	o.HTTPAddress = backendtest.FreeAddress(t)
	d := backendtest.StartWith(t, o)
	mnt := filepath.Dir(o.StateDir)
	testenv.Run(t, "mount", "-o", "remount,ro", mnt)
	_, err := d.Identity.Probe(t.Context(), &csi.ProbeRequest{})
	wantCode(t, err, codes.FailedPrecondition, o.StateDir)
	if code, _ := get(t, o.HTTPAddress, "/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("/healthz: got status %d, want 503", code)
	}
}

// TestKubelet: a driver in a pod serves only if its mounts propagate to the node. It does not need the
// API server.
func TestKubelet(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	must(t, os.MkdirAll(filepath.Join(dir, "pods", "uid"), 0o750))
	o := options(t)
	o.PodUID, o.Config.Kubernetes = "uid", &driver.Kubernetes{KubeletDir: dir, StartupTaint: true}
	testenv.Run(t, "mount", "--make-private", dir)
	wantRefused(t, o, "mountPropagation: Bidirectional")
	testenv.Run(t, "mount", "--make-shared", dir)
	d := backendtest.StartWith(t, o)
	if _, err := d.Identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
		t.Errorf("Probe with a shared mount: %v", err)
	}
}

// TestNodeWithoutPools: a driver with an empty list of pools is ready.
func TestNodeWithoutPools(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools = []pool.Config{}
	d := backendtest.StartWith(t, o)
	if answer, err := d.Identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || !answer.GetReady().GetValue() {
		t.Errorf("Probe: got %v, error %v, want ready", answer, err)
	}
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != http.StatusOK {
		t.Errorf("/readyz: got %d %s, want 200", code, body)
	}
	_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "a", VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)}})
	wantCode(t, err, codes.InvalidArgument, "parameter pool is missing")
}

// TestControllerAlone: a controller starts although kubeletDir does not exist.
func TestControllerAlone(t *testing.T) {
	o := options(t)
	o.Services, o.Config.Kubernetes = []string{"controller"}, &driver.Kubernetes{KubeletDir: "/nowhere", StartupTaint: true}
	o.NodeID, o.Config.Pools = "", nil
	o.Config.Forwarding = &driver.Forwarding{Nodes: []driver.ForwardingNode{{Name: "away", Address: "127.0.0.1:1"}}}
	backendtest.StartWith(t, o)
}

// TestLongNodeName: a volume can be created and published on a node whose name has 253 characters.
func TestLongNodeName(t *testing.T) {
	o := options(t, loop.Kind)
	o.NodeID = strings.Repeat("a.", 126) + "b"
	d := backendtest.StartWith(t, o)
	info, err := d.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != o.NodeID {
		t.Fatalf("NodeGetInfo: got %v, error %v, want node ID %s", info, err, o.NodeID)
	}
	c := backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
	v, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, VolumeCapabilities: []*csi.VolumeCapability{c},
		AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{info.GetAccessibleTopology()}},
	})
	must(t, err)
	_, err = d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: v.GetVolume().GetVolumeId(), NodeId: o.NodeID, VolumeCapability: c,
	})
	if err != nil {
		t.Error(err)
	}
}

// TestServices: all drivers of the plugin report the same plugin capabilities.
func TestServices(t *testing.T) {
	c := backendtest.StartCluster(t, []string{t.TempDir() + "/pool"}, loop.Kind)
	alone := backendtest.StartWith(t, options(t, loop.Kind))
	for name, d := range map[string]*backendtest.Driver{"node": c.Nodes[0], "controller": c.Router, "both": alone} {
		caps, err := d.Identity.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
		must(t, err)
		services := 0
		for _, c := range caps.GetCapabilities() {
			switch c.GetService().GetType() {
			case csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS:
				services++
			default:
			}
		}
		if services != 2 {
			t.Errorf("%s: got %v, want CONTROLLER_SERVICE and VOLUME_ACCESSIBILITY_CONSTRAINTS", name, caps)
		}
	}
}

// TestPoolThatCannotBeOpened: a driver whose only pool cannot be opened serves, and reports the pool.
func TestPoolThatCannotBeOpened(t *testing.T) {
	o := options(t)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools[0].RequireMount = true
	d := backendtest.StartWith(t, o)
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "requireMount") {
		t.Errorf("/readyz: got %d %s, want 503 with requireMount", code, body)
	}
	wantMetrics(t, o.HTTPAddress, `trivet_pool_up{pool="default"} 0`)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := d.Identity.Probe(ctx, &csi.ProbeRequest{}); err != nil {
		t.Errorf("Probe: %v", err)
	}
}

// TestFirstCall: a call that arrives while its pool is being opened waits for the pool, and succeeds.
func TestFirstCall(t *testing.T) {
	disks := &disk.Disks{}
	for range 8 {
		device, _, _ := testenv.Disk(t, 16<<20)
		disks.Match = append(disks.Match, device)
	}
	o := options(t, disk.Kind)
	o.Config.Pools = []pool.Config{{Name: "disks", Section: disks}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- driver.Run(ctx, o) }()
	defer func() { cancel(); must(t, <-ended) }()

	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond}}
	conn, err := grpc.NewClient(o.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"), grpc.WithConnectParams(soon))
	must(t, err)
	defer conn.Close()
	_, err = csi.NewControllerClient(conn).CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "first", Parameters: map[string]string{"backend": "disk"},
		VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	}, grpc.WaitForReady(true))
	must(t, err)
}

// TestRegistration: a driver serves its registration socket in the registry, and removes it when it ends.
func TestRegistration(t *testing.T) {
	registry := filepath.Join(t.TempDir(), "registry")
	socket := filepath.Join(registry, backendtest.DriverName+"-reg.sock")
	t.Run("serving", func(t *testing.T) {
		o := backendtest.NewCluster(t).NodeOptions(t, "a", filepath.Join(t.TempDir(), "pool"), loop.Kind)
		o.Config.Forwarding, o.Services, o.Registry = nil, []string{"controller", "node"}, registry
		d := backendtest.StartWith(t, o)
		conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		must(t, err)
		defer conn.Close()
		info, err := registration.NewRegistrationClient(conn).GetInfo(t.Context(), &registration.InfoRequest{})
		must(t, err)
		if info.GetType() != registration.CSIPlugin || info.GetName() != d.Options.Name || "unix://"+info.GetEndpoint() != d.Options.Endpoint {
			t.Errorf("got %v, want CSI plugin %s at %s", info, d.Options.Name, d.Options.Endpoint)
		}
	})
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after the end of the driver: got error %v, want os.ErrNotExist", err)
	}
}

// TestManyMetricsConnections: the number of open connections to the metrics port is limited, and they do not
// block the scraper or calls on the CSI socket.
func TestManyMetricsConnections(t *testing.T) {
	o := options(t)
	o.HTTPAddress = backendtest.FreeAddress(t)
	d := backendtest.StartWith(t, o)
	client := &http.Client{Transport: &http.Transport{}}
	scrape(t, client, o.HTTPAddress)
	for name, request := range map[string]string{
		"nothing sent":         "",
		"idle after a request": "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
		"unfinished headers":   "GET /metrics HTTP/1.1\r\nHost: ",
	} {
		t.Run(name, func(t *testing.T) {
			const connections, limit = 300, 64
			closed := make(chan struct{}, connections)
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
			for range connections {
				conn, err := dialer.DialContext(t.Context(), "tcp", o.HTTPAddress)
				must(t, err)
				t.Cleanup(func() { _ = conn.Close() })
				_, err = io.WriteString(conn, request)
				must(t, err)
				go func() {
					_, _ = io.Copy(io.Discard, conn)
					closed <- struct{}{}
				}()
			}
			await(t, "the server to close the excess connections", func() bool { return len(closed) >= connections-limit })
			if !scrape(t, client, o.HTTPAddress) {
				t.Error("the scraper's connection was closed")
			}
			must(t, probe(t.Context(), d.Identity))
		})
	}
}

// scrape reads the metrics, and reports whether it reused a connection of the client.
func scrape(t *testing.T, client *http.Client, address string) (reused bool) {
	t.Helper()
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	must(t, err)
	resp, err := client.Do(req)
	must(t, err)
	defer func() { _ = resp.Body.Close() }()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n == 0 || resp.StatusCode != http.StatusOK {
		t.Errorf("/metrics: got %d bytes, %s, error %v, want content with 200", n, resp.Status, err)
	}
	return reused
}

// TestDeleteForgotten: a kubelet that was killed between unpublishing and unstaging never unstages the volume.
// Such a volume can be deleted, but a volume that may be in use cannot.
func TestDeleteForgotten(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	testenv.Run(t, "mount", "--make-shared", dir)
	for _, name := range []string{"pods/uid/volumes", "elsewhere", "plugins/kubernetes.io/csi/csi.trivet.dev/other/globalmount"} {
		must(t, os.MkdirAll(filepath.Join(dir, name), 0o750))
	}
	other, pod := filepath.Join(dir, "plugins/kubernetes.io/csi/csi.trivet.dev/other/globalmount"), filepath.Join(dir, "pods/uid/volumes/mount")
	inKubernetes := func(o *driver.Options) {
		o.PodUID, o.Config.Kubernetes = "uid", &driver.Kubernetes{KubeletDir: dir}
	}
	for name, tc := range map[string]struct {
		options  func(*driver.Options)
		kind     backendtest.Kind
		stage    string // the staging path; if it is empty, that of the kubelet
		publish  string // the target path; if it is empty, the volume is not published
		attached bool   // whether the volume is published by the controller
		want     codes.Code
	}{
		"forgotten filesystem":            {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", "", false, codes.OK},
		"forgotten btrfs":                 {inKubernetes, backendtest.Kind{FSType: "btrfs"}, "", "", false, codes.OK},
		"forgotten device":                {inKubernetes, backendtest.Kind{}, "", "", false, codes.OK},
		"published":                       {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", pod, false, codes.FailedPrecondition},
		"published device":                {inKubernetes, backendtest.Kind{}, "", pod, false, codes.FailedPrecondition},
		"attached":                        {inKubernetes, backendtest.Kind{FSType: "ext4"}, "", "", true, codes.FailedPrecondition},
		"staged outside kubeletDir":       {inKubernetes, backendtest.Kind{FSType: "ext4"}, filepath.Join(dir, "elsewhere"), "", false, codes.FailedPrecondition},
		"staged at another volume's path": {inKubernetes, backendtest.Kind{FSType: "ext4"}, other, "", false, codes.FailedPrecondition},
		"not under Kubernetes":            {func(*driver.Options) {}, backendtest.Kind{FSType: "ext4"}, "", "", false, codes.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, loop.Kind)
			tc.options(&o)
			d := backendtest.StartWith(t, o)
			c := tc.kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
			v := create(t, d, tc.kind, 256)
			if tc.stage == "" {
				tc.stage = kube.Kubelet{Dir: dir}.StagingPath(o.Name, v.GetVolumeId())
				must(t, os.MkdirAll(tc.stage, 0o750))
			}
			if tc.attached {
				_, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.GetVolumeId(), NodeId: o.NodeID, VolumeCapability: c})
				must(t, err)
			}
			_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: tc.stage, VolumeCapability: c, VolumeContext: v.GetVolumeContext()})
			must(t, err)
			t.Cleanup(func() { unpublishAndUnstage(t, d, v.GetVolumeId(), tc.stage, tc.publish) })
			if tc.publish != "" {
				_, err = d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: tc.stage, TargetPath: tc.publish, VolumeCapability: c})
				must(t, err)
			}
			_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
			wantCode(t, err, tc.want)
			_, err = d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()})
			if deleted := status.Code(err) == codes.NotFound; deleted != (tc.want == codes.OK) {
				t.Errorf("ControllerGetVolume after DeleteVolume: got error %v, want NotFound: %t", err, tc.want == codes.OK)
			}
		})
	}
}

// TestDeleteHeld: a volume whose image a program has locked cannot be deleted, and the error states how to
// find the program.
func TestDeleteHeld(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	testenv.Run(t, "mount", "--make-shared", dir)
	must(t, os.MkdirAll(filepath.Join(dir, "pods/uid"), 0o750))
	o := options(t, loop.Kind)
	o.PodUID, o.Config.Kubernetes = "uid", &driver.Kubernetes{KubeletDir: dir}
	d := backendtest.StartWith(t, o)
	created := create(t, d, backendtest.Kind{FSType: "ext4"}, 32)
	image, err := os.Open(filepath.Join(o.Config.Pools[0].Directory.Path, "volumes/v/image"))
	must(t, err)
	defer image.Close()
	must(t, syscall.Flock(int(image.Fd()), syscall.LOCK_EX|syscall.LOCK_NB))
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: created.GetVolumeId()})
	wantCode(t, err, codes.FailedPrecondition, "losetup -j "+image.Name())
}

// unpublishAndUnstage does what a kubelet does when a pod ends. publish is empty if the volume is not published.
func unpublishAndUnstage(t *testing.T, d *backendtest.Driver, id, stage, publish string) {
	ctx := context.WithoutCancel(t.Context()) // t.Context has ended when a cleanup function runs
	if publish != "" {
		if _, err := d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: publish}); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: stage}); err != nil {
		t.Error(err)
	}
}
