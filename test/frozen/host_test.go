package frozen_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/testenv"
)

const (
	node = "node-1.example"
	mib  = int64(1) << 20
	// patience is the longest time that the test waits for anything.
	patience = 2 * time.Minute
)

// host is a node with a pool on a filesystem and a pool of disks, on which drivers of different versions replace each
// other.
type host struct {
	dir, pool string
	log       *os.File
	process   *exec.Cmd
	identity  csi.IdentityClient
	control   csi.ControllerClient
	groups    csi.GroupControllerClient
	node      csi.NodeClient
}

// newHost returns a node without a driver.
func newHost(t *testing.T, disks int) *host {
	t.Helper()
	h := &host{dir: t.TempDir(), pool: filepath.Join(testenv.Filesystem(t, "xfs", "16G"), "pool")}
	match := ""
	for range disks {
		device, _, _ := testenv.Disk(t, 512*mib)
		match += fmt.Sprintf("%q, ", device)
	}
	config := fmt.Sprintf("pools:\n- {name: ssd, directory: {path: %q}, ephemeral: true}\n- {name: disks, disks: {match: [%s]}}\nephemeralMemory: 16Mi\n", h.pool, match)
	must(t, os.WriteFile(h.path("config.yaml"), []byte(config), 0o600))
	var err error
	h.log, err = os.Create(h.path("log"))
	must(t, err)
	quick := backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}
	conn, err := grpc.NewClient("unix://"+h.path("csi.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: time.Second}), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	must(t, err)
	h.identity, h.control, h.node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	h.groups = csi.NewGroupControllerClient(conn)
	t.Cleanup(func() {
		if h.process != nil {
			_ = h.process.Process.Kill()
			_ = h.process.Wait()
		}
		_ = conn.Close()
		h.clear()
		if b, err := os.ReadFile(h.log.Name()); err == nil && t.Failed() {
			t.Logf("the end of the log of all drivers:\n%s", b[max(0, len(b)-8192):])
		}
		_ = h.log.Close()
	})
	return h
}

// clear removes the mounts and loop devices that remain after a failure.
func (h *host) clear() {
	mounts, _ := exec.Command("findmnt", "-rno", "TARGET").Output()
	for _, target := range slices.Backward(strings.Fields(string(mounts))) {
		if strings.HasPrefix(target, h.dir+"/") {
			_ = exec.Command("umount", target).Run()
		}
	}
	devices, _ := exec.Command("losetup", "-nlO", "NAME,BACK-FILE").Output()
	for line := range strings.Lines(string(devices)) {
		if device, image, _ := strings.Cut(strings.TrimSpace(line), " "); strings.HasPrefix(strings.TrimSpace(image), h.pool+"/") {
			_ = exec.Command("losetup", "-d", device).Run()
		}
	}
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

// run stops the driver, starts another one, and waits until it is ready. An empty program only stops the driver.
func (h *host) run(t *testing.T, program string) {
	t.Helper()
	if h.process != nil {
		must(t, h.process.Process.Signal(syscall.SIGTERM))
		err := h.process.Wait()
		h.process = nil
		must(t, err)
	}
	if program == "" {
		return
	}
	h.process = exec.Command(program, "driver", "--endpoint", "unix://"+h.path("csi.sock"), "--node-id", node,
		"--config", h.path("config.yaml"), "--state-dir", h.path("state"), "--http-address", "", "-v", "2")
	h.process.Stdout, h.process.Stderr = h.log, h.log
	must(t, h.process.Start())
	poll(t, func(ctx context.Context) error {
		resp, err := h.identity.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// poll calls try until it succeeds.
func poll(t *testing.T, try func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("timed out after %v: %v", patience, err)
		case <-tick.C:
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// do makes a call that must succeed.
func do[Req, Resp any](t *testing.T, call func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req) Resp {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := call(ctx, req)
	if err != nil {
		t.Fatalf("%T %v: %v", req, req, err)
	}
	return resp
}
