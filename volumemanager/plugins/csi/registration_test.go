package csi_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestRegistration: a driver can be used while its registrar's socket exists.
func TestRegistration(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	spec := persistent(driverName, "pv", "handle")
	_, err := h.NeedsDeviceMount(spec)
	wantCertain(t, err, driverName, "not registered", h.registry)

	r, stop := h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "0.3", "1.2.0"))
	s := h.waitForStatus(t, "fake-reg.sock", registered)
	if s.NodeID != "fake-node" || s.MaxVolumes != 7 || s.Topology["zone"] != "here" || !slices.Contains(s.Capabilities, "Node/STAGE_UNSTAGE_VOLUME") {
		t.Errorf("got status %+v, want the answers of the fake driver", s)
	}
	if result := <-r.notified; !result.GetPluginRegistered() {
		t.Errorf("got registration status %v, want registered", result)
	}
	if needs, err := h.NeedsDeviceMount(spec); !needs || err != nil {
		t.Errorf("NeedsDeviceMount of a driver that stages: got %v, %v; want true", needs, err)
	}
	if limit, of := h.AttachLimit(spec); limit != 7 || of != driverName {
		t.Errorf("got attach limit %d of driver %s, want 7 of %s", limit, of, driverName)
	}

	stop()
	waitFor(t, func() error {
		if _, err := h.NeedsDeviceMount(spec); err == nil {
			return errors.New("the driver is still registered")
		}
		if all := h.Drivers(); len(all) != 0 {
			return fmt.Errorf("got drivers %+v, want none", all)
		}
		return nil
	})
}

// TestRefusedRegistration: the registrar of an invalid driver is notified of the error, and the status
// contains the error. Other drivers stay registered.
func TestRefusedRegistration(t *testing.T) {
	h, f := registeredFake(t)
	for name, tc := range map[string]struct {
		info *registration.PluginInfo
		want string
	}{
		"another type":               {&registration.PluginInfo{Type: registration.DevicePlugin, Name: "gpu"}, "CSIPlugin"},
		"no supported version":       {info("old.example.com", f.path, "0.3.0", "2.0"), "1.x"},
		"invalid name":               {info("../evil", f.path, "1.0.0"), "domain name"},
		"reserved name":              {info("volumeDevices", f.path, "1.0.0"), "domain name"},
		"endpoint of another driver": {info("other.example.com", f.path, "1.0.0"), driverName},
		"no socket at the endpoint":  {info("missing.example.com", f.path+".missing", "1.0.0"), "no such file"},
		"name of another driver":     {info(driverName, f.path, "1.0.0"), "registered already"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := h.startRegistrar(t, "refused.sock", tc.info)
			if result := <-r.notified; result.GetPluginRegistered() || result.GetError() == "" {
				t.Errorf("got registration status %v, want an error", result)
			}
			h.waitForStatus(t, "refused.sock", hasError(tc.want))
		})
	}
	if _, err := h.NeedsDeviceMount(persistent(driverName, "pv", "handle")); err != nil {
		t.Errorf("a driver that was registered before: got %v, want no error", err)
	}
}

// TestLongPaths: the error for a socket whose path is too long contains the limit.
func TestLongPaths(t *testing.T) {
	h, f := registeredFake(t)
	long := filepath.Join(filepath.Dir(f.path), strings.Repeat("d", 100))
	h.startRegistrar(t, "long.sock", info("long.example.com", filepath.Join(long, "csi.sock"), "1.0.0"))
	h.waitForStatus(t, "long.sock", hasError("the maximum is 107"))
	h.waitForStatus(t, "long.sock", hasError(long+"/csi.sock"))

	h.registry = long
	must(t, os.Mkdir(long, 0o750))
	h.start(t)
	// The registrar listens at a shorter path, as it may in its container.
	short := filepath.Join(filepath.Dir(f.path), "short")
	must(t, os.Symlink(long, short))
	serve(t, filepath.Join(short, "fake-reg.sock"), func(*grpc.Server) {})
	h.waitForStatus(t, "fake-reg.sock", hasError("the maximum is 107"))
	h.waitForStatus(t, "fake-reg.sock", hasError("--plugins-registry"))
}

// TestWithoutInotify: without inotify, drivers are registered and removed at the next scan.
func TestWithoutInotify(t *testing.T) {
	testenv.RequireRoot(t)
	const inside = "TRIVET_TEST_WITHOUT_INOTIFY"
	if os.Getenv(inside) == "" {
		// The limit of inotify instances can be set for a user namespace (user_namespaces(7)).
		child := exec.Command("/proc/self/exe", "-test.run=^TestWithoutInotify$")
		child.Env = append(os.Environ(), inside+"=1")
		ids := []syscall.SysProcIDMap{{Size: 1}}
		child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
		out, err := child.CombinedOutput()
		if logged := strings.Count(string(out), "max_user_instances"); err != nil || logged != 1 {
			t.Errorf("child process: got error %v and the remedy logged %d times, want once:\n%s", err, logged, out)
		}
		return
	}
	must(t, os.WriteFile("/proc/sys/user/max_inotify_instances", []byte("0"), 0))
	h := newStoppedHost(t)
	f := newFake(t, h)
	_, stop := h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.start(t)
	h.waitForStatus(t, "fake-reg.sock", registered)
	stop()
	waitFor(t, func() error {
		if all := h.Drivers(); len(all) > 0 {
			return fmt.Errorf("got drivers %+v, want none", all)
		}
		return nil
	})
}

// TestDeadSocket: a socket without a listener is in the status with its error. A registrar that replaces
// the socket is registered.
func TestDeadSocket(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	path := filepath.Join(h.registry, "fake-reg.sock")
	must(t, os.MkdirAll(h.registry, 0o750))
	listener := plugintest.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	listener.SetUnlinkOnClose(false)
	must(t, listener.Close())
	h.waitForStatus(t, "fake-reg.sock", hasError("connection refused"))
	must(t, os.Remove(path))
	h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.waitForStatus(t, "fake-reg.sock", registered)
}

// TestNewerVersion: of two drivers with one name, the driver with the higher version is used. After the
// registrar of that driver has stopped, the other driver is used again.
func TestNewerVersion(t *testing.T) {
	h, f := registeredFake(t)
	newer := &fake{path: f.path + "2", name: driverName, nodeID: "newer", ready: true, replaced: f.replaced, requests: map[string]any{}}
	newer.start(t)
	_, stop := h.startRegistrar(t, "newer-reg.sock", info(driverName, newer.path, "1.1.0"))
	h.waitForStatus(t, "newer-reg.sock", registered)
	h.waitForStatus(t, "fake-reg.sock", hasError("registered already, at "+newer.path))
	stop()
	h.waitForStatus(t, "fake-reg.sock", registered)
}

// TestNotReady: a driver is registered once it is ready.
func TestNotReady(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	f.change(func() { f.ready = false })
	h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.waitForStatus(t, "fake-reg.sock", hasError("not ready"))
	f.change(func() { f.ready = true })
	h.waitForStatus(t, "fake-reg.sock", registered)
}

// TestDriverRestarts: a driver is queried again after a restart, although its registrar does not restart.
func TestDriverRestarts(t *testing.T) {
	h, f := registeredFake(t)
	f.stop()
	_, err := h.setUp(t.Context(), t, persistent(driverName, "pv", "handle"), pod("one"), plugins.MounterArgs{})
	wantUncertain(t, err, "Unavailable")
	f.change(func() { f.nodeID, f.nodeCan = "renamed", []csi.NodeServiceCapability_RPC_Type{} })
	f.start(t)
	h.waitForStatus(t, "fake-reg.sock", registeredAs("renamed"))
	waitFor(t, func() error {
		if n := h.changes.Load(); n < 2 {
			return fmt.Errorf("got %d calls of Changed after registration and restart, want 2", n)
		}
		return nil
	})
	if needs, err := h.NeedsDeviceMount(persistent(driverName, "pv", "handle")); needs || err != nil {
		t.Errorf("NeedsDeviceMount of a driver that no longer stages: got %v, %v; want false", needs, err)
	}

	f.stop()
	f.change(func() { f.name = "impostor.example.com" })
	f.start(t)
	h.waitForStatus(t, "fake-reg.sock", hasError("impostor.example.com"))
	_, err = h.NeedsDeviceMount(persistent(driverName, "pv", "handle"))
	wantCertain(t, err, "impostor.example.com")

	f.stop()
	f.change(func() { f.name = driverName })
	f.start(t)
	h.waitForStatus(t, "fake-reg.sock", registered)
	must(t, h.tearDown(t, "pv", pod("one")))
	wantNothingLeft(t, h.Root)
}
