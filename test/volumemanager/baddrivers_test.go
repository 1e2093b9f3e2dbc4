package volumemanager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestBadDrivers: a driver that hangs, stops or reports false success is reported, and does not block
// other drivers and volumes.
func TestBadDrivers(t *testing.T) {
	m := newMachine(t)
	hangs, lies := newScriptedDriver(m, "hangs.example"), newScriptedDriver(m, "lies.example")
	hangs.publish = func(ctx context.Context, _ string) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-hangs.released:
			return errors.New("not now")
		}
	}
	lies.publish = func(context.Context, string) error { return nil }
	good := newScriptedDriver(m, "good.example")
	for _, d := range []*scriptedDriver{hangs, lies, good} {
		d.start()
	}
	m.badSockets()

	m.put("drivers", driverObject("hangs.example"), driverObject("lies.example"), driverObject("good.example"), driverObject("garbage.example"))
	m.put("web", podOf("web", inlineOf("hangs"), inlineOf("lies"), inlineOf("good"), inlineOf("garbage"), inlineOf("dead"), "{name: dir, emptyDir: {}}"))
	m.awaitVolume("web", "hangs", state.Mounting, "")
	m.awaitVolume("web", "lies", state.Failed, "reported success but nothing is mounted at")
	m.awaitVolume("web", "garbage", state.Failed, "garbage.example is not registered")
	m.awaitVolume("web", "dead", state.Failed, "dead.example is not registered")
	m.awaitVolume("web", "good", state.Mounted, "")
	m.awaitVolume("web", "dir", state.Mounted, "")
	m.awaitDriverError("dead-reg.sock", "remove the socket if its driver no longer exists")
	m.awaitDriverError("speaks-reg.sock", "GetInfo")
	m.awaitDriverError("garbage-reg.sock", "garbage.example")

	t.Log("the pod is removed while its driver hangs, and added again when the driver works")
	m.remove("web")
	m.awaitUndesired("web", "hangs")
	close(hangs.released)
	m.awaitRemoved("web")
	hangs.set(mountTmpfs)
	lies.set(mountTmpfs)
	m.put("web", podOf("web", inlineOf("hangs"), inlineOf("lies"), inlineOf("good")))
	p := m.await("web")
	write(t, p["good"].Path)

	t.Log("a driver stops and starts")
	good.stop()
	m.put("db", podOf("db", inlineOf("good")))
	m.awaitVolume("db", "good", state.Failed, "good.example is not registered")
	wantWritten(t, "good", p["good"].Path)
	m.remove("web")
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if v.PodUID == "web" && v.Volume == "good" && strings.Contains(v.Message, "not registered") {
				return nil
			}
		}
		return fmt.Errorf("got volumes %+v, want volume good of the removed pod web with the message that its driver is not registered", s.Volumes)
	})
	good.start()
	m.awaitRemoved("web")
	m.await("db")
	m.removeAll()
}

// driverObject returns the manifest of the CSIDriver of a driver for inline volumes.
func driverObject(name string) string {
	return fmt.Sprintf("\napiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: %s}\nspec: {volumeLifecycleModes: [Ephemeral]}\n", name)
}

// inlineOf returns an inline volume of the driver NAME.example. The volume has the name NAME.
func inlineOf(driver string) string {
	return fmt.Sprintf("{name: %[1]s, csi: {driver: %[1]s.example}}", driver)
}

// badSockets creates three sockets in the registry: one without a listener, one that does not speak
// gRPC, and a registrar for a driver that does not speak gRPC.
func (m *machine) badSockets() {
	m.t.Helper()
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(m.registry, "dead-reg.sock"), Net: "unix"})
	must(m.t, err)
	dead.SetUnlinkOnClose(false)
	must(m.t, dead.Close())
	m.speakGarbage(filepath.Join(m.registry, "speaks-reg.sock"))
	garbage := filepath.Join(m.dir, "garbage.sock")
	m.speakGarbage(garbage)
	m.serve(filepath.Join(m.registry, "garbage-reg.sock"), func(s *grpc.Server) {
		registration.RegisterRegistrationServer(s, registrar{name: "garbage.example", endpoint: garbage})
	})
}

// speakGarbage serves a socket that does not speak gRPC.
func (m *machine) speakGarbage(path string) {
	m.t.Helper()
	l, err := net.Listen("unix", path)
	must(m.t, err)
	m.t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintln(conn, "220 garbage.example ESMTP")
			_ = conn.Close()
		}
	}()
}

// awaitDriverError waits until a socket in the registry is reported with an error.
func (m *machine) awaitDriverError(socket, message string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, d := range s.Drivers {
			if filepath.Base(d.Socket) == socket && strings.Contains(d.Problem, message) {
				return nil
			}
		}
		return fmt.Errorf("got drivers %+v, want socket %s with error %q", s.Drivers, socket, message)
	})
}

// awaitUndesired waits until a volume of a removed pod is in the status. It compares the pod's UID, because
// the status may lack the name of a removed pod.
func (m *machine) awaitUndesired(uid, volume string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if string(v.PodUID) == uid && v.Volume == volume {
				return nil
			}
		}
		return fmt.Errorf("got volumes %+v, want volume %s of pod %s", s.Volumes, volume, uid)
	})
}

// serve runs a gRPC server on a socket until stop is called or the test ends.
func (m *machine) serve(path string, register func(*grpc.Server)) (stop func()) {
	m.t.Helper()
	l, err := net.Listen("unix", path)
	must(m.t, err)
	s := grpc.NewServer()
	register(s)
	go func() { _ = s.Serve(l) }()
	m.t.Cleanup(s.Stop)
	return s.Stop
}

// registrar answers the calls of the plugin registration for a driver with a name and a socket.
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r registrar) NotifyRegistrationStatus(context.Context, *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, nil
}

// scriptedDriver is a driver of inline volumes. Tests replace the function that publishes a volume.
type scriptedDriver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	*machine
	name string
	// released can be closed by a test to end the calls of a publish function that waits for it.
	released chan struct{}
	stops    []func() // end the servers of the driver and of its registrar

	mu      sync.Mutex
	publish func(ctx context.Context, target string) error
}

// newScriptedDriver returns a driver that mounts a tmpfs for each volume. It does not start the driver.
func newScriptedDriver(m *machine, name string) *scriptedDriver {
	return &scriptedDriver{machine: m, name: name, released: make(chan struct{}), publish: mountTmpfs}
}

// start starts and registers the driver.
func (d *scriptedDriver) start() {
	d.t.Helper()
	endpoint := filepath.Join(d.dir, d.name)
	d.stops = []func(){
		d.serve(endpoint, func(s *grpc.Server) {
			csi.RegisterIdentityServer(s, d)
			csi.RegisterNodeServer(s, d)
		}),
		d.serve(filepath.Join(d.registry, d.name+"-reg.sock"), func(s *grpc.Server) {
			registration.RegisterRegistrationServer(s, registrar{name: d.name, endpoint: endpoint})
		}),
	}
}

// stop ends the driver and its registration, and cancels running calls.
func (d *scriptedDriver) stop() {
	for _, stop := range d.stops {
		stop()
	}
}

// set replaces the function that publishes a volume.
func (d *scriptedDriver) set(publish func(context.Context, string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.publish = publish
}

func (d *scriptedDriver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d *scriptedDriver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (d *scriptedDriver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (d *scriptedDriver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (d *scriptedDriver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: nodeName}, nil
}

func (d *scriptedDriver) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.mu.Lock()
	publish := d.publish
	d.mu.Unlock()
	return &csi.NodePublishVolumeResponse{}, publish(ctx, r.GetTargetPath())
}

func (d *scriptedDriver) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	for syscall.Unmount(r.GetTargetPath(), 0) == nil { // all mounts at the path
	}
	_ = os.Remove(r.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// mountTmpfs mounts a tmpfs on target, unless target exists. Inline volumes are published repeatedly.
func mountTmpfs(_ context.Context, target string) error {
	err := os.Mkdir(target, 0o750)
	if errors.Is(err, os.ErrExist) { // an earlier call has mounted the tmpfs
		return nil
	}
	if err != nil {
		return err
	}
	return syscall.Mount("scripted", target, "tmpfs", 0, "size=1m")
}
