//go:build vm

package nfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/kube"
	report "github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// driverVariable is the path of the driver, which test/vm builds.
	driverVariable = "TRIVET_TEST_DRIVER"

	// waitTimeout is the maximum duration of each wait. It is far more than any step takes, because the
	// virtual machine is slow.
	waitTimeout = 2 * time.Minute

	// healthTime is the time after which the metrics and the reports of a node show a condition, or its end.
	healthTime = 90 * time.Second

	mib = int64(1) << 20
)

// machine is a node with a running driver, which usually serves both the controller and the node.
type machine struct {
	*nfsd.Node
	name  string
	dir   string   // contains the driver's state, and the kubelet's paths
	flags []string // additional flags of the driver
	// kubelet determines the staging paths. If its Dir is empty, they are in dir.
	kubelet kube.Kubelet

	identity csi.IdentityClient
	control  csi.ControllerClient
	node     csi.NodeClient

	cmd   *exec.Cmd
	ended chan struct{} // closed when the driver has ended
	conn  *grpc.ClientConn
}

// start starts a driver on a node. The driver runs until the test ends. pools is the value of `pools:`
// in its configuration. The test must unpublish all volumes before it ends.
func start(t *testing.T, n *nfsd.Node, name, pools string) *machine {
	t.Helper()
	m := &machine{Node: n, name: name, dir: t.TempDir(), flags: []string{"--node-id", name, "--http-address", "127.0.0.1:9810"}}
	m.serve(t, "pools:\n"+pools)
	return m
}

// serve starts the driver with a configuration. When the test ends, the driver ends and must leave
// nothing.
func (m *machine) serve(t *testing.T, config string) {
	t.Helper()
	must(t, os.WriteFile(m.path("config.yaml"), []byte(config), 0o644))
	m.run(t)
	t.Cleanup(func() {
		m.stop(t)
		m.wantNothingLeft(t)
	})
}

// nfsPool returns an entry of `pools:`. lines are additional keys of nfs.
func nfsPool(name string, s *nfsd.Server, export string, lines ...string) string {
	text := fmt.Sprintf("- name: %s\n  overcommit: 100\n  size: 1Ti\n  nfs:\n    server: %s\n    export: %s\n    init: true\n", name, s.Address(), export)
	for _, l := range lines {
		text += "    " + l + "\n"
	}
	return text
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

// run starts the driver and waits until it is ready. The driver runs until stop or kill.
func (m *machine) run(t *testing.T) {
	t.Helper()
	program := os.Getenv(driverVariable)
	if program == "" {
		t.Fatalf("%s is not set to the path of a driver: run this test with test/vm", driverVariable)
	}
	log, err := os.OpenFile(m.path("log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	must(t, err)
	defer log.Close()
	m.cmd = m.Command(program, append([]string{
		"driver", "--endpoint", "unix://" + m.path("csi.sock"), "--config", m.path("config.yaml"), "--state-dir", m.dir, "--v=2",
	}, m.flags...)...)
	m.cmd.Stdout, m.cmd.Stderr = log, log
	must(t, m.cmd.Start())
	cmd, ended := m.cmd, make(chan struct{})
	m.ended = ended
	go func() { defer close(ended); _ = cmd.Wait() }()
	m.connect(t)
}

// connect creates clients of the driver and waits until it is ready.
func (m *machine) connect(t *testing.T) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+m.path("csi.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	m.conn = conn
	m.identity, m.control, m.node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	err = retry.For(ctx, waitTimeout, func() (bool, error) {
		select {
		case <-m.ended:
			return false, errors.New("the driver has ended")
		default:
		}
		resp, err := m.identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		return err != nil || !resp.GetReady().GetValue(), err
	})
	if err != nil {
		t.Fatalf("%s is not ready: %v\n%s", m.name, err, m.log())
	}
}

// log returns the last lines of the log of the driver and its workers.
func (m *machine) log() string { return lastLines(m.path("log")) }

func lastLines(file string) string {
	b, _ := os.ReadFile(file)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-60):], "\n")
}

// stop ends the driver with SIGTERM.
func (m *machine) stop(t *testing.T) { m.end(t, syscall.SIGTERM) }

// kill ends the driver with SIGKILL.
func (m *machine) kill(t *testing.T) { m.end(t, syscall.SIGKILL) }

// end ends the driver with a signal. If the test has failed, it logs the driver's output.
func (m *machine) end(t *testing.T, signal syscall.Signal) {
	t.Helper()
	if m.conn == nil {
		return
	}
	if t.Failed() {
		t.Logf("%s:\n%s", m.name, m.log())
	}
	_ = m.conn.Close()
	m.conn = nil
	_ = m.cmd.Process.Signal(signal)
	select {
	case <-m.ended:
	case <-time.After(waitTimeout):
		t.Errorf("%s: the driver did not end", m.name)
		_ = m.cmd.Process.Kill()
	}
}

// workers returns the IDs of the processes in which the driver accesses its pools on exports.
func (m *machine) workers() []int {
	var pids []int
	parent := fmt.Sprintf("\nPPid:\t%d\n", m.cmd.Process.Pid)
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range processes {
		// The reads fail if the process has ended since the Glob.
		status, _ := os.ReadFile(p + "/status")
		words, _ := os.ReadFile(p + "/cmdline")
		if strings.Contains(string(status), parent) && slices.Contains(strings.Split(string(words), "\x00"), "worker") {
			pid, _ := strconv.Atoi(filepath.Base(p))
			pids = append(pids, pid)
		}
	}
	return pids
}

// threads counts the threads of the driver and of its workers.
func (m *machine) threads() (n int) {
	for _, pid := range append(m.workers(), m.cmd.Process.Pid) {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		n += len(tasks)
	}
	return n
}

// wantNothingLeft fails if a driver that has ended left a process, a mount below its directory, or
// a mount point for an export.
func (m *machine) wantNothingLeft(t *testing.T) {
	t.Helper()
	err := retry.For(context.Background(), waitTimeout, func() (bool, error) {
		left := m.left()
		return len(left) > 0, fmt.Errorf("%s: got %s after the end of the driver, want nothing", m.name, strings.Join(left, ", "))
	})
	if len(m.left()) > 0 {
		t.Errorf("%v\n%s", err, m.log())
		m.unmountAll()
	}
}

// unmountAll unmounts what a driver has left, because the removal of the test's directory would wait for a
// silent server.
func (m *machine) unmountAll() {
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, m.dir+"/") {
			_ = unix.Unmount(at, unix.MNT_FORCE)
			_ = unix.Unmount(at, unix.MNT_DETACH)
		}
	}
}

// left describes the processes, mounts and mount points that wantNothingLeft checks.
func (m *machine) left() (left []string) {
	links, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, l := range links {
		// The read fails if the process has ended since the Glob.
		if words, _ := os.ReadFile(l); bytes.Contains(words, []byte(m.dir)) {
			left = append(left, "process "+strings.ReplaceAll(string(words), "\x00", " "))
		}
	}
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, m.dir+"/") {
			left = append(left, "mount "+at)
		}
	}
	private, _ := os.ReadDir(m.path("nfs"))
	for _, e := range private {
		left = append(left, "mount point "+m.path("nfs/"+e.Name()))
	}
	return left
}

// wantEmpty waits until an export has no volumes, including temporary and deleted ones. A driver must
// run, because drivers empty the trash in the background.
func wantEmpty(t *testing.T, s *nfsd.Server, export string) {
	t.Helper()
	err := retry.For(context.Background(), waitTimeout, func() (bool, error) {
		left, err := onExport(s, export, "volumes", ".trivet/tmp", ".trivet/trash")
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("got %s on the export %s, want no volumes", strings.Join(left, ", "), export)
		}
		return len(left) > 0, err
	})
	if err != nil {
		t.Error(err)
	}
}

// onExport lists the entries of some directories on an export.
func onExport(s *nfsd.Server, export string, dirs ...string) (found []string, err error) {
	for _, dir := range dirs {
		entries, err := os.ReadDir(filepath.Join(s.Dir(export), dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			found = append(found, dir+"/"+e.Name())
		}
	}
	return found, nil
}

// vol is a volume with the values that an orchestrator stores for its calls.
type vol struct {
	name, id   string
	capability *csi.VolumeCapability
	context    map[string]string
}

// filesystem returns the capability of a volume with a filesystem. fsType is empty for a directory.
func filesystem(fsType string, mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
	}
}

const (
	oneNode   = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	manyNodes = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
)

// directory creates a volume that is a directory.
func (m *machine) directory(t *testing.T, pool, name string) *vol {
	t.Helper()
	return m.create(t, name, mib, filesystem("", manyNodes), directoryIn(pool))
}

// image creates a volume that is a disk image with a filesystem.
func (m *machine) image(t *testing.T, pool, name, fsType string, size int64) *vol {
	t.Helper()
	return m.create(t, name, size, filesystem(fsType, oneNode), imageIn(pool))
}

// create creates a volume. It retries while the driver returns UNAVAILABLE, because the pool may not be
// open yet.
func (m *machine) create(t *testing.T, name string, size int64, c *csi.VolumeCapability, parameters map[string]string) (v *vol) {
	t.Helper()
	eventually(t, func() (err error) {
		v, err = m.tryCreate(t, name, size, c, parameters)
		return err
	})
	return v
}

// tryCreate calls CreateVolume once. If the call fails, the returned volume has no ID.
func (m *machine) tryCreate(t *testing.T, name string, size int64, c *csi.VolumeCapability, parameters map[string]string) (*vol, error) {
	resp, err := m.control.CreateVolume(deadline(t), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: parameters,
	})
	return &vol{name: name, id: resp.GetVolume().GetVolumeId(), context: resp.GetVolume().GetVolumeContext(), capability: c}, err
}

// tryDirectory calls CreateVolume once, for a directory.
func (m *machine) tryDirectory(t *testing.T, pool, name string) error {
	_, err := m.tryCreate(t, name, mib, filesystem("", manyNodes), directoryIn(pool))
	return err
}

// directoryIn returns the parameters of a StorageClass whose volumes are directories.
func directoryIn(pool string) map[string]string {
	return map[string]string{"backend": "nfs", "pool": pool}
}

// imageIn returns the parameters of a StorageClass whose volumes are disk images.
func imageIn(pool string) map[string]string {
	return map[string]string{"backend": "loop", "pool": pool}
}

// encryptedIn returns the parameters of a StorageClass whose volumes are encrypted disk images.
func encryptedIn(pool string) map[string]string {
	return map[string]string{"backend": "loop", "pool": pool, volume.ParamEncryption: volume.EncryptionLUKS2}
}

func (m *machine) delete(t *testing.T, v *vol) error {
	_, err := m.control.DeleteVolume(deadline(t), &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// controllerPublish publishes a volume to this node.
func (m *machine) controllerPublish(t *testing.T, v *vol) error {
	_, err := m.control.ControllerPublishVolume(deadline(t), &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: m.name, VolumeCapability: v.capability, VolumeContext: v.context,
	})
	return err
}

// controllerUnpublish unpublishes a volume from any node, by a call to this node's driver.
func (m *machine) controllerUnpublish(t *testing.T, v *vol, node string) error {
	_, err := m.control.ControllerUnpublishVolume(deadline(t), &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: node})
	return err
}

func (m *machine) staging(v *vol) string {
	if m.kubelet.Dir != "" {
		return m.kubelet.StagingPath(backendtest.DriverName, v.id)
	}
	return m.path("staging-" + v.name)
}

func (m *machine) target(v *vol) string { return m.path("target-" + v.name) }

// file returns the path of a file in a published volume.
func (m *machine) file(v *vol, name string) string { return filepath.Join(m.target(v), name) }

// stage creates the staging directory if necessary, and calls NodeStageVolume.
func (m *machine) stage(t *testing.T, v *vol) error {
	if err := os.Mkdir(m.staging(v), 0o750); !errors.Is(err, os.ErrExist) { // unlike MkdirAll, Mkdir does not access a mounted server
		must(t, err)
	}
	_, err := m.node.NodeStageVolume(deadline(t), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: m.staging(v), VolumeCapability: v.capability, VolumeContext: v.context,
		Secrets: map[string]string{volume.SecretPassphrase: "passphrase"}, // only encrypted volumes need it
	})
	return err
}

func (m *machine) unstage(t *testing.T, v *vol) error {
	_, err := m.node.NodeUnstageVolume(deadline(t), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: m.staging(v)})
	return err
}

func (m *machine) publish(t *testing.T, v *vol) error {
	_, err := m.node.NodePublishVolume(deadline(t), &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: m.staging(v), TargetPath: m.target(v), VolumeCapability: v.capability, VolumeContext: v.context,
	})
	return err
}

func (m *machine) unpublish(t *testing.T, v *vol) error {
	_, err := m.node.NodeUnpublishVolume(deadline(t), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: m.target(v)})
	return err
}

// up publishes a volume to the node, stages it, and publishes it to a pod.
func (m *machine) up(t *testing.T, v *vol) {
	t.Helper()
	must(t, m.controllerPublish(t, v))
	must(t, m.stage(t, v))
	must(t, m.publish(t, v))
}

// down undoes up.
func (m *machine) down(t *testing.T, v *vol) {
	t.Helper()
	m.unmount(t, v)
	must(t, m.controllerUnpublish(t, v, m.name))
}

// mount stages a volume and publishes it to a pod. It retries staging while the driver returns
// UNAVAILABLE.
func (m *machine) mount(t *testing.T, v *vol) {
	t.Helper()
	eventually(t, func() error { return m.stage(t, v) })
	must(t, m.publish(t, v))
}

// unmount undoes mount.
func (m *machine) unmount(t *testing.T, v *vol) {
	t.Helper()
	must(t, m.unpublish(t, v))
	must(t, m.unstage(t, v))
}

// remove undoes up and deletes the volume.
func (m *machine) remove(t *testing.T, v *vol) {
	t.Helper()
	m.down(t, v)
	must(t, m.delete(t, v))
}

// tryHealth returns the reasons of the conditions that NodeGetVolumeHealth reports.
func (m *machine) tryHealth(t *testing.T, v *vol) (reasons []string, err error) {
	resp, err := m.node.NodeGetVolumeHealth(deadline(t), &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.id, VolumePublishPath: m.target(v), StagingTargetPath: m.staging(v),
	})
	for _, s := range resp.GetVolumeHealth().GetHealthStatuses() {
		reasons = append(reasons, s.GetReason())
	}
	return reasons, err
}

// health is tryHealth for a call that must succeed.
func (m *machine) health(t *testing.T, v *vol) []string {
	t.Helper()
	reasons, err := m.tryHealth(t, v)
	must(t, err)
	return reasons
}

func (m *machine) stats(t *testing.T, v *vol) error {
	_, err := m.node.NodeGetVolumeStats(deadline(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: m.target(v)})
	return err
}

func (m *machine) expand(t *testing.T, v *vol, size int64) error {
	_, err := m.control.ControllerExpandVolume(deadline(t), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.capability,
	})
	return err
}

func (m *machine) getVolume(t *testing.T, v *vol) error {
	_, err := m.control.ControllerGetVolume(deadline(t), &csi.ControllerGetVolumeRequest{VolumeId: v.id})
	return err
}

// awaitExamined waits until the last examination of the node has found the condition of a volume, or has not found it.
func (m *machine) awaitExamined(t *testing.T, v *vol, reason string, found bool) {
	t.Helper()
	must(t, retry.For(t.Context(), healthTime, func() (bool, error) {
		e, err := report.FetchExamination(deadline(t), m.conn)
		has := slices.ContainsFunc(e.Volumes, func(x report.Examined) bool {
			return x.ID == v.id && slices.ContainsFunc(x.Health, func(h report.Health) bool { return h.Reason == reason })
		})
		if err == nil && has != found {
			err = fmt.Errorf("got the examination %+v, want %s of %s: %t", e, reason, v.id, found)
		}
		return err != nil, err
	}))
}

func (m *machine) getVolumeHealth(t *testing.T, v *vol) error {
	_, err := m.control.ControllerGetVolumeHealth(deadline(t), &csi.ControllerGetVolumeHealthRequest{VolumeId: v.id})
	return err
}

func (m *machine) listVolumes(t *testing.T) error {
	_, err := m.control.ListVolumes(deadline(t), &csi.ListVolumesRequest{})
	return err
}

// deadline returns a context with a deadline, for one call.
func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), waitTimeout)
	t.Cleanup(cancel)
	return ctx
}

// wantCode fails unless an error has a gRPC code and contains all texts.
func wantCode(t *testing.T, err error, code codes.Code, texts ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("got error %v, want code %v", err, code)
		return
	}
	for _, text := range texts {
		if err != nil && !strings.Contains(err.Error(), text) {
			t.Errorf("got error %q, want it to contain %q", err, text)
		}
	}
}

// eventually repeats a call that returns UNAVAILABLE, as orchestrators do.
func eventually(t *testing.T, call func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(waitTimeout); time.Now().Before(end); {
		if err = call(); status.Code(err) != codes.Unavailable {
			must(t, err)
			return
		}
	}
	t.Fatalf("still UNAVAILABLE after %v: %v", waitTimeout, err)
}

// write writes a text to a file and syncs it.
func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	must(t, err)
	_, err = f.WriteString(text)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// wantText fails unless a file contains exactly a text.
func wantText(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != want {
		t.Errorf("%s: got %q and error %v, want %q", path, got, err, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a program of the machine, which must succeed.
func run(t *testing.T, name string, args ...string) {
	t.Helper()
	testenv.Run(t, name, args...)
}
