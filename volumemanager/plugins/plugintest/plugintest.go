// Package plugintest contains a Host and the checks that the tests of several volume plugins use.
// Only tests import it.
package plugintest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NodeName is the node of a Host.
const NodeName = "node-1"

// Host is a fake plugins.Host that returns the objects in its maps. The keys of ConfigMaps and Secrets
// are <namespace>/<name>.
type Host struct {
	Root       string
	ConfigMaps map[string]*corev1.ConfigMap
	Secrets    map[string]*corev1.Secret
	CSIDrivers map[string]*storagev1.CSIDriver
	// Tokens returns the tokens. If it is nil, the text of a token describes its request.
	Tokens func() string
}

// NewHost returns a Host without objects.
func NewHost(root string) *Host {
	return &Host{Root: root, ConfigMaps: map[string]*corev1.ConfigMap{}, Secrets: map[string]*corev1.Secret{}, CSIDrivers: map[string]*storagev1.CSIDriver{}}
}

// Paths returns the paths below Root.
func (h *Host) Paths() plugins.Paths { return plugins.Paths{Root: h.Root} }

// NodeName returns node-1.
func (h *Host) NodeName() string { return NodeName }

// ConfigMap returns an object in ConfigMaps.
func (h *Host) ConfigMap(namespace, name string) (*corev1.ConfigMap, error) {
	return find(h.ConfigMaps, namespace+"/"+name)
}

// Secret returns an object in Secrets.
func (h *Host) Secret(namespace, name string) (*corev1.Secret, error) {
	return find(h.Secrets, namespace+"/"+name)
}

func find[T any](all map[string]*T, key string) (*T, error) {
	if o := all[key]; o != nil {
		return o, nil
	}
	return nil, plugins.ErrNotFound
}

// CSIDriver returns an object in CSIDrivers.
func (h *Host) CSIDriver(name string) *storagev1.CSIDriver { return h.CSIDrivers[name] }

// Token returns a token whose lifetime starts at the Unix epoch.
func (h *Host) Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (string, time.Time, error) {
	token := fmt.Sprintf("token of %s for %s, %s", pod.UID, strings.Join(audiences, ","), lifetime)
	if h.Tokens != nil {
		token = h.Tokens()
	}
	return token, time.Unix(0, 0).Add(lifetime), nil
}

// Bytes converts strings to the data of a Secret.
func Bytes(data map[string]string) map[string][]byte {
	all := map[string][]byte{}
	for key, value := range data {
		all[key] = []byte(value)
	}
	return all
}

// Must fails the test immediately if there is an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Value is Must for a function with a result: Value(f())(t) returns the result of f.
func Value[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		Must(t, err)
		return v
	}
}

// WantError requires an error whose text contains all words. It ends the test if there is no error.
func WantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("got no error, want one that contains %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("got error %q, want one that contains %q", err, w)
		}
	}
}

// WantInvalid is WantError for a *plugins.InvalidError.
func WantInvalid(t *testing.T, err error, words ...string) {
	t.Helper()
	WantError(t, err, words...)
	if _, ok := errors.AsType[*plugins.InvalidError](err); !ok {
		t.Errorf("got error %v, want an InvalidError", err)
	}
}

// WantCertain is WantError for an error that is not a *plugins.UncertainError.
func WantCertain(t *testing.T, err error, words ...string) {
	t.Helper()
	WantError(t, err, words...)
	if plugins.Uncertain(err) {
		t.Errorf("got error %v, which is an UncertainError; want another error", err)
	}
}

// WantUncertain is WantError for a *plugins.UncertainError.
func WantUncertain(t *testing.T, err error, words ...string) {
	t.Helper()
	WantError(t, err, words...)
	if !plugins.Uncertain(err) {
		t.Errorf("got error %v, want an UncertainError", err)
	}
}

// WantText requires that a file exists with exactly the content want.
func WantText(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s: got content %q, %v; want %q", path, b, err, want)
	}
}

// WantEntries requires a directory with n entries.
func WantEntries(t *testing.T, dir string, n int) {
	t.Helper()
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != n {
		t.Errorf("%s: got entries %v, %v; want %d entries", dir, entries, err, n)
	}
}

// WantMissing requires that a path does not exist.
func WantMissing(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: Lstat returned %v, want that the path does not exist", path, err)
	}
}

// MountAt returns the mount at a path; nil if there is none.
func MountAt(t *testing.T, path string) *mount.Entry {
	t.Helper()
	return Value(mount.OnPath(path))(t)
}
