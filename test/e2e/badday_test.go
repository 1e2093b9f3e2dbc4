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

// With each of these the driver's container does not stay up; `kubectl describe`
// says why, and `trivet doctor` in a copy of its pod finds it.
func TestRefusesToStart(t *testing.T) {
	const other = "/var/lib/other-kubelet"
	for name, day := range map[string]struct {
		change []string // in the manifests: old, new
		says   string
		doctor string
	}{
		"wrong kubelet directory": {
			change: []string{"/var/lib/kubelet", other},
			says:   `kubernetes.kubeletDir "` + other + `" is not the directory of the kubelet that runs this pod`,
			doctor: "kubelet directory",
		},
		"no mount propagation": {
			change: []string{", mountPropagation: Bidirectional", ""},
			says:   "set mountPropagation: Bidirectional",
			doctor: "mount propagation",
		},
	} {
		t.Run(name, func(t *testing.T) {
			installed(t)
			for _, n := range nodes() {
				must(t, os.MkdirAll(n.path(other)+"/plugins_registry", 0o755))
				t.Cleanup(func() { mustRemove(t, n.path(other)) })
			}
			broken(t, day.change...)
			var seen string
			eventually(t, 3*time.Minute, "kubectl describe says why", func() (string, bool) {
				seen, _ = try(t.Context(), "kubectl", "-n", namespace, "describe", "pod", "-l", ofNodes)
				return tail(seen, 60), strings.Contains(seen, day.says)
			})
			if found := doctorInCopy(t, notReady(t)); !strings.Contains(found, day.doctor) || !strings.Contains(found, day.says) {
				t.Errorf("doctor did not find it:\n%s", found)
			}
		})
	}
}

// TestDoctor: with each of these the driver works as far as it can, and `trivet
// doctor` in its pod finds what is wrong.
func TestDoctor(t *testing.T) {
	for name, day := range map[string]struct {
		change []string
		finds  []string
	}{
		"a pool that the node does not have": {
			change: []string{"      name: default\n", "      name: default\n    - directory:\n        path: /var/lib/trivet/disks/fast\n      name: fast\n"},
			finds:  []string{"pool fast", "/var/lib/trivet/disks/fast does not exist"},
		},
		"a pool whose disk is not mounted": {
			change: []string{"      name: default\n", "      name: default\n    - directory:\n        path: /var/lib/trivet/fast\n      name: fast\n      requireMount: true\n"},
			finds:  []string{"pool fast", "requireMount is set"},
		},
		"a sidecar that is too old": {
			change: []string{"csi-provisioner:v6.3.0", "csi-provisioner:v5.0.0"},
			finds:  []string{"csi-provisioner", "v5.0.0 is older"},
		},
		"no CRDs for snapshots": {
			change: []string{"        - name: csi-resizer\n", snapshotter + "        - name: csi-resizer\n"},
			finds:  []string{"snapshot.storage.k8s.io"},
		},
		"another installation has the name": {
			change: []string{"csi.trivet.dev/namespace: trivet-system", "csi.trivet.dev/namespace: elsewhere"},
			finds:  []string{"elsewhere", "two installations"},
		},
		"a class with a parameter that is none": {
			change: []string{"  allocation: thin\n", "  allocation: skinny\n"},
			finds:  []string{"trivet-loop", "skinny"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			installed(t)
			if out, err := doctor(t); err != nil {
				t.Fatalf("doctor before anything was broken: %v", out)
			}
			broken(t, day.change...)
			eventually(t, 2*time.Minute, "doctor finds it", func() (string, bool) {
				out, _ := doctor(t)
				for _, word := range day.finds {
					if !strings.Contains(out, word) {
						return out, false
					}
				}
				return out, true
			})
		})
	}
}

// snapshotter is the sidecar as the chart has it, where no cluster has its CRDs.
const snapshotter = `        - name: csi-snapshotter
          image: registry.k8s.io/sig-storage/csi-snapshotter:v8.6.0
          args: [--csi-address=/csi/csi.sock]
          volumeMounts: [{name: plugin-dir, mountPath: /csi}]
`

// TestSecondInstallation: a second one under the same driver name is told to leave on
// every node, and the first goes on.
func TestSecondInstallation(t *testing.T) {
	installed(t)
	const second = "second-system"
	text := strings.ReplaceAll(read(t, manifests), namespace, second)
	t.Cleanup(func() { restore(t) })
	t.Cleanup(func() { kubectlLast(t, "delete", "namespace", second, "--ignore-not-found", "--timeout=3m") })
	t.Cleanup(func() {
		kubectlLast(t, "delete", "clusterrole,clusterrolebinding", second+":trivet-node", second+":trivet-controller")
	})
	pipe(t, text, "apply", "--server-side", "--force-conflicts", "-f", "-")
	eventually(t, 2*time.Minute, "the second says why it does not start", func() (string, bool) {
		out, _ := try(t.Context(), "kubectl", "-n", second, "describe", "pod", "-l", ofNodes)
		return tail(out, 60), strings.Contains(out, "/csi/csi.sock") && strings.Contains(out, "another driver")
	})
	if out, err := doctor(t); err == nil || !strings.Contains(out, second) {
		t.Errorf("doctor in the first does not name the second: %s", out)
	}

	// The second's registrar took the first's registration socket away with it.
	kubectl(t, "delete", "namespace", second, "--timeout=3m")
	kubectl(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
	waitDriver(t)
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "the registration socket of the first on "+n.name, func() (string, bool) {
			_, err := os.Stat(n.path("/var/lib/kubelet/plugins_registry/" + driverName + "-reg.sock"))
			return fmt.Sprint(err), err == nil
		})
	}
	waitDriver(t)
	ns := newNamespace(t, "after-second")
	apply(t, ns, filepath.Join(examples, "ephemeral.yaml"))
	waitReady(t, ns)
}

// TestStartupTaint: the taint that keeps pods from a new node goes when the driver
// is registered there, also if every node has it.
func TestStartupTaint(t *testing.T) {
	installed(t)
	for _, n := range nodes() {
		kubectl(t, "taint", "node", n.name, driverName+"/agent-not-ready=:NoSchedule", "example.com/other=kept:PreferNoSchedule")
		t.Cleanup(func() { kubectlLast(t, "taint", "node", n.name, "example.com/other-") })
	}
	restart(t)
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "the taint gone, the other kept", func() (string, bool) {
			out, err := try(t.Context(), "kubectl", "get", "node", n.name, "-o", "jsonpath={.spec.taints[*].key}")
			return out, err == nil && out == "example.com/other"
		})
	}
	waitDriver(t)
}

// broken applies the manifests with replacements, and puts them right at the end of
// the test.
func broken(t *testing.T, oldnew ...string) {
	t.Helper()
	text := read(t, manifests)
	changed := strings.NewReplacer(oldnew...).Replace(text)
	if changed == text {
		t.Fatalf("the manifests do not hold %q", oldnew[0])
	}
	// Parameters of a class cannot be changed in place.
	kubectl(t, "delete", "storageclass", "trivet-loop")
	t.Cleanup(func() { restore(t) })
	pipe(t, changed, "apply", "--server-side", "--force-conflicts", "-f", "-")
	restart(t)
}

// restart has the drivers read their configurations, which they do when they start.
// kubectl refuses a second restart within a second.
func restart(t *testing.T) {
	t.Helper()
	for _, w := range workloads {
		eventually(t, 10*time.Second, "the driver's restart", func() (string, bool) {
			out, err := try(context.Background(), "kubectl", "-n", namespace, "rollout", "restart", w)
			return out, err == nil
		})
	}
}

func restore(t *testing.T) {
	kubectlLast(t, "delete", "storageclass", "trivet-loop")
	kubectlLast(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
	restart(t)
	for _, w := range workloads {
		kubectlLast(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
}

// doctor runs `trivet doctor` in all of the driver's pods, as the documentation says.
func doctor(t *testing.T) (string, error) {
	t.Helper()
	var all []string
	var errs []error
	for _, pod := range driverPods(t, ofBoth) {
		out, err := try(t.Context(), "kubectl", "-n", namespace, "exec", pod, "-c", "trivet", "--", "trivet", "doctor")
		all, errs = append(all, pod, out), append(errs, err)
	}
	return strings.Join(all, "\n"), errors.Join(errs...)
}

// notReady is a pod of the driver on a node that does not get ready.
func notReady(t *testing.T) string {
	t.Helper()
	for _, pod := range driverPods(t, ofNodes) {
		if kubectl(t, "-n", namespace, "get", "pod", pod, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`) == "False" {
			return pod
		}
	}
	t.Fatal("all of the driver's pods are ready")
	return ""
}

// doctorInCopy runs it in a copy of the pod, where the driver does not stay up.
func doctorInCopy(t *testing.T, of string) string {
	t.Helper()
	const pod = "trivet-doctor"
	kubectl(t, "-n", namespace, "debug", of, "--copy-to="+pod, "--same-node", "--container=trivet", "--", "trivet", "doctor")
	t.Cleanup(func() { kubectlLast(t, "-n", namespace, "delete", "pod", pod) })
	var found string
	eventually(t, time.Minute, "doctor's answer", func() (string, bool) {
		found, _ = try(context.Background(), "kubectl", "-n", namespace, "logs", pod, "-c", "trivet")
		return found, strings.Contains(found, "failure")
	})
	return found
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func mustRemove(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}
