package csi_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

const (
	driverName = "fake.example.com"
	nodeName   = plugintest.NodeName
	// patience is the time limit of each wait.
	patience = time.Minute
)

// host is a fake manager: the plugin, its plugins.Host and the directories of a machine.
type host struct {
	*csi.Plugin
	*plugintest.Host
	registry string
	// changes counts the calls of Options.Changed.
	changes atomic.Int32
}

// newHost returns a host whose plugin runs until the test ends.
func newHost(t *testing.T) *host {
	t.Helper()
	h := newStoppedHost(t)
	h.start(t)
	return h
}

// newStoppedHost returns a host whose plugin does not run.
func newStoppedHost(t *testing.T) *host {
	t.Helper()
	// t.TempDir may be too long, because the path of a socket has at most 107 bytes.
	dir := plugintest.Value(os.MkdirTemp("", "host"))(t)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return &host{Host: plugintest.NewHost(filepath.Join(dir, "root")), registry: filepath.Join(dir, "registry")}
}

// start runs a new plugin until the test ends. As after a restart, it knows only the records on disk.
func (h *host) start(t *testing.T) {
	t.Helper()
	h.Plugin = csi.New(h, csi.Options{Registry: h.registry, Changed: func() { h.changes.Add(1) }})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	p := h.Plugin
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-done)
	})
}

// setSecret sets the Secret <namespace>/<name>.
func (h *host) setSecret(key string, values map[string]string) {
	h.Secrets[key] = &corev1.Secret{Data: plugintest.Bytes(values)}
}

// setDriver sets the CSIDriver object of the fake.
func (h *host) setDriver(spec storagev1.CSIDriverSpec) {
	h.CSIDrivers[driverName] = &storagev1.CSIDriver{Spec: spec}
}

// registrar is a node-driver-registrar.
type registrar struct {
	registration.UnimplementedRegistrationServer
	info     *registration.PluginInfo
	notified chan *registration.RegistrationStatus
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	select {
	case r.notified <- s:
	default:
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// startRegistrar serves a registrar in the registry. stop ends the registrar and removes its socket.
func (h *host) startRegistrar(t *testing.T, file string, info *registration.PluginInfo) (r *registrar, stop func()) {
	t.Helper()
	r = &registrar{info: info, notified: make(chan *registration.RegistrationStatus, 1)}
	must(t, os.MkdirAll(h.registry, 0o750))
	stop = serve(t, filepath.Join(h.registry, file), func(s *grpc.Server) { registration.RegisterRegistrationServer(s, r) })
	return r, stop
}

// serve serves on a Unix socket until stop is called or the test ends.
func serve(t *testing.T, path string, register func(*grpc.Server)) (stop func()) {
	t.Helper()
	listener := plugintest.Value(net.Listen("unix", path))(t)
	server := grpc.NewServer()
	register(server)
	go func() { _ = server.Serve(listener) }() // ends with Stop
	t.Cleanup(server.Stop)
	return server.Stop
}

// info returns a registrar's answer for the driver at an endpoint.
func info(name, endpoint string, versions ...string) *registration.PluginInfo {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: name, Endpoint: endpoint, SupportedVersions: versions}
}

// waitForStatus waits until the status of a socket meets a condition.
func (h *host) waitForStatus(t *testing.T, file string, ok func(csi.DriverStatus) bool) csi.DriverStatus {
	t.Helper()
	var last csi.DriverStatus
	waitFor(t, func() error {
		for _, s := range h.Drivers() {
			if filepath.Base(s.Socket) == file {
				last = s
				if ok(s) {
					return nil
				}
			}
		}
		return fmt.Errorf("%s: got status %+v, which does not meet the condition", file, last)
	})
	return last
}

// registered is a condition for waitForStatus.
func registered(s csi.DriverStatus) bool { return s.Registered && s.Problem == "" }

// registeredAs returns a condition for waitForStatus: the driver is registered and has the node ID.
func registeredAs(nodeID string) func(csi.DriverStatus) bool {
	return func(s csi.DriverStatus) bool { return registered(s) && s.NodeID == nodeID }
}

// hasError returns a condition for waitForStatus: the error contains the text.
func hasError(text string) func(csi.DriverStatus) bool {
	return func(s csi.DriverStatus) bool { return strings.Contains(s.Problem, text) }
}

// waitFor retries a function until it returns no error.
func waitFor(t *testing.T, try func() error) {
	t.Helper()
	must(t, retry.For(context.Background(), patience, func() (bool, error) {
		err := try()
		return err != nil, err
	}))
}

var (
	must          = plugintest.Must
	wantError     = plugintest.WantError
	wantCertain   = plugintest.WantCertain
	wantUncertain = plugintest.WantUncertain
	wantMissing   = plugintest.WantMissing
)

// pod returns a pod in the namespace team with the UID uid-<name>.
func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{ServiceAccountName: "builder"},
	}
}

// persistent returns a PersistentVolume of a driver.
func persistent(driver, name, handle string) *plugins.Spec {
	return &plugins.Spec{PersistentVolume: &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle}},
		},
	}}
}

// device sets volumeMode Block in a spec.
func device(spec *plugins.Spec) *plugins.Spec {
	mode := corev1.PersistentVolumeBlock
	spec.PersistentVolume.Spec.VolumeMode = &mode
	return spec
}

// inline returns an inline volume of a driver.
func inline(driver, name string, attributes map[string]string) *plugins.Spec {
	return &plugins.Spec{Volume: &corev1.Volume{
		Name:         name,
		VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver, VolumeAttributes: attributes}},
	}}
}

// setUp sets a volume up for a pod.
func (h *host) setUp(ctx context.Context, t *testing.T, spec *plugins.Spec, pod *corev1.Pod, args plugins.MounterArgs) (path string, err error) {
	t.Helper()
	m := plugintest.Value(h.NewMounter(spec, pod))(t)
	return m.Path(), m.SetUp(ctx, args)
}

// tearDown unpublishes a filesystem from a pod.
func (h *host) tearDown(t *testing.T, name string, pod *corev1.Pod) error {
	t.Helper()
	u := plugintest.Value(h.NewUnmounter(name, pod.UID))(t)
	return u.TearDown(t.Context())
}

// wantNothingLeft requires that a directory contains no file and no mount. Directories may remain,
// because the manager removes empty ones.
func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err == nil && !d.IsDir() {
			t.Errorf("got file %s, want none", path)
		}
		return err
	}))
	if at := mounts(t, dir); len(at) > 0 {
		t.Errorf("got mounts %v, want none", at)
	}
}

// mounts returns the mount points at or below a directory.
func mounts(t *testing.T, dir string) (at []string) {
	t.Helper()
	table := plugintest.Value(os.ReadFile("/proc/self/mountinfo"))(t)
	for line := range strings.Lines(string(table)) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point+"/", dir+"/") {
			at = append(at, point)
		}
	}
	return at
}
