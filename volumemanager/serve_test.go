package volumemanager_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
	"github.com/trivet-csi/trivet/volumemanager/token"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// patience is the time limit of each wait.
const patience = time.Minute

// TestHTTP: the public HTTP port serves health, metrics of a pod that is ready and of a pod with a
// failing volume, and the keys that verify tokens. A second manager with the same port does not start.
func TestHTTP(t *testing.T) {
	testenv.RequireRoot(t)
	o := options(t)
	put(t, o, "web", `
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers: [{name: main, image: none}]
  volumes:
  - {name: dir, emptyDir: {}}
  - {name: token, projected: {sources: [{serviceAccountToken: {path: token, audience: shop}}]}}
`)
	put(t, o, "bad", fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: bad}
spec:
  containers: [{name: main, image: none}]
  volumes: [{name: bad, hostPath: {path: %q, type: Directory}}]
`, o.RootDir+"/nothing"))
	start(t, o)
	s, err := volumemanager.AwaitPod(t.Context(), o.RootDir, types.NamespacedName{Namespace: "default", Name: "web"}, patience)
	if err != nil || !s.Ready {
		t.Fatalf("got pod status %+v, %v; want ready", s, err)
	}

	if text := get(t, "http://"+o.HTTPAddress+"/healthz"); string(text) != "ok\n" {
		t.Errorf("/healthz: got %q, want %q", text, "ok\n")
	}
	wantMetrics(t, o, map[string]float64{
		`trivet_volume_manager_operations_total{operation="volume_mount",plugin="kubernetes.io/empty-dir",status="success"}`: 1,
		`trivet_volume_manager_operation_duration_seconds_count{operation="volume_mount",plugin="kubernetes.io/empty-dir"}`:  1,
		`trivet_volume_manager_operations_total{operation="volume_mount",plugin="kubernetes.io/host-path",status="fail"}`:    1,
		`trivet_volume_manager_state_diff{direction="to_mount"}`:                                                             1,
		`trivet_volume_manager_state_diff{direction="to_unmount"}`:                                                           0,
	})
	frozen.List(t, "metrics", frozen.Metrics(string(get(t, "http://"+o.HTTPAddress+"/metrics"))))
	raw, err := os.ReadFile(filepath.Join(s.Volumes[1].Path, "token"))
	if err != nil {
		t.Fatal(err)
	}
	verify(t, "http://"+o.HTTPAddress, string(raw))

	other := options(t)
	other.HTTPAddress = o.HTTPAddress
	err = volumemanager.Run(t.Context(), other)
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "--http-address "+o.HTTPAddress) || !strings.Contains(err.Error(), "use another address, or '' for none") {
		t.Errorf("a second manager with the same address: got error %v; want EADDRINUSE, with the flag, its value and what to do", err)
	}
}

// TestAwaitPodBeforeStart: a wait that begins before the manager runs, and before the directory of manifests and its
// parent exist, ends when the pod is ready.
func TestAwaitPodBeforeStart(t *testing.T) {
	o := options(t)
	o.Manifests = filepath.Join(o.Manifests, "etc", "manifests")
	if _, err := volumemanager.ReadStatus(t.Context(), o.RootDir); !errors.Is(err, volumemanager.ErrNotRunning) {
		t.Fatalf("before the start: got error %v, want ErrNotRunning", err)
	}
	type result struct {
		volumemanager.PodStatus
		err error
	}
	waited := make(chan result)
	go func() {
		s, err := volumemanager.AwaitPod(t.Context(), o.RootDir, types.NamespacedName{Namespace: "default", Name: "web"}, patience)
		waited <- result{s, err}
	}()
	start(t, o)
	eventually(t, func() error {
		s, err := volumemanager.ReadStatus(t.Context(), o.RootDir)
		if err == nil && len(s.Problems) == 0 {
			err = errors.New("got no problem, want the missing directory")
		}
		return err
	})
	must(t, os.MkdirAll(o.Manifests, 0o755))
	put(t, o, "web", "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {containers: [{name: main, image: none}]}}")
	if r := <-waited; r.err != nil || !r.Known || !r.Ready {
		t.Errorf("got %+v, want a ready pod", r)
	}
}

// options returns options with new directories and a free port.
func options(t *testing.T) volumemanager.Options {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm") // a short path, because the path of a socket has at most 107 bytes
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := volumemanager.Options{
		Manifests: filepath.Join(dir, "manifests"), RootDir: filepath.Join(dir, "root"), Registry: filepath.Join(dir, "registry"),
		FlexVolumes: filepath.Join(dir, "flex"), NodeName: "node-1",
	}
	must(t, os.Mkdir(o.Manifests, 0o755))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	o.HTTPAddress = l.Addr().String()
	must(t, l.Close())
	return o
}

// start runs a manager until the test ends. Before the manager is stopped, the manifests are removed,
// and the manager must remove the volumes.
func start(t *testing.T, o volumemanager.Options) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- volumemanager.Run(ctx, o) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { removeAll(t, o) })
}

var must = plugintest.Must

// put writes the manifest name.yaml.
func put(t *testing.T, o volumemanager.Options, name, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(o.Manifests, name+".yaml"), []byte(text), 0o600))
}

// get returns the body of a response, which must have the status 200.
func get(t *testing.T, url string) []byte {
	t.Helper()
	response, err := http.Get(url)
	must(t, err)
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	must(t, err)
	if response.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s: %s", url, response.Status, b)
	}
	return b
}

// eventually calls check until it returns no error.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	must(t, retry.For(context.Background(), patience, func() (bool, error) {
		err := check()
		return err != nil, err
	}))
}

// wantMetrics waits until the metrics have the wanted values. Counts of failures may be larger, because
// failed operations are retried.
func wantMetrics(t *testing.T, o volumemanager.Options, want map[string]float64) {
	t.Helper()
	eventually(t, func() error {
		text := string(get(t, "http://"+o.HTTPAddress+"/metrics"))
		for name, value := range want {
			got, err := valueOf(text, name)
			if err != nil {
				return err
			}
			if got != value && (got < value || !strings.Contains(name, "fail")) {
				return fmt.Errorf("metric %s: got %v, want %v", name, got, value)
			}
		}
		return nil
	})
}

// valueOf returns the value of a metric in the text format of Prometheus.
func valueOf(text, name string) (float64, error) {
	_, after, found := strings.Cut(text, "\n"+name+" ")
	if !found {
		return 0, fmt.Errorf("no %s in:\n%s", name, text)
	}
	value, _, _ := strings.Cut(after, "\n")
	return strconv.ParseFloat(value, 64)
}

// verify verifies a token with the keys that its issuer publishes.
func verify(t *testing.T, issuer, raw string) {
	t.Helper()
	var discovered struct {
		Issuer string `json:"issuer"`
		Keys   string `json:"jwks_uri"` //nolint:tagliatelle // OpenID Connect Discovery defines the name
	}
	must(t, json.Unmarshal(get(t, issuer+token.DiscoveryPath), &discovered))
	var keys jose.JSONWebKeySet
	must(t, json.Unmarshal(get(t, discovered.Keys), &keys))
	parsed, err := jwt.ParseSigned(raw, []jose.SignatureAlgorithm{jose.RS256})
	must(t, err)
	var claims jwt.Claims
	must(t, parsed.Claims(keys, &claims))
	must(t, claims.Validate(jwt.Expected{Issuer: issuer, AnyAudience: jwt.Audience{"shop"}, Subject: "system:serviceaccount:default:default"}))
	if discovered.Issuer != issuer {
		t.Errorf("the discovery document has issuer %s, want %s", discovered.Issuer, issuer)
	}
}

// removeAll removes the manifests and waits until the manager has removed all volumes.
func removeAll(t *testing.T, o volumemanager.Options) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(o.Manifests, "*"))
	must(t, err)
	for _, f := range files {
		must(t, os.Remove(f))
	}
	eventually(t, func() error {
		s, err := volumemanager.ReadStatus(context.Background(), o.RootDir)
		if err == nil && len(s.Volumes) > 0 {
			err = fmt.Errorf("volumes are not removed: %+v", s.Volumes)
		}
		return err
	})
}
