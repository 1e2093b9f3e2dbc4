package verify

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

var (
	histories = flag.Int("histories", 0, "`number` of histories for each pool; 0 means the value of "+historiesVariable+", or a few if it is not set")
	seed      = flag.Uint64("seed", 0, "seed of the first history, which the seeds of the others follow; 0 means the current time")
)

const (
	historiesVariable = "TRIVET_TEST_HISTORIES"
	// driverVariable is the path of the driver's program, for machines that cannot build it.
	driverVariable = "TRIVET_TEST_DRIVER"
	// defaultHistories is the number of histories that go test runs for each pool.
	defaultHistories = 2

	// waitTimeout is the maximum duration of each wait.
	waitTimeout = 2 * time.Minute
	nodeID      = "node-1.example"
	poolName    = "default"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// count returns the number of histories for each pool.
func count(t *testing.T) int {
	t.Helper()
	if *histories > 0 {
		return *histories
	}
	text := os.Getenv(historiesVariable)
	if text == "" {
		return defaultHistories
	}
	n, err := strconv.Atoi(text)
	must(t, err)
	return n
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// program returns the path of the driver, which it builds unless driverVariable is set.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv(driverVariable); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "trivet")
	must(t, testenv.Build(path))
	return path
}

// testDriver is a running driver with one pool.
type testDriver struct {
	// medium is the medium of the pool. Its directory is on the NFS server if the pool is on an export.
	medium backendtest.Medium
	// shares is true if the pool's filesystem can share blocks between files, and subvolumes if the
	// driver's directories are subvolumes.
	shares, subvolumes bool
	// restarts is true if histories end the driver and start it again.
	restarts bool
	kinds    []kind

	control csi.ControllerClient
	node    csi.NodeClient
	changes csi.SnapshotMetadataClient

	words      []string // the command
	log        *os.File
	process    *exec.Cmd
	restarting sync.Mutex
}

// serve starts the driver. The driver ends with the test.
func (g *testDriver) serve(t *testing.T, binary string) {
	t.Helper()
	dir := t.TempDir()
	state, config := filepath.Join(dir, "state"), filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(config, g.configuration(t), 0o600))
	g.medium.Dir = cmp.Or(g.medium.Dir, g.medium.Config.Within(state).Directory.Path)
	var err error
	g.log, err = os.Create(filepath.Join(dir, "log"))
	must(t, err)
	t.Cleanup(func() { _ = g.log.Close() })
	endpoint := "unix://" + filepath.Join(dir, "csi.sock")
	g.words = []string{binary, "driver", "--endpoint", endpoint, "--node-id", nodeID, "--config", config, "--state-dir", state, "--http-address", "", "-v", "2"}
	must(t, g.start())
	t.Cleanup(func() {
		if err := g.end(syscall.SIGTERM); err != nil {
			t.Errorf("the driver ended with error %v", err)
		}
		if b, err := os.ReadFile(g.log.Name()); err == nil && t.Failed() {
			t.Logf("the end of the driver's log:\n%s", b[max(0, len(b)-8192):])
		}
	})
	g.connect(t, endpoint)
}

// configuration returns the content of the configuration file.
func (g *testDriver) configuration(t *testing.T) []byte {
	t.Helper()
	c := &g.medium.Config
	c.Name, c.FreezeLimit = poolName, "50s"
	if c.Section != nil {
		c.Sections = map[string]any{string(c.Kind()): c.Section}
	}
	b, err := yaml.Marshal(map[string]any{"pools": []pool.Config{*c}})
	must(t, err)
	return b
}

func (g *testDriver) start() error {
	g.process = exec.Command(g.words[0], g.words[1:]...)
	g.process.Stdout, g.process.Stderr = g.log, g.log
	return g.process.Start()
}

// end sends a signal to the driver, and waits for its end.
func (g *testDriver) end(signal syscall.Signal) error {
	if err := g.process.Process.Signal(signal); err != nil {
		return err
	}
	err := g.process.Wait()
	if signal == syscall.SIGKILL {
		return nil
	}
	return err
}

// restart ends the driver with a signal, while other histories make calls, and starts it again.
func (g *testDriver) restart(signal syscall.Signal) error {
	g.restarting.Lock()
	defer g.restarting.Unlock()
	return cmp.Or(g.end(signal), g.start())
}

// connect creates clients of the driver and waits until it is ready.
func (g *testDriver) connect(t *testing.T, endpoint string) {
	t.Helper()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithChainUnaryInterceptor(backendtest.AddPassphrase, insisting))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	g.control, g.node, g.changes = csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn)
	identity := csi.NewIdentityClient(conn)
	must(t, retry.For(t.Context(), waitTimeout, func() (bool, error) {
		resp, err := identity.Probe(t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err != nil, err
	}))
}

// insist repeats a call that the driver has not completed, or could not, because it was restarted.
func insist(ctx context.Context, call func() error) error {
	return retry.For(ctx, waitTimeout, func() (bool, error) {
		err := call()
		code := status.Code(err)
		return code == codes.Aborted || code == codes.Unavailable, err
	})
}

// insisting is a grpc.UnaryClientInterceptor that insists on each call.
func insisting(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return insist(ctx, func() error { return invoke(ctx, method, req, reply, conn, opts...) })
}

// run runs the histories in parallel, and checks that the pool is empty afterwards.
func (g *testDriver) run(t *testing.T) {
	t.Helper()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", first)
	var all totals
	t.Run("histories", func(t *testing.T) {
		for i := range uint64(count(t)) {
			t.Run(strconv.FormatUint(first+i, 10), func(t *testing.T) {
				t.Parallel()
				newHistory(t, g, first+i, &all).run(t)
			})
		}
	})
	t.Logf("compared volumes %d times with what was written, and %d pairs of snapshots, where %d of %d allocated bytes were reported as changed",
		all.comparisons.Load(), all.pairs.Load(), all.changed.Load(), all.allocated.Load())
	g.wantEmpty(t)
	for _, k := range g.kinds {
		if k.Has(backendtest.Thick|backendtest.Block) && !k.Has(backendtest.Encrypted) {
			g.wantZeros(t, k)
		}
	}
}

// wantZeros fails the test unless a new raw volume, which gets the extents of deleted volumes, contains only zeros.
func (g *testDriver) wantZeros(t *testing.T, k kind) {
	t.Helper()
	const size = 128 << 20
	v := g.newVol(t, k, "zeros", size, nil)
	v.publish(t)
	must(t, newWriter(0, size/blockSize).check(v.file(), moment{}, moment{}))
	v.remove(t)
	g.wantEmpty(t)
}

// wantEmpty waits until the pool has no files and no logical volumes of volumes and snapshots.
func (g *testDriver) wantEmpty(t *testing.T) {
	t.Helper()
	err := retry.For(context.Background(), waitTimeout, func() (bool, error) {
		left, err := testenv.PoolEntries(g.medium.Dir)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("got %q in the pool, want no volumes and snapshots", left)
		}
		if group, ok := g.medium.Config.Section.(*lvm.Group); ok && err == nil {
			err = backendtest.CheckOnlyRecords(group)
		}
		return err != nil, err
	})
	if err != nil {
		t.Error(err)
	}
}
