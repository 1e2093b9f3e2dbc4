package csi_test

import (
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

func TestRegistration(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	spec := persistent(driverName, "pv", "handle")
	_, err := h.NeedsDeviceMount(spec)
	certain(t, err, driverName, "not registered", h.registry)

	r, stop := h.announce(t, "fake-reg.sock", info(driverName, f.path, "0.3", "1.2.0"))
	s := h.status(t, "fake-reg.sock", registered)
	if s.NodeID != "fake-node" || s.MaxVolumes != 7 || s.Topology["zone"] != "here" || !slices.Contains(s.Capabilities, "Node/STAGE_UNSTAGE_VOLUME") {
		t.Errorf("status %+v", s)
	}
	if told := <-r.told; !told.GetPluginRegistered() {
		t.Errorf("the registrar was told %v", told)
	}
	if needs, err := h.NeedsDeviceMount(spec); !needs || err != nil {
		t.Errorf("the driver stages: %v, %v", needs, err)
	}
	if limit, of := h.AttachLimit(spec); limit != 7 || of != driverName {
		t.Errorf("attach limit %d of %s", limit, of)
	}

	stop()
	waitFor(t, func() error {
		if _, err := h.NeedsDeviceMount(spec); err == nil {
			return os.ErrExist
		}
		return nil
	})
	if all := h.Drivers(); len(all) != 0 {
		t.Errorf("drivers: %+v", all)
	}
}

// TestRefusedRegistration: the registrar of an invalid driver gets the error, which is in the status.
// Other drivers are registered.
func TestRefusedRegistration(t *testing.T) {
	h, f := registeredFake(t)
	for name, tc := range map[string]struct {
		info *registration.PluginInfo
		want string
	}{
		"type":     {&registration.PluginInfo{Type: registration.DevicePlugin, Name: "gpu"}, "CSIPlugin"},
		"version":  {info("old.example.com", f.path, "0.3.0", "2.0"), "1.x"},
		"name":     {info("../evil", f.path, "1.0.0"), "domain name"},
		"reserved": {info("volumeDevices", f.path, "1.0.0"), "domain name"},
		"other":    {info("other.example.com", f.path, "1.0.0"), driverName},
		"endpoint": {info("missing.example.com", f.path+".missing", "1.0.0"), "no such file"},
		"twice":    {info(driverName, f.path, "1.0.0"), "registered already"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := h.announce(t, name+".sock", tc.info)
			if told := <-r.told; told.GetPluginRegistered() || told.GetError() == "" {
				t.Errorf("the registrar was told %v", told)
			}
			h.status(t, name+".sock", failing(tc.want))
		})
	}
	if _, err := h.NeedsDeviceMount(persistent(driverName, "pv", "handle")); err != nil {
		t.Errorf("the registered driver: %v", err)
	}
}

// TestLongPaths: the error of a socket with a long path states the limit.
func TestLongPaths(t *testing.T) {
	h, f := registeredFake(t)
	long := filepath.Join(filepath.Dir(f.path), strings.Repeat("d", 100))
	h.announce(t, "long.sock", info("long.example.com", filepath.Join(long, "csi.sock"), "1.0.0"))
	h.status(t, "long.sock", failing("the maximum is 107"))
	h.status(t, "long.sock", failing(long+"/csi.sock"))

	h.registry = long
	must(t, os.Mkdir(long, 0o750))
	h.start(t)
	// The path in a container may be shorter.
	short := filepath.Join(filepath.Dir(f.path), "short")
	must(t, os.Symlink(long, short))
	serve(t, filepath.Join(short, "fake-reg.sock"), func(*grpc.Server) {})
	h.status(t, "fake-reg.sock", failing("the maximum is 107"))
	h.status(t, "fake-reg.sock", failing("--plugins-registry"))
}

// TestWithoutInotify: without inotify, drivers are registered and removed at the next scan.
func TestWithoutInotify(t *testing.T) {
	testenv.RequireRoot(t)
	const inside = "TRIVET_TEST_WITHOUT_INOTIFY"
	if os.Getenv(inside) == "" {
		// The limit is that of a user namespace (user_namespaces(7), namespaces(7)).
		again := exec.Command("/proc/self/exe", "-test.run=^TestWithoutInotify$")
		again.Env = append(os.Environ(), inside+"=1")
		ids := []syscall.SysProcIDMap{{Size: 1}}
		again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
		out, err := again.CombinedOutput()
		if said := strings.Count(string(out), "max_user_instances"); err != nil || said != 1 {
			t.Errorf("%v; logged %d times:\n%s", err, said, out)
		}
		return
	}
	must(t, os.WriteFile("/proc/sys/user/max_inotify_instances", []byte("0"), 0))
	h := newMachine(t)
	f := newFake(t, h)
	_, stop := h.announce(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.start(t)
	h.status(t, "fake-reg.sock", registered)
	stop()
	waitFor(t, func() error {
		if all := h.Drivers(); len(all) > 0 {
			return fmt.Errorf("drivers: %+v", all)
		}
		return nil
	})
}

// TestDeadSocket: a socket without a listener is retried.
func TestDeadSocket(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	path := filepath.Join(h.registry, "fake-reg.sock")
	must(t, os.MkdirAll(h.registry, 0o750))
	listener := plugintest.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	listener.SetUnlinkOnClose(false)
	must(t, listener.Close())
	h.status(t, "fake-reg.sock", failing("connection refused"))
	must(t, os.Remove(path))
	h.announce(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.status(t, "fake-reg.sock", registered)
}

// TestNewerVersion: of two drivers with one name, the one with the higher version is used. When it is
// removed, the other one is used again.
func TestNewerVersion(t *testing.T) {
	h, f := registeredFake(t)
	newer := &fake{path: f.path + "2", name: driverName, nodeID: "newer", ready: true, script: f.script, requests: map[string]any{}}
	newer.start(t)
	_, stop := h.announce(t, "newer-reg.sock", info(driverName, newer.path, "1.1.0"))
	h.status(t, "newer-reg.sock", registered)
	h.status(t, "fake-reg.sock", failing("registered already, at "+newer.path))
	stop()
	h.status(t, "fake-reg.sock", registered)
}

// TestNotReady: a driver that is not ready is registered once it is.
func TestNotReady(t *testing.T) {
	h := newHost(t)
	f := newFake(t, h)
	f.set(func() { f.ready = false })
	h.announce(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
	h.status(t, "fake-reg.sock", failing("not ready"))
	f.set(func() { f.ready = true })
	h.status(t, "fake-reg.sock", registered)
}

// TestDriverRestarts: a driver is queried again after a restart; its registrar's socket stays.
func TestDriverRestarts(t *testing.T) {
	h, f := registeredFake(t)
	f.stop()
	_, err := h.setUp(t.Context(), t, persistent(driverName, "pv", "handle"), pod("one"), plugins.MounterArgs{})
	uncertain(t, err, "Unavailable")
	f.set(func() { f.nodeID, f.nodeCan = "renamed", []csi.NodeServiceCapability_RPC_Type{} })
	f.start(t)
	h.status(t, "fake-reg.sock", registeredAs("renamed"))
	waitFor(t, func() error {
		if n := h.changes.Load(); n < 2 {
			return fmt.Errorf("%d changes after registration and restart", n)
		}
		return nil
	})
	if needs, err := h.NeedsDeviceMount(persistent(driverName, "pv", "handle")); needs || err != nil {
		t.Errorf("the driver no longer stages: %v, %v", needs, err)
	}

	f.stop()
	f.set(func() { f.name = "impostor.example.com" })
	f.start(t)
	h.status(t, "fake-reg.sock", failing("impostor.example.com"))
	_, err = h.NeedsDeviceMount(persistent(driverName, "pv", "handle"))
	certain(t, err, "impostor.example.com")

	f.stop()
	f.set(func() { f.name = driverName })
	f.start(t)
	h.status(t, "fake-reg.sock", registered)
	must(t, h.tearDown(t, "pv", pod("one")))
	nothingLeft(t, h.Root)
}
