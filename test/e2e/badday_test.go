//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestRefusesToStart changes the manifests so that the nodes' drivers exit. `kubectl describe` must show
// the reason, and `trivet doctor` in a copy of the pod must report it.
func TestRefusesToStart(t *testing.T) {
	const other = "/var/lib/other-kubelet"
	for name, tc := range map[string]struct {
		change []string // replacements in the manifests: old, new
		reason string   // in the output of kubectl describe and of doctor
		check  string   // the failed check of doctor
	}{
		"wrong kubelet directory": {
			change: []string{"/var/lib/kubelet", other},
			reason: `kubernetes.kubeletDir "` + other + `" is not the directory of the kubelet that runs this pod`,
			check:  "kubelet directory",
		},
		"no mount propagation": {
			change: []string{", mountPropagation: Bidirectional", ""},
			reason: "set mountPropagation: Bidirectional",
			check:  "mount propagation",
		},
	} {
		t.Run(name, func(t *testing.T) {
			ensureInstalled(t)
			for _, n := range nodes() {
				must(t, os.MkdirAll(n.path(other)+"/plugins_registry", 0o755))
				t.Cleanup(func() { removeAll(t, n.path(other)) })
			}
			applyChanged(t, tc.change...)
			var seen string
			eventually(t, 3*time.Minute, "kubectl describe shows the reason", func() (string, bool) {
				seen, _ = try(t.Context(), "kubectl", "-n", namespace, "describe", "pod", "-l", nodePods)
				return tail(seen, 60), strings.Contains(seen, tc.reason)
			})
			if found := doctorInCopy(t, notReady(t)); !strings.Contains(found, tc.check) || !strings.Contains(found, tc.reason) {
				t.Errorf("got from doctor:\n%s\nwant check %q with %q", found, tc.check, tc.reason)
			}
		})
	}
}

// TestDoctor changes the manifests so that the driver works only in part. `trivet doctor` in the driver's
// pods must report the problem.
func TestDoctor(t *testing.T) {
	for name, tc := range map[string]struct {
		change []string // replacements in the manifests: old, new
		finds  []string // texts in the output of doctor
	}{
		"missing pool directory": {
			change: []string{"      name: default\n", "      name: default\n    - directory:\n        path: /var/lib/trivet/disks/fast\n      name: fast\n"},
			finds:  []string{"pool fast", "/var/lib/trivet/disks/fast does not exist"},
		},
		"unmounted pool": {
			change: []string{"      name: default\n", "      name: default\n    - directory:\n        path: /var/lib/trivet/fast\n      name: fast\n      requireMount: true\n"},
			finds:  []string{"pool fast", "requireMount is set"},
		},
		"old sidecar": {
			change: []string{"csi-provisioner:v6.3.0", "csi-provisioner:v5.0.0"},
			finds:  []string{"csi-provisioner", "v5.0.0 is older"},
		},
		"snapshots without their CRDs": {
			change: []string{"        - name: csi-resizer\n", snapshotter + "        - name: csi-resizer\n"},
			finds:  []string{"snapshot.storage.k8s.io"},
		},
		"CSIDriver of another installation": {
			change: []string{"csi.trivet.dev/namespace: trivet-system", "csi.trivet.dev/namespace: elsewhere"},
			finds:  []string{"elsewhere", "two installations"},
		},
		"class with an invalid parameter": {
			change: []string{"  allocation: thin\n", "  allocation: skinny\n"},
			finds:  []string{"trivet-loop", "skinny"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			ensureInstalled(t)
			if out, err := doctor(t); err != nil {
				t.Fatalf("got a failure of doctor before the change, want none: %v", out)
			}
			applyChanged(t, tc.change...)
			eventually(t, 2*time.Minute, "doctor reports the problem", func() (string, bool) {
				out, _ := doctor(t)
				for _, word := range tc.finds {
					if !strings.Contains(out, word) {
						return out, false
					}
				}
				return out, true
			})
		})
	}
}

// snapshotter is the container of csi-snapshotter, for a cluster that lacks its CRDs.
const snapshotter = `        - name: csi-snapshotter
          image: registry.k8s.io/sig-storage/csi-snapshotter:v8.6.0
          args: [--csi-address=/csi/csi.sock]
          volumeMounts: [{name: plugin-dir, mountPath: /csi}]
`

// TestSecondInstallation installs a second driver with the same name. On every node the second driver must
// refuse to start. The first one must work after the second is removed.
func TestSecondInstallation(t *testing.T) {
	ensureInstalled(t)
	const second = "second-system"
	text := strings.ReplaceAll(read(t, manifests), namespace, second)
	t.Cleanup(func() { restoreManifests(t) })
	t.Cleanup(func() { kubectlLast(t, "delete", "namespace", second, "--ignore-not-found", "--timeout=3m") })
	t.Cleanup(func() {
		kubectlLast(t, "delete", "clusterrole,clusterrolebinding", second+":trivet-node", second+":trivet-controller")
	})
	kubectlInput(t, text, "apply", "--server-side", "--force-conflicts", "-f", "-")
	eventually(t, 2*time.Minute, "kubectl describe shows why the second driver does not start", func() (string, bool) {
		out, _ := try(t.Context(), "kubectl", "-n", second, "describe", "pod", "-l", nodePods)
		return tail(out, 60), strings.Contains(out, "/csi/csi.sock") && strings.Contains(out, "another driver")
	})
	if out, err := doctor(t); err == nil || !strings.Contains(out, second) {
		t.Errorf("got from doctor of the first installation: %s\nwant a failure that names %s", out, second)
	}

	// The registrar of the second installation removed the registration socket of the first.
	kubectl(t, "delete", "namespace", second, "--timeout=3m")
	kubectl(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
	waitDriver(t)
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "the first installation has a registration socket on "+n.name, func() (string, bool) {
			_, err := os.Stat(n.path("/var/lib/kubelet/plugins_registry/" + driverName + "-reg.sock"))
			return fmt.Sprint(err), err == nil
		})
	}
	waitDriver(t)
	ns := newNamespace(t, "after-second")
	apply(t, ns, filepath.Join(examples, "ephemeral.yaml"))
	waitReady(t, ns)
}

// TestStartupTaint checks that the startup taint is removed from each node on which the driver is
// registered, even if all nodes have it.
func TestStartupTaint(t *testing.T) {
	ensureInstalled(t)
	for _, n := range nodes() {
		kubectl(t, "taint", "node", n.name, driverName+"/agent-not-ready=:NoSchedule", "example.com/other=kept:PreferNoSchedule")
		t.Cleanup(func() { kubectlLast(t, "taint", "node", n.name, "example.com/other-") })
	}
	restart(t)
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "only the startup taint is removed", func() (string, bool) {
			out, err := try(t.Context(), "kubectl", "get", "node", n.name, "-o", "jsonpath={.spec.taints[*].key}")
			return out, err == nil && out == "example.com/other"
		})
	}
	waitDriver(t)
}

// applyChanged applies the manifests with replacements, and restores them at the end of the test.
func applyChanged(t *testing.T, oldnew ...string) {
	t.Helper()
	text := read(t, manifests)
	changed := strings.NewReplacer(oldnew...).Replace(text)
	if changed == text {
		t.Fatalf("the manifests do not contain %q", oldnew[0])
	}
	// The parameters of a StorageClass are immutable, so the class is created again.
	kubectl(t, "delete", "storageclass", "trivet-loop")
	t.Cleanup(func() { restoreManifests(t) })
	kubectlInput(t, changed, "apply", "--server-side", "--force-conflicts", "-f", "-")
	restart(t)
}

// restart restarts the drivers, so that they read their configurations. It retries because kubectl refuses
// a second restart within a second.
func restart(t *testing.T) {
	t.Helper()
	for _, w := range workloads {
		eventually(t, 10*time.Second, "kubectl accepts the restart of "+w, func() (string, bool) {
			out, err := try(context.Background(), "kubectl", "-n", namespace, "rollout", "restart", w)
			return out, err == nil
		})
	}
}

// restoreManifests applies the unchanged manifests and waits for the drivers.
func restoreManifests(t *testing.T) {
	kubectlLast(t, "delete", "storageclass", "trivet-loop")
	kubectlLast(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
	restart(t)
	for _, w := range workloads {
		kubectlLast(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
}

// doctor runs `trivet doctor` in all pods of the driver, as the documentation describes.
func doctor(t *testing.T) (string, error) {
	t.Helper()
	var all []string
	var errs []error
	for _, pod := range driverPods(t, allPods) {
		out, err := try(t.Context(), "kubectl", "-n", namespace, "exec", pod, "-c", "trivet", "--", "trivet", "doctor")
		all, errs = append(all, pod, out), append(errs, err)
	}
	return strings.Join(all, "\n"), errors.Join(errs...)
}

// notReady returns one of the nodes' pods that is not ready.
func notReady(t *testing.T) string {
	t.Helper()
	for _, pod := range driverPods(t, nodePods) {
		if kubectl(t, "-n", namespace, "get", "pod", pod, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`) == "False" {
			return pod
		}
	}
	t.Fatal("got only ready pods of the nodes' drivers, want one that is not ready")
	return ""
}

// doctorInCopy runs `trivet doctor` in a copy of a pod whose driver does not keep running.
func doctorInCopy(t *testing.T, of string) string {
	t.Helper()
	const pod = "trivet-doctor"
	kubectl(t, "-n", namespace, "debug", of, "--copy-to="+pod, "--same-node", "--container=trivet", "--", "trivet", "doctor")
	t.Cleanup(func() { kubectlLast(t, "-n", namespace, "delete", "pod", pod) })
	var found string
	eventually(t, time.Minute, "doctor reports a failure", func() (string, bool) {
		found, _ = try(context.Background(), "kubectl", "-n", namespace, "logs", pod, "-c", "trivet")
		return found, strings.Contains(found, "failure")
	})
	return found
}

// read returns the content of a file.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

// removeAll removes a directory with its content.
func removeAll(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}
