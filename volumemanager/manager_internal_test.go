package volumemanager

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

var must = plugintest.Must

// newTestManager returns a manager with new directories. Its parts are not running.
func newTestManager(t *testing.T, ctx context.Context) *Manager {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm") // a short path, because the path of a socket has at most 107 bytes
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := Options{Manifests: filepath.Join(dir, "manifests"), RootDir: dir, Registry: filepath.Join(dir, "registry"), FlexVolumes: filepath.Join(dir, "flex")}
	must(t, os.MkdirAll(stateDir(dir), 0o700))
	m, err := newManager(ctx, o)
	must(t, err)
	t.Cleanup(func() { _ = m.store.Close() })
	return m
}

// TestPartFails: when one part of the manager fails, the manager ends, so that it can be restarted.
func TestPartFails(t *testing.T) {
	parts, ctx := errgroup.WithContext(t.Context())
	m := newTestManager(t, ctx)
	broken := errors.New("broken")
	parts.Go(func() error { return broken })
	if err := m.run(ctx, parts); !errors.Is(err, broken) {
		t.Errorf("the manager ended with %v, want %v", err, broken)
	}
}

// TestStatusAtStart: a request for the status waits until the first sync.
func TestStatusAtStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := newTestManager(t, ctx)
	serve, err := m.listen(ctx)
	must(t, err)
	ended := make(chan error)
	go func() { ended <- serve[0](ctx) }()
	shortCtx, cancelShort := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancelShort()
	if s, err := ReadStatus(shortCtx, m.options.RootDir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("before the first sync: got %+v, %v, want a timeout", s, err)
	}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data", UID: "data"}}
	m.sync(ctx, &manifest.Objects{Claims: map[types.NamespacedName]*corev1.PersistentVolumeClaim{{Namespace: "default", Name: "data"}: claim}})
	if s, err := ReadStatus(ctx, m.options.RootDir); err != nil || len(s.Claims) != 1 {
		t.Errorf("after the first sync: got %+v, %v, want one claim", s, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	m.executor.Wait()
}

// TestLongRootDir: a root directory whose path is too long for a socket is refused.
func TestLongRootDir(t *testing.T) {
	root := filepath.Join(t.TempDir(), strings.Repeat("r", 90))
	_, statusErr := ReadStatus(t.Context(), root)
	m := &Manager{options: Options{RootDir: root}}
	_, listenErr := m.listen(t.Context())
	for _, err := range []error{statusErr, listenErr} {
		if err == nil || !strings.Contains(err.Error(), "--root-dir") || !strings.Contains(err.Error(), root) || !strings.Contains(err.Error(), "107") {
			t.Errorf("got error %v, want one with --root-dir, its value and the limit 107", err)
		}
	}
}

// TestIssuer: the issuer of tokens is a URL that other machines can use.
func TestIssuer(t *testing.T) {
	for address, want := range map[string]string{
		"":                 "https://kubernetes.default.svc",
		"127.0.0.1:9811":   "http://127.0.0.1:9811",
		"nas.example:9811": "http://nas.example:9811",
		"[fd00::1]:9811":   "http://[fd00::1]:9811",
		":9811":            "http://node-1:9811",
		"0.0.0.0:9811":     "http://node-1:9811",
		"[::]:9811":        "http://node-1:9811",
	} {
		got, err := issuer(Options{HTTPAddress: address, NodeName: "node-1"})
		if err != nil || got != want {
			t.Errorf("--http-address %q: got issuer %s, %v; want %s", address, got, err, want)
		}
	}
	if got, err := issuer(Options{HTTPAddress: "9811", NodeName: "node-1"}); err == nil || !strings.Contains(err.Error(), "--http-address 9811") {
		t.Errorf("an address without a port: got issuer %s, %v; want an error with the address", got, err)
	}
}

// TestForeignRoot: Run refuses a root directory that contains pods of another program, and does not
// change their volumes. It accepts a root directory with pods if a manager has used the directory before.
func TestForeignRoot(t *testing.T) {
	dir := t.TempDir()
	content := filepath.Join(dir, "pods/uid/volumes/kubernetes.io~empty-dir/data/file")
	must(t, errors.Join(os.MkdirAll(filepath.Dir(content), 0o755), os.WriteFile(content, nil, 0o600)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // a manager that accepts the directory ends at once
	if err := Run(ctx, Options{RootDir: dir, Registry: filepath.Join(dir, "registry")}); !errors.Is(err, ErrForeign) {
		t.Errorf("the root directory of another program: got %v, want ErrForeign", err)
	}
	if _, err := os.Lstat(content); err != nil {
		t.Error(err)
	}
	must(t, os.Mkdir(stateDir(dir), 0o700))
	if err := Run(ctx, Options{RootDir: dir, Registry: filepath.Join(dir, "registry")}); errors.Is(err, ErrForeign) {
		t.Errorf("a root directory that a manager has used: got %v, want another result than ErrForeign", err)
	}
}
