package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
)

const nodeID = "node-1.example"

// host is a node with one pool. Its state survives the processes of the driver.
type host struct {
	binary    string
	dir       string // contains the driver's state and the orchestrator's paths
	pool      string // the path of the pool, on the NFS server if it is on an export
	export    *export
	disk      string            // the loop device that is the disk of a pool of disks
	diskImage string            // the backing file of disk
	group     *lvm.Group        // the volume group of a pool of one
	size      int64             // the size in bytes of the volume on disk, before any expansion
	class     map[string]string // parameters of GetCapacity in addition to the pool
	log       *os.File
	conn      *grpc.ClientConn
	identity  csi.IdentityClient
	control   csi.ControllerClient
	groups    csi.GroupControllerClient
	node      csi.NodeClient
	process   *process
	armed     crashpoint.Point // the crash point of the driver that was started last
	room      int64            // the result of GetCapacity for the empty pool, in bytes
	// explainLoss returns nil if an empty pool may have less room, because its kernel has lost blocks.
	explainLoss func() error

	mu   sync.Mutex
	errs []error // of addError
}

// addError makes the test fail when it ends. Any goroutine may call it.
func (h *host) addError(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.errs = append(h.errs, err)
}

// poolFilesystem is the size of the filesystem of a pool on a node.
const poolFilesystem = "4G"

// newHost returns a node with an empty pool on a new filesystem and a running driver. All of them are
// removed when the test ends.
func newHost(t *testing.T, fsType, binary string, armed crashpoint.Point) *host {
	t.Helper()
	return newHostWithPool(t, filepath.Join(testenv.Filesystem(t, fsType, poolFilesystem), "pool"), binary, armed)
}

// newHostWithPool returns a node with an empty pool in a directory and a running driver.
func newHostWithPool(t *testing.T, pool, binary string, armed crashpoint.Point) *host {
	t.Helper()
	h := &host{binary: binary, dir: newDir(t), pool: pool}
	h.begin(t, fmt.Sprintf("directory: {path: %q}, ephemeral: true", pool), armed)
	return h
}

// newDir creates a host.dir. T.TempDir contains the name of the test, and would be too long for the path of a socket.
func newDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "crash-")
	must(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// begin starts the first driver. medium is the part of the pool's configuration that selects its
// medium.
func (h *host) begin(t *testing.T, medium string, armed crashpoint.Point) {
	t.Helper()
	// The size of the pool is far below that of the filesystem, so that the growth of the filesystem's
	// metadata does not change the result of GetCapacity.
	if h.disk == "" && h.group == nil {
		medium += ", size: 3Gi"
	}
	config := fmt.Sprintf("pools: [{name: %s, %s}]\nephemeralMemory: 16Mi\n", h.poolName(), medium)
	must(t, os.WriteFile(h.path("config.yaml"), []byte(config), 0o600))
	var err error
	h.log, err = os.Create(h.path("log"))
	must(t, err)
	t.Cleanup(func() { h.remove(t) })
	must(t, h.connect())
	must(t, h.start(armed))
	h.room, err = h.capacity()
	must(t, err)
}

// export is an NFS export that contains a host's pool.
type export struct {
	server, path string
	// pool is the name of the pool. It differs for each host, because the hosts of all tests share the
	// machine's loop devices, whose tags contain the name.
	pool string
}

// shared reports whether the pool is on an export. The driver accesses such a pool in a separate
// process, which reaches the crash points.
func (h *host) shared() bool { return h.export != nil }

func (h *host) poolName() string {
	if h.shared() {
		return h.export.pool
	}
	return "default"
}

// source returns the source of a mount of a path on the export.
func (h *host) source(path string) string {
	return h.export.server + ":" + filepath.Join(h.export.path, path)
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

// remove kills the driver, fails the test for recorded errors and leftovers, and logs the driver's
// output if the test has failed.
func (h *host) remove(t *testing.T) {
	t.Helper()
	h.kill()
	for _, err := range h.errs {
		t.Error(err)
	}
	if h.conn != nil {
		_ = h.conn.Close()
	}
	if err := clearLeftovers(h.dir, h.pool); err != nil {
		t.Errorf("removing the leftovers: %v", err)
	}
	if err := poll(func(context.Context) error { return leaks(h.pool, "") }); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(h.log.Name()); err == nil && t.Failed() {
		t.Logf("the end of the log of all drivers:\n%s", b[max(0, len(b)-8192):])
	}
	_ = h.log.Close()
}

// connect creates a connection that is used for every process of the driver.
func (h *host) connect() error {
	quick := backoff.Config{BaseDelay: interval, Multiplier: 1.5, MaxDelay: 10 * interval}
	conn, err := grpc.NewClient("unix://"+h.path("csi.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: time.Second}),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	h.conn = conn
	h.identity, h.control, h.node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	h.groups = csi.NewGroupControllerClient(conn)
	return nil
}

// process is one run of the driver.
type process struct {
	cmd  *exec.Cmd
	dead chan struct{} // closed when it has ended
}

// launch starts the driver and does not wait until it is ready.
func (h *host) launch(armed crashpoint.Point) error {
	cmd := exec.Command(h.binary, "driver", "--endpoint", "unix://"+h.path("csi.sock"), "--node-id", nodeID,
		"--config", h.path("config.yaml"), "--state-dir", h.path("state"), "--http-address", "", "-v", "2")
	cmd.Env = append(os.Environ(), "TRIVET_CRASH_AT="+string(armed))
	cmd.Stdout, cmd.Stderr = h.log, h.log
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd: cmd, dead: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // cmd.ProcessState contains the result
		close(p.dead)
	}()
	h.process, h.armed = p, armed
	return nil
}

// start starts the driver and returns when it is ready.
func (h *host) start(armed crashpoint.Point) error {
	if err := h.launch(armed); err != nil {
		return err
	}
	err := poll(func(ctx context.Context) error {
		resp, err := h.identity.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
	if err == nil && h.shared() { // the driver is ready before the processes of shared pools are
		_, err = h.capacity()
	}
	return err
}

// stop ends the driver with SIGTERM, as Kubernetes does. It fails if the driver fails.
func (h *host) stop() error {
	if err := h.process.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if !h.process.ended() {
		return errors.New("the driver did not end after SIGTERM")
	}
	if state := h.process.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("the driver ended with %v", state)
	}
	return nil
}

// kill ends the driver with SIGKILL if it runs.
func (h *host) kill() {
	if h.process == nil {
		return
	}
	_ = h.process.cmd.Process.Kill()
	h.commit()
	<-h.process.dead
}

// commit makes btrfs commit its transaction. A killed driver may wait in the kernel for a commit,
// which would otherwise take up to 30 seconds (see package quota).
func (h *host) commit() {
	if poolMount, err := h.filesystem(); err == nil && poolMount.FSType == "btrfs" {
		_ = exec.Command("sync", "-f", h.pool).Run() // if sync fails, the driver only ends later
	}
}

// ended waits for the end of the process, and reports whether it ended within waitTimeout.
func (p *process) ended() bool {
	limit := time.NewTimer(waitTimeout)
	defer limit.Stop()
	select {
	case <-p.dead:
		return true
	case <-limit.C:
		return false
	}
}

// killed reports whether SIGKILL ended the process. The process must have ended.
func (p *process) killed() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// capacity returns the result of GetCapacity for the pool, in bytes.
func (h *host) capacity() (int64, error) {
	var room int64
	err := poll(func(ctx context.Context) error {
		class := map[string]string{"pool": h.poolName()}
		maps.Copy(class, h.class)
		resp, err := h.control.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: class})
		room = resp.GetAvailableCapacity()
		return retryable(err)
	})
	return room, err
}

// awaitEmpty waits until the pool has no volumes, snapshots, temporary or deleted files, promised
// bytes, mounts and bound loop devices.
func (h *host) awaitEmpty() error {
	return poll(func(context.Context) error {
		left, err := testenv.PoolEntries(h.pool)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("got %q in the pool, want no volumes and snapshots", left)
		}
		if err = errors.Join(err, h.leaks(), leaks(h.pool, "")); err != nil {
			return err
		}
		return h.checkRoom()
	})
}

// checkRoom fails while the driver counts bytes of the pool as promised to volumes.
func (h *host) checkRoom() error {
	room, err := h.capacity()
	if err == nil && room < h.room && h.explainLoss != nil {
		return h.explainLoss()
	}
	if err == nil && room != h.room {
		err = fmt.Errorf("got %d bytes from GetCapacity, want %d as for the empty pool", room, h.room)
	}
	return err
}

// emptyDir fails if a directory has entries.
func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("got %v in %s, want an empty directory", entries, dir)
	}
	return err
}

// leaks fails if a mount or loop device below the host's directory is left. The mount with which the
// driver accesses the records of a pool on an export or of a volume group is allowed.
func (h *host) leaks() error {
	records := "state/exports"
	if h.group != nil {
		records = "state/lvm"
	}
	return leaks(h.dir, h.path(records))
}

// wantNothingOwned fails if a driver that has ended left a mount, or an owner file in a shared pool.
func (h *host) wantNothingOwned() error {
	return poll(func(context.Context) error {
		err := leaks(h.dir, "")
		if h.shared() {
			err = errors.Join(err, emptyDir(filepath.Join(h.pool, ".trivet/owners")))
		}
		return err
	})
}

// awaitCrash waits until the driver logs that the armed process of a shared pool was killed. Then it
// kills the driver. err is the result of the call during which the process was killed.
func (h *host) awaitCrash(t *testing.T, err error) {
	t.Helper()
	if err != nil && status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v, want UNAVAILABLE", err)
	}
	must(t, poll(func(context.Context) error {
		b, err := os.ReadFile(h.log.Name())
		if err == nil && !bytes.Contains(b, []byte("signal: killed")) {
			err = fmt.Errorf("got no \"signal: killed\" in the log of the driver:\n%s", b)
		}
		return err
	}))
	h.kill()
}
