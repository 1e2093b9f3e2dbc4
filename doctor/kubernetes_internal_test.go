package doctor

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

const driverName = "csi.trivet.dev"

// objects returns the objects of a healthy installation, as JSON by path.
func objects() map[string]string {
	return map[string]string{
		"/apis/storage.k8s.io/v1/csidrivers/csi.trivet.dev": `{"metadata": {"labels": {"csi.trivet.dev/namespace": "trivet"}},
			"spec": {"attachRequired": true, "fsGroupPolicy": "File", "storageCapacity": true, "seLinuxMount": false,
			"podInfoOnMount": false, "volumeLifecycleModes": ["Persistent"]}}`,
		"/apis/storage.k8s.io/v1/csinodes/n": `{"spec": {"drivers": [{"name": "other"}, {"name": "csi.trivet.dev", "nodeID": "n", "topologyKeys": ["csi.trivet.dev/node"]}]}}`,
		"/api/v1/nodes/n":                    `{"spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}}`,
		"/api/v1/namespaces/trivet/pods/p": `{"spec": {"containers": [{"image": "registry.k8s.io/sig-storage/csi-provisioner:v6.3.0"}, {"image": "csi-snapshotter:v8.6.0"}],
			"initContainers": [{"image": "mirror:5000/csi-resizer:v2.2.0@sha256:0123"}]}}`,
		"/apis/snapshot.storage.k8s.io/v1": `{"kind": "APIResourceList"}`,
		"/apis/storage.k8s.io/v1/storageclasses": `{"items": [{"metadata": {"name": "foreign"}, "provisioner": "x", "parameters": {"a": "b"}},
			{"metadata": {"name": "trivet-loop"}, "provisioner": "csi.trivet.dev", "parameters": {"pool": "default"}, "volumeBindingMode": "WaitForFirstConsumer"}]}`,
	}
}

// checkCluster runs the cluster checks with an API server that has the objects. refuse holds the status codes of
// refused requests, by path.
func checkCluster(t *testing.T, objects map[string]string, refuse map[string]int) []Check {
	t.Helper()
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		body, found := objects[r.URL.Path]
		code := refuse[r.URL.Path]
		if code == 0 && !found {
			code = http.StatusNotFound
		}
		if code != 0 {
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "code": code, "reason": map[int]string{403: "Forbidden", 404: "NotFound"}[code], "message": "refused"})
			return
		}
		// The client rejects objects without kind and apiVersion.
		kind := `{"kind": "Some", "apiVersion": "v1", `
		if strings.HasPrefix(body, `{"items"`) {
			kind = `{"kind": "SomeList", "apiVersion": "v1", `
			body = strings.ReplaceAll(body, `{"metadata": {"name"`, `{"kind": "Some", "apiVersion": "v1", "metadata": {"name"`)
		}
		if !strings.HasPrefix(body, `{"kind"`) {
			body = kind + body[1:]
		}
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(web.Close)
	client, err := kube.New(&rest.Config{Host: web.URL})
	must(t, err)
	c := cluster{api: client, pod: Pod{InCluster: true, Node: "n", Namespace: "trivet", Name: "p", UID: "u"}, driver: driverName, kinds: allKinds, pools: []pool.Config{{Name: "default"}}}
	return c.checks(t.Context())
}

// find returns the check with a name.
func find(t *testing.T, checks []Check, name string) Check {
	t.Helper()
	i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("no check %q in %+v", name, checks)
	}
	return checks[i]
}

// TestHealthyCluster: all checks of a healthy installation succeed.
func TestHealthyCluster(t *testing.T) {
	checks := checkCluster(t, objects(), nil)
	for _, want := range []string{
		"CSIDriver csi.trivet.dev", "inline volumes", "registration", "startup taint", "sidecar csi-provisioner", "sidecar csi-resizer", "StorageClass trivet-loop", apiServer,
	} {
		expect(t, want, find(t, checks, want), OK, "")
	}
	if len(checks) != 8 {
		t.Errorf("got %d checks, want 8: %+v", len(checks), checks)
	}
}

// TestBrokenCluster: each case replaces a text in one object, or removes the object.
func TestBrokenCluster(t *testing.T) {
	const (
		csiDriver = "/apis/storage.k8s.io/v1/csidrivers/csi.trivet.dev"
		csiNode   = "/apis/storage.k8s.io/v1/csinodes/n"
		node      = "/api/v1/nodes/n"
		pod       = "/api/v1/namespaces/trivet/pods/p"
		snapshots = "/apis/snapshot.storage.k8s.io/v1"
		classes   = "/apis/storage.k8s.io/v1/storageclasses"
	)
	for _, tc := range []struct {
		name, path, old, new string // old is replaced with new; an empty old removes the object
		check                string
		result               Result
		says                 string
	}{
		{"no CSIDriver", csiDriver, "", "", "CSIDriver csi.trivet.dev", Failure, "could not find"},
		{"another installation", csiDriver, `"trivet"`, `"storage"`, "CSIDriver csi.trivet.dev", Failure, `namespace "storage", this one is in "trivet"`},
		{"a CSIDriver without a label", csiDriver, `"csi.trivet.dev/namespace"`, `"a"`, "CSIDriver csi.trivet.dev", Warning, "csi.trivet.dev/namespace"},
		{"fsGroupPolicy None", csiDriver, `"File"`, `"None"`, "CSIDriver csi.trivet.dev", Warning, "fsGroupPolicy None"},
		{"storageCapacity false", csiDriver, `"storageCapacity": true`, `"storageCapacity": false`, "CSIDriver csi.trivet.dev", Warning, "storageCapacity false"},
		{"seLinuxMount true", csiDriver, `"seLinuxMount": false`, `"seLinuxMount": true`, "CSIDriver csi.trivet.dev", OK, "seLinuxMount true"},
		{"attachRequired false", csiDriver, `"attachRequired": true`, `"attachRequired": false`, "CSIDriver csi.trivet.dev", OK, "attachRequired false"},
		{"inline volumes not configured", csiDriver, `["Persistent"]`, `["Persistent", "Ephemeral"]`, "inline volumes", Warning, "[Persistent, Ephemeral], but this node's configuration does not allow them"},
		{"pod info without inline volumes", csiDriver, `"podInfoOnMount": false`, `"podInfoOnMount": true`, "inline volumes", OK, "not enabled"},
		{"no CSINode", csiNode, "", "", "registration", Failure, "has not registered"},
		{"not registered", csiNode, `"csi.trivet.dev", "nodeID"`, `"y", "nodeID"`, "registration", Failure, "has not registered"},
		{"registered as another node", csiNode, `"nodeID": "n"`, `"nodeID": "m"`, "registration", Failure, `node "m"`},
		{"no topology key", csiNode, `"csi.trivet.dev/node"`, `"x/node"`, "registration", Failure, "topology key"},
		{"startup taint", node, `"other"`, `"csi.trivet.dev/agent-not-ready"`, "startup taint", Failure, "agent-not-ready"},
		{"old provisioner", pod, "v6.3.0", "v5.2.0", "sidecar csi-provisioner", Warning, "v5.2.0 is older than 6.0"},
		{"image with only a digest", pod, ":v2.2.0@", "@", "sidecar csi-resizer", Skipped, "digest"},
		{"no snapshot API", snapshots, "", "", "sidecar csi-snapshotter", Failure, "snapshot.storage.k8s.io/v1"},
		{"no classes", classes, "csi.trivet.dev", "z", "storage classes", Warning, "no StorageClass"},
		{"unknown parameter", classes, `"pool": "default"`, `"siez": "1"`, "StorageClass trivet-loop", Failure, `parameter siez="1" is unknown`},
		{"unknown key of the provisioner", classes, `"pool": "default"`, `"csi.storage.k8s.io/fs-type": "xfs"`, "StorageClass trivet-loop", Failure, "did you mean csi.storage.k8s.io/fstype?"},
		{"mkfs option", classes, `"pool": "default"`, `"mkfsOptions": "-K"`, "StorageClass trivet-loop", Failure, "mkfsOptions"},
		{"mkfs option of another filesystem", classes, `"pool": "default"`, `"csi.storage.k8s.io/fstype": "xfs", "mkfsOptions": "-N 9"`, "StorageClass trivet-loop", Failure, `filesystem "xfs"`},
		{"mount option", classes, `"volumeBindingMode"`, `"mountOptions": ["exec=1"], "volumeBindingMode"`, "StorageClass trivet-loop", Failure, "exec=1"},
		{"pool of another kind", classes, `"pool": "default"`, `"pool": "default", "backend": "disk"`, "StorageClass trivet-loop", Failure, `backend disk cannot use pool "default"`},
		{"pool of another node", classes, `"pool": "default"`, `"pool": "fast"`, "StorageClass trivet-loop", Warning, `pool "fast"`},
		{"volumeBindingMode Immediate", classes, "WaitForFirstConsumer", "Immediate", "StorageClass trivet-loop", Warning, "Immediate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			have := objects()
			if tc.old == "" {
				delete(have, tc.path)
			} else {
				changed := strings.Replace(have[tc.path], tc.old, tc.new, 1)
				if changed == have[tc.path] {
					t.Fatalf("%s has no %s", tc.path, tc.old)
				}
				have[tc.path] = changed
			}
			expect(t, tc.name, find(t, checkCluster(t, have, nil), tc.check), tc.result, tc.says)
		})
	}
}

// TestNodeLossClasses: a class that needs the release of claims causes a warning if the controller does not release any.
func TestNodeLossClasses(t *testing.T) {
	class := func(name, value string) (c kube.StorageClass) {
		c.Metadata.Name, c.Parameters = name, map[string]string{"onNodeLoss": value}
		return c
	}
	if got := judgeNodeLoss([]kube.StorageClass{class("kept", "keep"), {}}); got != nil {
		t.Errorf("got %+v, want no check", got)
	}
	expect(t, "release", find(t, judgeNodeLoss([]kube.StorageClass{class("kept", "keep"), class("cache", "release")}), "lost nodes"), Warning, "StorageClass cache has no effect")
}

// TestSELinuxClasses: classes whose volumes cannot have an SELinux context of their own cause a warning if the kubelet passes
// contexts.
func TestSELinuxClasses(t *testing.T) {
	have := objects()
	classes := have["/apis/storage.k8s.io/v1/storageclasses"]
	have["/apis/storage.k8s.io/v1/storageclasses"] = strings.TrimSuffix(classes, "]}") + `,
		{"metadata": {"name": "trivet-local"}, "provisioner": "csi.trivet.dev", "parameters": {"backend": "local"}, "volumeBindingMode": "WaitForFirstConsumer"},
		{"metadata": {"name": "own-context"}, "provisioner": "csi.trivet.dev", "parameters": {"backend": "loop"}, "mountOptions": ["noatime,context=system_u:object_r:container_file_t:s0"], "volumeBindingMode": "WaitForFirstConsumer"}]}`
	const name = "SELinux contexts"
	if checks := checkCluster(t, have, nil); slices.ContainsFunc(checks, func(c Check) bool { return c.Name == name }) {
		t.Errorf("got a check %s with seLinuxMount false: %+v", name, checks)
	}
	const csiDriver = "/apis/storage.k8s.io/v1/csidrivers/csi.trivet.dev"
	have[csiDriver] = strings.Replace(have[csiDriver], `"seLinuxMount": false`, `"seLinuxMount": true`, 1)
	got := find(t, checkCluster(t, have, nil), name)
	expect(t, name, got, Warning, "StorageClass trivet-local, own-context")
	if strings.Contains(got.Seen, "trivet-loop") {
		t.Errorf("got %+v, want no class of images in it", got)
	}
}

// TestForbidden: one warning lists all missing permissions, and the other checks run.
func TestForbidden(t *testing.T) {
	checks := checkCluster(t, objects(), map[string]int{"/api/v1/nodes/n": 403, "/apis/storage.k8s.io/v1/storageclasses": 403})
	expect(t, "permissions", find(t, checks, apiServer), Warning, "get nodes, list storageclasses")
	expect(t, "registration", find(t, checks, "registration"), OK, "")
}

// TestUnreachable: after the first request that the API server cannot answer, the other checks are omitted.
func TestUnreachable(t *testing.T) {
	checks := checkCluster(t, objects(), map[string]int{"/apis/storage.k8s.io/v1/csidrivers/csi.trivet.dev": 503})
	if len(checks) != 1 {
		t.Errorf("got %d checks, want 1: %+v", len(checks), checks)
	}
	expect(t, "503", find(t, checks, apiServer), Warning, "get csidrivers")
}

// TestKubeletChecks: the kubelet's directory must contain the pod and be a shared mount.
func TestKubeletChecks(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	must(t, os.MkdirAll(filepath.Join(dir, "pods", "uid"), 0o750))
	config := &driver.Kubernetes{KubeletDir: dir}
	testenv.Run(t, "mount", "--make-shared", dir)
	for _, check := range kubeletChecks(config, "uid") {
		expect(t, "shared", check, OK, dir)
	}
	testenv.Run(t, "mount", "--make-private", dir)
	expect(t, "private", kubeletChecks(config, "uid")[1], Failure, "not shared")
	expect(t, "another pod", kubeletChecks(config, "other")[0], Failure, dir)
	expect(t, "no section", kubeletChecks(nil, "uid")[0], Warning, "section kubernetes")
}

// TestStartupTaint: the result depends on whether the driver is configured to remove the taint.
func TestStartupTaint(t *testing.T) {
	var node kube.Node
	node.Spec.Taints = []map[string]any{{"key": kube.StartupTaint(driverName)}}
	expect(t, "not registered", judgeTaint(node, false, true, driverName), Warning, "agent-not-ready is on the node")
	expect(t, "registered, removal enabled", judgeTaint(node, true, true, driverName), Warning, "the driver removes it")
	expect(t, "registered, removal disabled", judgeTaint(node, true, false, driverName), Failure, "still on the node")
	expect(t, "removed", judgeTaint(kube.Node{}, true, true, driverName), OK, "not on the node")
}

// TestInline: inline volumes must be enabled both on the node and in the CSIDriver object.
func TestInline(t *testing.T) {
	var d kube.CSIDriver
	expect(t, "disabled on both", judgeInline(d, hasInline(driver.Config{Pools: []pool.Config{{Name: "p"}}})), OK, "not enabled")
	inMemory, inPool := driver.Config{EphemeralMemory: "1Gi"}, driver.Config{Pools: []pool.Config{{Name: "p"}, {Name: "q", Ephemeral: true}}}
	for _, config := range []driver.Config{inMemory, inPool} {
		d.Spec.PodInfoOnMount, d.Spec.VolumeLifecycleModes = true, []string{"Persistent"}
		expect(t, "disabled in the CSIDriver object", judgeInline(d, hasInline(config)), Warning, "volumeLifecycleModes are [Persistent]")
		d.Spec.PodInfoOnMount, d.Spec.VolumeLifecycleModes = false, []string{"Persistent", "Ephemeral"}
		expect(t, "no pod info", judgeInline(d, hasInline(config)), Warning, "podInfoOnMount false")
		d.Spec.PodInfoOnMount = true
		expect(t, "enabled on both", judgeInline(d, hasInline(config)), OK, "enabled on this node")
	}
}

// TestNoServiceAccount: without a token or without the environment variables of the pod, the check of the API server
// is a warning.
func TestNoServiceAccount(t *testing.T) {
	checks := kubernetesChecks(t.Context(), Options{Patience: time.Minute, Pod: Pod{InCluster: true, Node: "n", Namespace: "ns", Name: "p"}}, driverName, driver.Config{})
	expect(t, "no token", find(t, checks, apiServer), Warning, "connecting")
	checks = kubernetesChecks(t.Context(), Options{Patience: time.Minute, Pod: Pod{InCluster: true}}, driverName, driver.Config{})
	expect(t, "no environment", find(t, checks, apiServer), Warning, "NODE_NAME")
}

func TestSplitImage(t *testing.T) {
	for image, want := range map[string][2]string{
		"registry.k8s.io/sig-storage/csi-attacher:v4.12.0": {"csi-attacher", "v4.12.0"},
		"localhost:5000/csi-attacher":                      {"csi-attacher", ""},
		"csi-attacher@sha256:01":                           {"csi-attacher", ""},
		"a/csi-attacher:v1@sha256:01":                      {"csi-attacher", "v1"},
	} {
		if name, tag := splitImage(image); name != want[0] || tag != want[1] {
			t.Errorf("%s: got %q, %q, want %q", image, name, tag, want)
		}
	}
}
