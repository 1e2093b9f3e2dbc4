package export

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/relay/relaytest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// kinds are the kinds of volumes in these tests.
var kinds = backend.Kinds{loop.Kind, nfs.Kind}

// TestMain runs the tests, and is also the main function of the worker processes that the tests start.
func TestMain(m *testing.M) {
	if isChild, err := reexec.Run(os.Args, map[string]reexec.Role{Role: runFake}); isChild {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}

// fake has the services of a worker process. The name of a volume selects the behaviour of a call.
type fake struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	job Job
}

// runFake is the main function of a worker process.
func runFake(in reexec.Input) error {
	job, err := ReadJob(in.Decode)
	if err != nil {
		return err
	}
	if job.Pool.MaxVolumes == brokenPool {
		return fmt.Errorf("the worker of %s is broken", job.Pool.Name)
	}
	server := grpc.NewServer()
	f := &fake{job: job}
	csi.RegisterControllerServer(server, f)
	csi.RegisterGroupControllerServer(server, f)
	csi.RegisterSnapshotMetadataServer(server, f)
	csi.RegisterIdentityServer(server, f)
	csi.RegisterNodeServer(server, f)
	_ = server.Serve(listen(in.Conn))
	return nil
}

// brokenPool is the maxVolumes of a pool whose worker ends at once.
const brokenPool = 666

func (f *fake) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Manifest: map[string]string{ReportKey: `{"Version": "4.2", "Usage": {"Total": 7}, "Volumes": {"nfs": 3}}`}}, nil
}

func (f *fake) ControllerGetVolume(_ context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	switch {
	case strings.HasSuffix(req.GetVolumeId(), ":none"):
		return nil, status.Error(codes.NotFound, "no such volume")
	case strings.HasSuffix(req.GetVolumeId(), ":busy"):
		return nil, status.Error(codes.Unavailable, "busy")
	}
	f.act(req.GetVolumeId())
	return &csi.ControllerGetVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetVolumeId(), VolumeContext: f.context()}}, nil
}

// context is a volume context that describes the process.
func (f *fake) context() map[string]string {
	return map[string]string{"pid": strconv.Itoa(os.Getpid()), "pool": f.job.Pool.Name, "silent": strconv.FormatBool(!f.job.SilentSince.IsZero())}
}

// act blocks the thread, as a silent server does, or ends the process, if the name in the ID is hang or
// exit.
func (f *fake) act(id string) {
	switch {
	case strings.HasSuffix(id, ":hang"):
		fd, err := syscall.Open(filepath.Join(f.job.StateDir, "fifo"), syscall.O_RDONLY, 0)
		fmt.Fprintln(os.Stderr, "the FIFO was opened:", fd, err)
	case strings.HasSuffix(id, ":exit"):
		fmt.Fprintln(os.Stderr, "it broke")
		os.Exit(7)
	}
}

func (f *fake) CreateVolume(context.Context, *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeContext: f.context()}}, nil
}

func (f *fake) ControllerGetVolumeHealth(_ context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: req.GetVolumeId()}}, nil
}

// ListVolumes lists two volumes.
func (f *fake) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	return listOf(req, "nfs:"+f.job.Pool.Name+":a", "nfs:"+f.job.Pool.Name+":b")
}

// NodeUnstageVolume fails if the process was started while the server was silent.
func (f *fake) NodeUnstageVolume(_ context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	f.act(req.GetVolumeId())
	if f.job.SilentSince.IsZero() {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	return nil, status.Error(codes.Unavailable, "silent since "+f.job.SilentSince.Format(time.RFC3339))
}

// NodeStageVolume returns an error with the name of the pool, which shows which worker answered.
func (f *fake) NodeStageVolume(context.Context, *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return nil, status.Error(codes.DataLoss, f.job.Pool.Name)
}

// local is the service of the driver's own pools, with some volumes.
type local struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	ids []string
}

func (l *local) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	return listOf(req, l.ids...)
}

// listOf returns a page of volumes.
func listOf(req *csi.ListVolumesRequest, ids ...string) (*csi.ListVolumesResponse, error) {
	resp := &csi.ListVolumesResponse{}
	for _, id := range ids {
		if id <= req.GetStartingToken() {
			continue
		}
		if n := len(resp.Entries); n > 0 && n == int(req.GetMaxEntries()) {
			resp.NextToken = resp.Entries[n-1].Volume.VolumeId
			break
		}
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: id}})
	}
	return resp, nil
}

// nfsServer answers the NULL call of NFS, which is a ping, unless it is silent.
type nfsServer struct {
	tb   testing.TB
	port int

	mu       sync.Mutex
	listener net.Listener // nil while connections are refused
	silent   bool
	conns    []net.Conn
}

// startServer starts a server that answers.
func startServer(tb testing.TB) *nfsServer {
	tb.Helper()
	s := &nfsServer{tb: tb}
	s.listen()
	tb.Cleanup(func() { s.refuse() })
	return s
}

// listen makes the server accept connections at its port, and answer. The first call chooses the port.
func (s *nfsServer) listen() {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
	if err != nil {
		s.tb.Error(err)
		return
	}
	s.listener, s.port, s.silent = l, l.Addr().(*net.TCPAddr).Port, false
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			go s.answer(conn)
		}
	}()
}

// refuse closes all connections, and makes the server refuse new ones.
func (s *nfsServer) refuse() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil {
		_ = s.listener.Close()
		s.listener = nil
	}
	for _, c := range s.conns {
		_ = c.Close()
	}
	s.conns = nil
}

func (s *nfsServer) setSilent(silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = silent
}

// answer answers one call, or keeps the connection open without an answer while the server is silent.
func (s *nfsServer) answer(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // only the reply matters
	var head [8]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return
	}
	s.mu.Lock()
	silent := s.silent
	s.mu.Unlock()
	if silent {
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	reply := binary.BigEndian.AppendUint32(nil, 1<<31|24) // record mark: the last fragment, of 24 bytes
	reply = append(reply, head[4:]...)                    // the transaction ID of the call
	for _, word := range []uint32{1, 0, 0, 0, 0} {        // REPLY, MSG_ACCEPTED, AUTH_NONE without a body, SUCCESS (RFC 5531)
		reply = binary.BigEndian.AppendUint32(reply, word)
	}
	_, _ = conn.Write(reply)
}

// testIntervals are short, so that tests are fast.
var testIntervals = intervals{
	check: 20 * time.Millisecond, fastPing: 50 * time.Millisecond, slowPing: 500 * time.Millisecond, silentAfter: time.Second,
	idleTime: time.Hour, reportTimeout: time.Second, restartDelay: 50 * time.Millisecond, stopTimeout: 2 * time.Second,
}

// testDriver is the part of a driver that relays calls to workers.
type testDriver struct {
	*Pools
	relay      *Relay
	controller csi.ControllerClient
	node       csi.NodeClient
	dir        string
	cancel     context.CancelFunc
}

// newDriver makes a driver with the nfs pools nas0, nas1, …, one on each server.
func newDriver(t *testing.T, intervals intervals, servers ...*nfsServer) *testDriver {
	t.Helper()
	w := &testDriver{dir: t.TempDir()}
	if err := syscall.Mkfifo(filepath.Join(w.dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	var configs []pool.Config
	for i, s := range servers {
		configs = append(configs, pool.Config{Name: fmt.Sprintf("nas%d", i), NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e", MountOptions: []string{fmt.Sprintf("port=%d", s.port)}}})
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	w.cancel = cancel
	w.Pools = newPools(ctx, Options{Pools: configs, Kinds: kinds, Job: Job{StateDir: w.dir}, Program: os.Args[0]}, intervals)
	w.relay = &Relay{Pools: w.Pools, Local: relay.Controller(&local{ids: []string{"loop:p.01234567:a", "loop:p.01234567:b", "loop:p.01234567:c"}})}
	w.controller = relaytest.Controller(w.relay)
	w.node = relaytest.Node(&Relay{Pools: w.Pools, Local: relay.Node(csi.UnimplementedNodeServer{})})
	t.Cleanup(func() { cancel(); w.Wait() })
	return w
}

// get calls ControllerGetVolume, and returns the volume context.
func (w *testDriver) get(ctx context.Context, id string) (map[string]string, error) {
	resp, err := w.controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	return resp.GetVolume().GetVolumeContext(), err
}

// mustGet is get, which must succeed.
func (w *testDriver) mustGet(t *testing.T, id string) map[string]string {
	t.Helper()
	volumeContext, err := w.get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return volumeContext
}

// begin starts a call of get. The channel receives its error.
func (w *testDriver) begin(ctx context.Context, id string) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := w.get(ctx, id)
		done <- err
	}()
	return done
}

func (w *testDriver) unstage(ctx context.Context, id string) error {
	_, err := w.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: "/nowhere"})
	return err
}

// of returns the state of a pool's worker.
func (w *testDriver) of(pool string) State {
	for _, s := range w.States() {
		if s.Pool == pool {
			return s
		}
	}
	return State{}
}

// await waits until a condition holds.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}
