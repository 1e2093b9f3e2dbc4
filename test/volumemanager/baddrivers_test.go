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

// TestBadDrivers: a driver that misbehaves is reported, and does not block other drivers and volumes.
func TestBadDrivers(t *testing.T) {
	g := newGround(t)
	hangs, lies := newScripted(g, "hangs.example"), newScripted(g, "lies.example")
	hangs.publish = func(ctx context.Context, _ string) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-hangs.released:
			return errors.New("not now")
		}
	}
	lies.publish = func(context.Context, string) error { return nil }
	good := newScripted(g, "good.example")
	for _, d := range []*scripted{hangs, lies, good} {
		d.start()
	}
	g.badSockets()

	g.put("drivers", driverObject("hangs.example"), driverObject("lies.example"), driverObject("good.example"), driverObject("garbage.example"))
	g.put("web", podOf("web", inlineOf("hangs"), inlineOf("lies"), inlineOf("good"), inlineOf("garbage"), inlineOf("dead"), "{name: dir, emptyDir: {}}"))
	g.says("web", "hangs", state.Mounting, "")
	g.says("web", "lies", state.Failed, "reported success but nothing is mounted at")
	g.says("web", "garbage", state.Failed, "garbage.example is not registered")
	g.says("web", "dead", state.Failed, "dead.example is not registered")
	g.says("web", "good", state.Mounted, "")
	g.says("web", "dir", state.Mounted, "")
	g.tells("dead-reg.sock", "remove the socket if its driver no longer exists")
	g.tells("speaks-reg.sock", "GetInfo")
	g.tells("garbage-reg.sock", "garbage.example")

	t.Log("the pod is removed while its driver hangs, and added again when the driver works")
	g.remove("web")
	g.lingers("web", "hangs")
	close(hangs.released)
	g.gone("web")
	hangs.set(mountTmpfs)
	lies.set(mountTmpfs)
	g.put("web", podOf("web", inlineOf("hangs"), inlineOf("lies"), inlineOf("good")))
	p := g.await("web")
	write(t, p["good"].Path)

	t.Log("a driver stops and starts")
	good.stop()
	g.put("db", podOf("db", inlineOf("good")))
	g.says("db", "good", state.Failed, "good.example is not registered")
	wantWritten(t, "good", p["good"].Path)
	g.remove("web")
	g.holds(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if v.UID == "web" && v.Volume == "good" && strings.Contains(v.Message, "not registered") {
				return nil
			}
		}
		return fmt.Errorf("no volume that cannot be unmounted: %+v", s.Volumes)
	})
	good.start()
	g.gone("web")
	g.await("db")
	g.wantNothing()
}

func driverObject(name string) string {
	return fmt.Sprintf("\napiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: %s}\nspec: {volumeLifecycleModes: [Ephemeral]}\n", name)
}

func inlineOf(driver string) string {
	return fmt.Sprintf("{name: %[1]s, csi: {driver: %[1]s.example}}", driver)
}

// badSockets creates sockets in the registry: one without a listener, one with another protocol, and a
// registrar of a driver with another protocol.
func (g *ground) badSockets() {
	g.t.Helper()
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(g.registry, "dead-reg.sock"), Net: "unix"})
	must(g.t, err)
	dead.SetUnlinkOnClose(false)
	must(g.t, dead.Close())
	g.speakGarbage(filepath.Join(g.registry, "speaks-reg.sock"))
	garbage := filepath.Join(g.dir, "garbage.sock")
	g.speakGarbage(garbage)
	g.serve(filepath.Join(g.registry, "garbage-reg.sock"), func(s *grpc.Server) {
		registration.RegisterRegistrationServer(s, registrar{name: "garbage.example", endpoint: garbage})
	})
}

func (g *ground) speakGarbage(path string) {
	g.t.Helper()
	l, err := net.Listen("unix", path)
	must(g.t, err)
	g.t.Cleanup(func() { _ = l.Close() })
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

// tells waits until a socket in the registry is reported with an error.
func (g *ground) tells(socket, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, d := range s.Drivers {
			if filepath.Base(d.Socket) == socket && strings.Contains(d.Error, message) {
				return nil
			}
		}
		return fmt.Errorf("no error of %s with %q: %+v", socket, message, s.Drivers)
	})
}

// lingers waits until a volume of a removed pod is in the status.
func (g *ground) lingers(uid, volume string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if string(v.UID) == uid && v.Volume == volume {
				return nil
			}
		}
		return fmt.Errorf("no %s of %s: %+v", volume, uid, s.Volumes)
	})
}

// serve serves on a socket until stop is called or the test ends.
func (g *ground) serve(path string, register func(*grpc.Server)) (stop func()) {
	g.t.Helper()
	l, err := net.Listen("unix", path)
	must(g.t, err)
	s := grpc.NewServer()
	register(s)
	go func() { _ = s.Serve(l) }()
	g.t.Cleanup(s.Stop)
	return s.Stop
}

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

// scripted is a driver of inline volumes with a replaceable NodePublishVolume.
type scripted struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	*ground
	name     string
	released chan struct{}
	stops    []func()

	mu      sync.Mutex
	publish func(ctx context.Context, target string) error
}

func newScripted(g *ground, name string) *scripted {
	return &scripted{ground: g, name: name, released: make(chan struct{}), publish: mountTmpfs}
}

// start starts and registers the driver.
func (d *scripted) start() {
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

func (d *scripted) stop() {
	for _, stop := range d.stops {
		stop()
	}
}

func (d *scripted) set(publish func(context.Context, string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.publish = publish
}

func (d *scripted) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d *scripted) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (d *scripted) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (d *scripted) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (d *scripted) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: nodeName}, nil
}

func (d *scripted) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.mu.Lock()
	publish := d.publish
	d.mu.Unlock()
	return &csi.NodePublishVolumeResponse{}, publish(ctx, r.GetTargetPath())
}

func (d *scripted) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	for syscall.Unmount(r.GetTargetPath(), 0) == nil { // all mounts at the path
	}
	_ = os.Remove(r.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// mountTmpfs is idempotent, because inline volumes are published repeatedly.
func mountTmpfs(_ context.Context, target string) error {
	err := os.Mkdir(target, 0o750)
	if errors.Is(err, os.ErrExist) { // it is mounted
		return nil
	}
	if err != nil {
		return err
	}
	return syscall.Mount("scripted", target, "tmpfs", 0, "size=1m")
}
