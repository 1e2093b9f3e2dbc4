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
	"strings"
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
	histories = flag.Int("histories", 0, "histories for each pool; 0: what "+historiesVariable+" says, or a few")
	seed      = flag.Uint64("seed", 0, "seed of the first history; 0: the time")
)

const (
	historiesVariable = "TRIVET_TEST_HISTORIES"
	// driverVariable names the driver's program. It is for machines that cannot build it.
	driverVariable = "TRIVET_TEST_DRIVER"
	few            = 2

	// patience is the maximum of every wait.
	patience = 2 * time.Minute
	nodeID   = "node-1.example"
	poolName = "default"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// count is how many histories a pool has.
func count(t *testing.T) int {
	t.Helper()
	if *histories > 0 {
		return *histories
	}
	text := os.Getenv(historiesVariable)
	if text == "" {
		return few
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

// program builds the driver.
func program(t *testing.T) string {
	t.Helper()
	if made := os.Getenv(driverVariable); made != "" {
		return made
	}
	path := filepath.Join(t.TempDir(), "trivet")
	must(t, testenv.Build(path))
	return path
}

// ground is a driver with one pool.
type ground struct {
	pool string // where what it has can be seen
	// shares: the pool's filesystem shares blocks. subvolumes: its directories are subvolumes.
	shares, subvolumes bool
	kinds              []kind

	control csi.ControllerClient
	node    csi.NodeClient
	changes csi.SnapshotMetadataClient
}

// serve starts a driver. place is the part of its configuration that says where its pool is.
// The driver ends with the test and must leave nothing.
func (g *ground) serve(t *testing.T, binary, place string) {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf("pools: [{name: %s, overcommit: 100, freezeLimit: 50s, %s}]\n", poolName, place)
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
			t.Errorf("the driver ended with %v", err)
		}
		if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("the end of the driver's log:\n%s", b[max(0, len(b)-8192):])
		}
	})
	g.connect(t, endpoint)
}

func (g *ground) connect(t *testing.T, endpoint string) {
	t.Helper()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	g.control, g.node, g.changes = csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn)
	identity := csi.NewIdentityClient(conn)
	must(t, retry.For(t.Context(), patience, func() (bool, error) {
		resp, err := identity.Probe(t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err != nil, err
	}))
}

// run goes through all histories of a ground.
func (g *ground) run(t *testing.T) {
	t.Helper()
	first := *seed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", first)
	var blocks tally
	t.Run("histories", func(t *testing.T) {
		for i := range uint64(count(t)) {
			t.Run(strconv.FormatUint(first+i, 10), func(t *testing.T) {
				t.Parallel()
				newHistory(t, g, first+i, &blocks).run(t)
			})
		}
	})
	t.Logf("%d volumes compared with what was written; changed blocks: %d bytes of %d allocated, in %d pairs of snapshots",
		blocks.volumes.Load(), blocks.changed.Load(), blocks.allocated.Load(), blocks.pairs.Load())
	g.wantEmpty(t)
}

// wantEmpty waits until nothing of any volume or snapshot is in the pool.
func (g *ground) wantEmpty(t *testing.T) {
	t.Helper()
	err := retry.For(context.Background(), patience, func() (bool, error) {
		for _, dir := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
			left, err := filepath.Glob(filepath.Join(g.pool, dir, "*"))
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("left: %s", strings.Join(left, ", "))
			}
			if err != nil {
				return true, err
			}
		}
		return false, nil
	})
	if err != nil {
		t.Error(err)
	}
}
