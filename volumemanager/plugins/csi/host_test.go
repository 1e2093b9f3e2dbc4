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

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
)

const (
	driverName = "fake.example.com"
	nodeName   = "node-1"
	// patience is how long anything may take that is waited for.
	patience = time.Minute
)

// host is a manager's side of the plugin, and the directories of a machine.
type host struct {
	*csi.Plugin
	root, registry string
	secrets        map[string]map[string]string
	objects        map[string]*storagev1.CSIDriver
	changes        atomic.Int32
}

// newHost runs a plugin on a machine of its own until the test ends.
func newHost(t *testing.T) *host {
	t.Helper()
	h := newMachine(t)
	h.start(t)
	return h
}

// newMachine is a host without a plugin.
func newMachine(t *testing.T) *host {
	t.Helper()
	// Names of sockets have 107 bytes at most: the test's own directory may be too long.
	dir, err := os.MkdirTemp("", "host")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return &host{
		root: filepath.Join(dir, "root"), registry: filepath.Join(dir, "registry"),
		secrets: map[string]map[string]string{}, objects: map[string]*storagev1.CSIDriver{},
	}
}

// start is a manager that knows nothing but what the disk has.
func (h *host) start(t *testing.T) {
	t.Helper()
	h.Plugin = csi.New(h, csi.Options{Registry: h.registry, Changed: func() { h.changes.Add(1) }})
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error)
	p := h.Plugin
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		end()
		must(t, <-done)
	})
}

func (h *host) Paths() plugins.Paths { return plugins.Paths{Root: h.root} }
func (h *host) NodeName() string     { return nodeName }

func (h *host) ConfigMap(string, string) (*corev1.ConfigMap, error) {
	return nil, plugins.ErrNotFound
}

func (h *host) Secret(namespace, name string) (*corev1.Secret, error) {
	values, ok := h.secrets[namespace+"/"+name]
	if !ok {
		return nil, plugins.ErrNotFound
	}
	data := map[string][]byte{}
	for key, value := range values {
		data[key] = []byte(value)
	}
	return &corev1.Secret{Data: data}, nil
}

func (h *host) CSIDriver(name string) *storagev1.CSIDriver { return h.objects[name] }

func (h *host) Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (string, time.Time, error) {
	token := fmt.Sprintf("token of %s for %s, %s", pod.UID, strings.Join(audiences, ","), lifetime)
	return token, time.Unix(0, 0).Add(lifetime), nil
}

// registrar is what a node-driver-registrar serves.
type registrar struct {
	registration.UnimplementedRegistrationServer
	info *registration.PluginInfo
	told chan *registration.RegistrationStatus
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	select {
	case r.told <- s:
	default:
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// announce serves a registrar in the registry. stop removes its socket, as one does that
// ends.
func (h *host) announce(t *testing.T, file string, info *registration.PluginInfo) (r *registrar, stop func()) {
	t.Helper()
	r = &registrar{info: info, told: make(chan *registration.RegistrationStatus, 1)}
	must(t, os.MkdirAll(h.registry, 0o750))
	stop = serve(t, filepath.Join(h.registry, file), func(s *grpc.Server) { registration.RegisterRegistrationServer(s, r) })
	return r, stop
}

// serve listens on a Unix socket until the test ends, or stop.
func serve(t *testing.T, path string, register func(*grpc.Server)) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	must(t, err)
	server := grpc.NewServer()
	register(server)
	go func() { _ = server.Serve(listener) }() // ends with Stop
	t.Cleanup(server.Stop)
	return server.Stop
}

// info is a registrar's answer for the driver at an endpoint.
func info(name, endpoint string, versions ...string) *registration.PluginInfo {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: name, Endpoint: endpoint, SupportedVersions: versions}
}

// status waits for a state of a socket.
func (h *host) status(t *testing.T, file string, ok func(csi.DriverStatus) bool) csi.DriverStatus {
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
		return fmt.Errorf("%s: %+v", file, last)
	})
	return last
}

func registered(s csi.DriverStatus) bool { return s.Registered && s.Error == "" }

func failing(text string) func(csi.DriverStatus) bool {
	return func(s csi.DriverStatus) bool { return strings.Contains(s.Error, text) }
}

// waitFor tries until there is no error.
func waitFor(t *testing.T, try func() error) {
	t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-limit.C:
			t.Fatalf("still so after %v: %v", patience, err)
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

// wantError wants an error with words in it.
func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q lacks %q", err, w)
		}
	}
}

// certain wants an error after which all is as it was; uncertain one after which it may
// not be.
func certain(t *testing.T, err error, words ...string) {
	t.Helper()
	wantError(t, err, words...)
	if plugins.Uncertain(err) {
		t.Errorf("%v: it is uncertain", err)
	}
}

func uncertain(t *testing.T, err error, words ...string) {
	t.Helper()
	wantError(t, err, words...)
	if !plugins.Uncertain(err) {
		t.Errorf("%v: it is not uncertain", err)
	}
}

func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{ServiceAccountName: "builder"},
	}
}

// persistent is a PersistentVolume of a driver.
func persistent(driver, name, handle string) *plugins.Spec {
	return &plugins.Spec{PersistentVolume: &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle}},
		},
	}}
}

// device makes a raw device of a spec.
func device(spec *plugins.Spec) *plugins.Spec {
	mode := corev1.PersistentVolumeBlock
	spec.PersistentVolume.Spec.VolumeMode = &mode
	return spec
}

func inline(driver, name string, attributes map[string]string) *plugins.Spec {
	return &plugins.Spec{Volume: &corev1.Volume{
		Name:         name,
		VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver, VolumeAttributes: attributes}},
	}}
}

// setUp sets a volume up for a pod.
func (h *host) setUp(ctx context.Context, t *testing.T, spec *plugins.Spec, pod *corev1.Pod, args plugins.MounterArgs) (path string, err error) {
	t.Helper()
	m, err := h.NewMounter(spec, pod)
	must(t, err)
	return m.Path(), m.SetUp(ctx, args)
}

func (h *host) tearDown(t *testing.T, name string, pod *corev1.Pod) error {
	t.Helper()
	u, err := h.NewUnmounter(name, pod.UID)
	must(t, err)
	return u.TearDown(t.Context())
}

// nothingLeft wants no file and no mount below a directory; empty directories are the
// manager's.
func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err == nil && !d.IsDir() {
			t.Errorf("left behind: %s", path)
		}
		return err
	}))
	if at := mounts(t, dir); len(at) > 0 {
		t.Errorf("left mounted: %v", at)
	}
}

// mounts are those at or below a directory.
func mounts(t *testing.T, dir string) (at []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(table)) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point+"/", dir+"/") {
			at = append(at, point)
		}
	}
	return at
}

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is there: %v", path, err)
	}
}

func registeredAs(nodeID string) func(csi.DriverStatus) bool {
	return func(s csi.DriverStatus) bool { return registered(s) && s.NodeID == nodeID }
}
