package flexvolume_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/flexvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// machine is a host with a directory of drivers.
type machine struct {
	*plugintest.Host
	t   *testing.T
	dir string
	log string // file with the calls that the driver got
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	return &machine{plugintest.NewHost(t.TempDir()), t, t.TempDir(), filepath.Join(t.TempDir(), "calls")}
}

// registry returns a registry with a new plugin, as after a restart of the manager.
func (m *machine) registry() plugins.Registry {
	return plugins.Registry{flexvolume.New(m.Host, mount.NewNFSUnmounter(), m.dir, nil)}
}

// of returns the plugin of a spec.
func (m *machine) of(spec *plugins.Spec) plugins.AttachableVolumePlugin {
	m.t.Helper()
	p := plugintest.Value(m.registry().ForSpec(spec))(m.t)
	return p.(plugins.AttachableVolumePlugin)
}

// install installs the driver acme/disk, a shell script with a case for each call. It logs each call
// with its arguments.
func (m *machine) install(cases ...string) {
	m.t.Helper()
	dir := filepath.Join(m.dir, "acme~disk")
	must(m.t, os.MkdirAll(dir, 0o755))
	script := fmt.Sprintf(`#!/bin/sh
ok() { echo '{"status":"Success"}'; exit; }
for word; do printf '%%s\t' "$word"; done >>%[1]s; echo >>%[1]s
case $1 in
%s
esac
echo '{"status":"Not supported"}'; exit 1
`, m.log, strings.Join(cases, "\n"))
	file := filepath.Join(dir, "disk")
	must(m.t, os.WriteFile(file+".new", []byte(script), 0o755))
	must(m.t, os.Rename(file+".new", file))
}

// calls returns the calls that the driver got since the previous call of calls. Options are replaced by
// the word OPTIONS.
func (m *machine) calls() []string {
	m.t.Helper()
	b := plugintest.Value(os.ReadFile(m.log))(m.t)
	must(m.t, os.Remove(m.log))
	var calls []string
	for line := range strings.Lines(string(b)) {
		words := strings.Split(strings.TrimSuffix(line, "\t\n"), "\t")
		for i, word := range words {
			if strings.HasPrefix(word, "{") {
				words[i] = "OPTIONS"
			}
		}
		calls = append(calls, strings.Join(words, " "))
	}
	return calls
}

// wantCalls requires that calls returns these calls.
func (m *machine) wantCalls(want ...string) {
	m.t.Helper()
	if got := m.calls(); !slices.Equal(got, want) {
		m.t.Errorf("got calls %q, want %q", got, want)
	}
}

// setUp sets a volume up for the pod, and returns its path.
func (m *machine) setUp(spec *plugins.Spec, args plugins.MounterArgs) (string, error) {
	m.t.Helper()
	mounter, err := m.of(spec).NewMounter(spec, pod)
	if err != nil {
		return "", err
	}
	return mounter.Path(), mounter.SetUp(m.t.Context(), args)
}

// tearDown tears down the volume at a path. It uses no spec.
func (m *machine) tearDown(path string) error {
	m.t.Helper()
	p := plugintest.Value(m.registry().ByName(plugins.Unescape(filepath.Base(filepath.Dir(path)))))(m.t)
	u := plugintest.Value(p.NewUnmounter(filepath.Base(path), pod.UID))(m.t)
	return u.TearDown(m.t.Context())
}

// unmountLater unmounts a path when the test ends.
func unmountLater(t *testing.T, path string) {
	t.Helper()
	t.Cleanup(func() {
		if at, err := mount.OnPath(path); at != nil || err != nil {
			must(t, mount.Unmount(path))
		}
	})
}

var pod = &corev1.Pod{
	ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "11111111-2222-3333-4444-555555555555"},
	Spec:       corev1.PodSpec{ServiceAccountName: "seller"},
}

func persistent(source corev1.FlexPersistentVolumeSource) *plugins.Spec {
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}}
	pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("320Mi")}
	pv.Spec.FlexVolume = &source
	return &plugins.Spec{PersistentVolume: pv}
}

func inline(name string, source corev1.FlexVolumeSource) *plugins.Spec {
	return &plugins.Spec{Volume: &corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{FlexVolume: &source}}}
}

var must = plugintest.Must
