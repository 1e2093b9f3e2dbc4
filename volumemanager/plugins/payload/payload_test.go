package payload_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/payload"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// host is a fake host whose objects are in the namespace shop.
type host struct{ *plugintest.Host }

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.RequireRoot(t)
	return hostAt(t.TempDir())
}

// hostAt returns a host without objects whose root directory is root.
func hostAt(root string) *host { return &host{plugintest.NewHost(root)} }

// plugin returns the plugin of a volume.
func (h *host) plugin(t *testing.T, v corev1.Volume) plugins.VolumePlugin {
	t.Helper()
	return plugintest.Value(plugins.Registry(payload.New(h)).ForSpec(&plugins.Spec{Volume: &v}))(t)
}

// setUp sets a volume up with the current content of the manifests.
func (h *host) setUp(t *testing.T, v corev1.Volume, pod *corev1.Pod, args plugins.MounterArgs) (path string, err error) {
	t.Helper()
	m, err := h.plugin(t, v).NewMounter(&plugins.Spec{Volume: &v}, pod)
	if err != nil {
		return "", err
	}
	return m.Path(), m.SetUp(t.Context(), args)
}

func (h *host) tearDown(t *testing.T, v corev1.Volume) error {
	t.Helper()
	u := plugintest.Value(h.plugin(t, v).NewUnmounter(v.Name, newPod().UID))(t)
	return u.TearDown(context.Background())
}

// mount sets a volume up until the test ends.
func (h *host) mount(t *testing.T, v corev1.Volume, pod *corev1.Pod, args plugins.MounterArgs) (path string) {
	t.Helper()
	path = plugintest.Value(h.setUp(t, v, pod, args))(t)
	t.Cleanup(func() {
		must(t, h.tearDown(t, v))
		wantRemoved(t, path)
	})
	return path
}

// wantRemoved requires that a path does not exist and is no mount point.
func wantRemoved(t *testing.T, path string) {
	t.Helper()
	if mounts := plugintest.Value(mount.Below(path))(t); len(mounts) > 0 {
		t.Errorf("%s: got mounts %v, want none", path, mounts)
	}
	plugintest.WantMissing(t, path)
}

var must = plugintest.Must

func newPod() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "4711",
		Labels: map[string]string{"tier": "front", "app": "web"}, Annotations: map[string]string{"note": "two\nlines and \"quotes\""},
	}}
}

func (h *host) configMap(name string, data map[string]string) {
	h.ConfigMaps["shop/"+name] = &corev1.ConfigMap{Data: data}
}

func (h *host) secret(name string, data map[string]string) {
	h.Secrets["shop/"+name] = &corev1.Secret{Data: plugintest.Bytes(data)}
}

// setBoth gives the ConfigMap web and the Secret web the same content.
func (h *host) setBoth(data map[string]string) {
	h.configMap("web", data)
	h.secret("web", data)
}

// onDiskAndInMemory returns volumes of the ConfigMap web and of the Secret web.
func onDiskAndInMemory() map[string]corev1.Volume {
	return map[string]corev1.Volume{"on disk": configMapVolume("web"), "in memory": secretVolume("web")}
}

func volume(source corev1.VolumeSource) corev1.Volume {
	return corev1.Volume{Name: "data", VolumeSource: source}
}

func reference(name string) corev1.LocalObjectReference {
	return corev1.LocalObjectReference{Name: name}
}

func configMapVolume(name string, items ...corev1.KeyToPath) corev1.Volume {
	return volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: reference(name), Items: items}})
}

func secretVolume(name string, items ...corev1.KeyToPath) corev1.Volume {
	return volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name, Items: items}})
}

func downwardVolume(items ...corev1.DownwardAPIVolumeFile) corev1.Volume {
	return volume(corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: items}})
}

func projectedVolume(sources ...corev1.VolumeProjection) corev1.Volume {
	return volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: sources}})
}

func ofConfigMap(name string, items ...corev1.KeyToPath) corev1.VolumeProjection {
	return corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: reference(name), Items: items}}
}

func ofSecret(name string, items ...corev1.KeyToPath) corev1.VolumeProjection {
	return corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: reference(name), Items: items}}
}

func ofDownward(items ...corev1.DownwardAPIVolumeFile) corev1.VolumeProjection {
	return corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: items}}
}

func ofToken(path string) corev1.VolumeProjection {
	return corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: path}}
}

func item(key, path string) corev1.KeyToPath { return corev1.KeyToPath{Key: key, Path: path} }

func fieldItem(path, field string) corev1.DownwardAPIVolumeFile {
	return corev1.DownwardAPIVolumeFile{Path: path, FieldRef: &corev1.ObjectFieldSelector{FieldPath: field}}
}

// content returns mode, owner, group and text of each file that a pod sees, by path. It follows links.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	entries := plugintest.Value(os.ReadDir(dir))(t)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		describe(t, found, dir, e.Name())
	}
	return found
}

// describe adds a file, or a directory with its files, to found.
func describe(t *testing.T, found map[string]string, dir, name string) {
	t.Helper()
	path := filepath.Join(dir, name)
	info := plugintest.Value(os.Stat(path))(t)
	st := info.Sys().(*syscall.Stat_t)
	owners := fmt.Sprintf("%s %d:%d", info.Mode(), st.Uid, st.Gid)
	if !info.IsDir() {
		b := plugintest.Value(os.ReadFile(path))(t)
		found[name] = owners + " " + string(b)
		return
	}
	found[name] = owners
	entries := plugintest.Value(os.ReadDir(path))(t)
	for _, e := range entries {
		describe(t, found, dir, filepath.Join(name, e.Name()))
	}
}

func wantContent(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	if got := content(t, dir); !maps.Equal(got, want) {
		t.Errorf("%s: got content\n%q, want\n%q", dir, got, want)
	}
}

// wantLinks requires that a volume contains n links for users, one version, ..data, and nothing else.
func wantLinks(t *testing.T, dir string, n int) {
	t.Helper()
	plugintest.WantEntries(t, dir, n+2)
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerDir); dir != "" {
		writeForever(dir)
	}
	testenv.Main(m)
}
