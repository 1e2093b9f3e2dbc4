package verify

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
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
	pool string // the directory of the pool, on the NFS server if the pool is on an export
	// shares is true if the pool's filesystem can share blocks between files, and subvolumes if the
	// driver's directories are subvolumes.
	shares, subvolumes bool
	kinds              []kind

	control csi.ControllerClient
	node    csi.NodeClient
	changes csi.SnapshotMetadataClient
}

// serve starts the driver. medium is the part of the pool's configuration that selects its medium.
// The driver ends with the test.
func (g *testDriver) serve(t *testing.T, binary, medium string) {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf("pools: [{name: %s, overcommit: 100, freezeLimit: 50s, %s}]\n", poolName, medium)
	must(t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	t.Cleanup(func() { _ = log.Close() })
	endpoint := "unix://" + filepath.Join(dir, "csi.sock")
	cmd := exec.Command(binary, "driver", "--endpoint", endpoint, "--node-id", nodeID, "--config", filepath.Join(dir, "config.yaml"),
		"--state-dir", filepath.Join(dir, "state"), "--http-address", "", "-v", "2")
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			t.Errorf("the driver ended with error %v", err)
		}
		if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("the end of the driver's log:\n%s", b[max(0, len(b)-8192):])
		}
	})
	g.connect(t, endpoint)
}

// connect creates clients of the driver and waits until it is ready.
func (g *testDriver) connect(t *testing.T, endpoint string) {
	t.Helper()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
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
	t.Logf("compared %d volumes with what was written, and %d pairs of snapshots, where %d of %d allocated bytes were reported as changed",
		all.volumes.Load(), all.pairs.Load(), all.changed.Load(), all.allocated.Load())
	g.wantEmpty(t)
}

// wantEmpty waits until the pool has no files of volumes and snapshots.
func (g *testDriver) wantEmpty(t *testing.T) {
	t.Helper()
	err := retry.For(context.Background(), waitTimeout, func() (bool, error) {
		left, err := testenv.PoolEntries(g.pool)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("got %q in the pool, want no volumes and snapshots", left)
		}
		return err != nil, err
	})
	if err != nil {
		t.Error(err)
	}
}
