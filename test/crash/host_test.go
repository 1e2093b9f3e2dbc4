package crash

import (
	"bytes"
	"context"
	"encoding/json"
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

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
)

const nodeID = "node-1.example"

// host is a node: the state that a driver leaves when its process ends.
type host struct {
	binary    string
	dir       string // the state, and the orchestrator's paths
	pool      string // the path of its content
	export    *export
	disk      string // the disk of a pool of disks, and its image
	diskImage string
	size      int64             // of the volume on the disk
	class     map[string]string // of the pool, besides its name
	log       *os.File
	conn      *grpc.ClientConn
	identity  csi.IdentityClient
	control   csi.ControllerClient
	groups    csi.GroupControllerClient
	node      csi.NodeClient
	process   *process
	armed     crashpoint.Point // the driver that was started last
	room      int64            // the first result of GetCapacity

	mu         sync.Mutex
	complaints []error
}

// complain fails the test at its end.
func (h *host) complain(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.complaints = append(h.complaints, err)
}

// poolFilesystem is the size of the filesystem of a pool.
const poolFilesystem = "4G"

// newHost makes a node with an empty pool on a new filesystem and starts a driver. All of it
// is removed when the test ends.
func newHost(t *testing.T, fsType, binary string, armed crashpoint.Point) *host {
	t.Helper()
	return newHostIn(t, filepath.Join(testenv.Filesystem(t, fsType, poolFilesystem), "pool"), binary, armed)
}

// newHostIn is newHost with the pool in a directory.
func newHostIn(t *testing.T, pool, binary string, armed crashpoint.Point) *host {
	t.Helper()
	h := &host{binary: binary, dir: t.TempDir(), pool: pool}
	h.begin(t, fmt.Sprintf("directory: {path: %q}, ephemeral: true", pool), armed)
	return h
}

// begin starts a driver. place is the part of the configuration with the pool's location.
func (h *host) begin(t *testing.T, place string, armed crashpoint.Point) {
	t.Helper()
	// The size is far below the filesystem's, whose metadata grows. GetCapacity then depends
	// on the promised bytes alone.
	if h.disk == "" {
		place += ", size: 3Gi"
	}
	config := fmt.Sprintf("pools: [{name: %s, %s}]\nephemeralMemory: 16Mi\n", h.poolName(), place)
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

// export is the directory of an NFS server where a host has its pool.
type export struct {
	server, path string
	// pool is its name. The tags of loop devices contain it, and all hosts of a test are on
	// one machine.
	pool string
}

// shared reports whether the pool is on an export. A process of its own then serves it and
// passes the crash points.
func (h *host) shared() bool { return h.export != nil }

func (h *host) poolName() string {
	if h.shared() {
		return h.export.pool
	}
	return "default"
}

// source is the source of a mount of a path below the export.
func (h *host) source(path string) string {
	return h.export.server + ":" + filepath.Join(h.export.path, path)
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

func (h *host) remove(t *testing.T) {
	t.Helper()
	h.kill()
	for _, err := range h.complaints {
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
		t.Logf("the end of the drivers' log:\n%s", b[max(0, len(b)-8192):])
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

// launch starts the driver; it need not be ready yet.
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
		_ = cmd.Wait() // how it ended is in cmd.ProcessState
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
	if err == nil && h.shared() { // a driver does not wait for the processes of shared pools
		_, err = h.capacity()
	}
	return err
}

// stop ends the driver as Kubernetes does.
func (h *host) stop() error {
	if err := h.process.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if !h.process.ended() {
		return errors.New("the driver did not end")
	}
	if state := h.process.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("the driver ended with %v", state)
	}
	return nil
}

// kill ends the driver at once, if it runs.
func (h *host) kill() {
	if h.process == nil {
		return
	}
	_ = h.process.cmd.Process.Kill()
	h.commit()
	<-h.process.dead
}

// commit ends the wait of a killed driver for a commit of btrfs, which no other process
// requests: the kernel may sleep for 30 seconds (see package quota).
func (h *host) commit() {
	if own, err := h.filesystem(); err == nil && own.FSType == "btrfs" {
		_ = exec.Command("sync", "-f", h.pool).Run() // without it the driver ends later
	}
}

// ended waits up to patience for the end of the process.
func (p *process) ended() bool {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-p.dead:
		return true
	case <-limit.C:
		return false
	}
}

// killed reports whether the process, which has ended, was ended by SIGKILL.
func (p *process) killed() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

func (h *host) capacity() (int64, error) {
	var room int64
	err := poll(func(ctx context.Context) error {
		class := map[string]string{"pool": h.poolName()}
		maps.Copy(class, h.class)
		resp, err := h.control.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: class})
		room = resp.GetAvailableCapacity()
		return again(err)
	})
	return room, err
}

// poolUUID reads the pool's identity from its marker.
func (h *host) poolUUID() (string, error) {
	b, err := os.ReadFile(filepath.Join(h.pool, "pool.json"))
	if err != nil {
		return "", err
	}
	var marker struct{ UUID string }
	return marker.UUID, json.Unmarshal(b, &marker)
}

// empty waits until the pool is as it was at first: it has no volumes, no incomplete volumes, no
// promised bytes, no mounts and no bound devices.
func (h *host) empty() error {
	return poll(func(context.Context) error {
		errs := []error{h.leaks(), leaks(h.pool, ""), h.checkRoom()}
		for _, dir := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
			errs = append(errs, emptyDir(filepath.Join(h.pool, dir)))
		}
		return errors.Join(errs...)
	})
}

// checkRoom fails while bytes are promised.
func (h *host) checkRoom() error {
	room, err := h.capacity()
	if err == nil && room != h.room {
		err = fmt.Errorf("GetCapacity returned %d bytes, at first %d", room, h.room)
	}
	return err
}

func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("%s has %v", dir, entries)
	}
	return err
}

// leaks returns an error if a mount or loop device of no volume is left. The mount of a shared
// pool's records is allowed.
func (h *host) leaks() error { return leaks(h.dir, h.path("state/exports")) }

// ownsNothing fails if a driver that has ended left a mount, or in a shared pool a file of its
// processes.
func (h *host) ownsNothing() error {
	return poll(func(context.Context) error {
		err := leaks(h.dir, "")
		if h.shared() {
			err = errors.Join(err, emptyDir(filepath.Join(h.pool, ".trivet/owners")))
		}
		return err
	})
}

// awaitCrash waits until the driver logs that the armed process of the shared pool was killed,
// and then kills the driver. err is the result of the call.
func (h *host) awaitCrash(t *testing.T, err error) {
	t.Helper()
	if err != nil && status.Code(err) != codes.Unavailable {
		t.Fatalf("got %v, want UNAVAILABLE", err)
	}
	must(t, poll(func(context.Context) error {
		b, err := os.ReadFile(h.log.Name())
		if err == nil && !bytes.Contains(b, []byte("signal: killed")) {
			err = fmt.Errorf("SIGKILL ended no process; the log:\n%s", b)
		}
		return err
	}))
	h.kill()
}
