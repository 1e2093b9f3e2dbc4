package payload_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/payload"
)

// host is what the manifests have: objects of one namespace by name.
type host struct {
	paths      plugins.Paths
	configMaps map[string]*corev1.ConfigMap
	secrets    map[string]*corev1.Secret
	token      func(audiences []string, lifetime time.Duration) (string, error)
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.RequireRoot(t)
	return hostAt(t.TempDir())
}

func hostAt(root string) *host {
	return &host{
		paths: plugins.Paths{Root: root}, configMaps: map[string]*corev1.ConfigMap{}, secrets: map[string]*corev1.Secret{},
		token: func(audiences []string, lifetime time.Duration) (string, error) {
			return fmt.Sprintf("token for %s, %s", strings.Join(audiences, ","), lifetime), nil
		},
	}
}

func (h *host) Paths() plugins.Paths { return h.paths }

func (h *host) NodeName() string { return "node-1" }

func (h *host) CSIDriver(string) *storagev1.CSIDriver { return nil }

func (h *host) ConfigMap(_, name string) (*corev1.ConfigMap, error) {
	if o, ok := h.configMaps[name]; ok {
		return o, nil
	}
	return nil, plugins.ErrNotFound
}

func (h *host) Secret(_, name string) (*corev1.Secret, error) {
	if o, ok := h.secrets[name]; ok {
		return o, nil
	}
	return nil, plugins.ErrNotFound
}

func (h *host) Token(_ *corev1.Pod, audiences []string, lifetime time.Duration) (string, time.Time, error) {
	token, err := h.token(audiences, lifetime)
	return token, time.Now().Add(lifetime), err
}

func (h *host) plugin(t *testing.T, v corev1.Volume) plugins.VolumePlugin {
	t.Helper()
	p, err := plugins.Registry(payload.New(h)).ForSpec(&plugins.Spec{Volume: &v})
	must(t, err)
	return p
}

// setUp does what the manager does, each time with what it has then.
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
	u, err := h.plugin(t, v).NewUnmounter(v.Name, newPod().UID)
	must(t, err)
	return u.TearDown(context.Background())
}

// shown sets a volume up until the test ends.
func (h *host) shown(t *testing.T, v corev1.Volume, pod *corev1.Pod, args plugins.MounterArgs) (path string) {
	t.Helper()
	path, err := h.setUp(t, v, pod, args)
	must(t, err)
	t.Cleanup(func() {
		must(t, h.tearDown(t, v))
		gone(t, path)
	})
	return path
}

func gone(t *testing.T, path string) {
	t.Helper()
	mounts, err := mount.Below(path)
	if err != nil || len(mounts) > 0 {
		t.Errorf("mounts %v, %v", mounts, err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newPod() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "4711",
		Labels: map[string]string{"tier": "front", "app": "web"}, Annotations: map[string]string{"note": "two\nlines and \"quotes\""},
	}}
}

func (h *host) configMap(name string, data map[string]string) {
	h.configMaps[name] = &corev1.ConfigMap{Data: data}
}

func (h *host) secret(name string, data map[string]string) {
	h.secrets[name] = &corev1.Secret{Data: asBytes(data)}
}

func asBytes(data map[string]string) map[string][]byte {
	b := map[string][]byte{}
	for k, v := range data {
		b[k] = []byte(v)
	}
	return b
}

func volume(source corev1.VolumeSource) corev1.Volume {
	return corev1.Volume{Name: "data", VolumeSource: source}
}

func named(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }

func configMapVolume(name string, items ...corev1.KeyToPath) corev1.Volume {
	return volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: named(name), Items: items}})
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
	return corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: named(name), Items: items}}
}

func ofSecret(name string, items ...corev1.KeyToPath) corev1.VolumeProjection {
	return corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: named(name), Items: items}}
}

func ofDownward(items ...corev1.DownwardAPIVolumeFile) corev1.VolumeProjection {
	return corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: items}}
}

func ofToken(path string) corev1.VolumeProjection {
	return corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: path}}
}

func item(key, path string) corev1.KeyToPath { return corev1.KeyToPath{Key: key, Path: path} }

func fieldItem(path, of string) corev1.DownwardAPIVolumeFile {
	return corev1.DownwardAPIVolumeFile{Path: path, FieldRef: &corev1.ObjectFieldSelector{FieldPath: of}}
}

// content is what a pod sees: files by path, through links, with mode, owner and group.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		describe(t, found, dir, e.Name())
	}
	return found
}

func describe(t *testing.T, found map[string]string, dir, name string) {
	t.Helper()
	path := filepath.Join(dir, name)
	info, err := os.Stat(path)
	must(t, err)
	st := info.Sys().(*syscall.Stat_t)
	owners := fmt.Sprintf("%s %d:%d", info.Mode(), st.Uid, st.Gid)
	if !info.IsDir() {
		b, err := os.ReadFile(path)
		must(t, err)
		found[name] = owners + " " + string(b)
		return
	}
	found[name] = owners
	entries, err := os.ReadDir(path)
	must(t, err)
	for _, e := range entries {
		describe(t, found, dir, filepath.Join(name, e.Name()))
	}
}

func wantContent(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	if got := content(t, dir); !maps.Equal(got, want) {
		t.Errorf("%s has\n%q, want\n%q", dir, got, want)
	}
}

// only makes sure that there is nothing in a volume but its version and links.
func only(t *testing.T, dir string, names int) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != names+2 {
		t.Errorf("%d names and a version are %v, %v", names, entries, err)
	}
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerDir); dir != "" {
		writeForever(dir)
	}
	testenv.Main(m)
}
