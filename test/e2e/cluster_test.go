//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// try runs a command as a user would and returns what it printed, also if it fails.
func try(ctx context.Context, command string, args ...string) (string, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String() + errs.String(), fmt.Errorf("%s %s: %w: %s%s", command, strings.Join(args, " "), err, out.String(), errs.String())
	}
	return out.String(), nil
}

func run(t *testing.T, command string, args ...string) string {
	t.Helper()
	out, err := try(t.Context(), command, args...)
	must(t, err)
	return out
}

func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return run(t, "kubectl", args...)
}

// feed runs kubectl with something on its standard input.
func feed(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// pipe is feed for the test itself.
func pipe(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, err := feed(t.Context(), input, args...)
	must(t, err)
	return out
}

// eventually polls until a condition is satisfied, and fails with the last state after patience.
func eventually(t *testing.T, patience time.Duration, what string, satisfied func() (seen string, ok bool)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		seen, ok := satisfied()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %v; last seen: %s", what, patience, seen)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// newNamespace creates a namespace, and deletes it with its objects at the end of the test. Then no
// part of any volume may be left.
func newNamespace(t *testing.T, name string) string {
	t.Helper()
	installed(t)
	kubectl(t, "create", "namespace", name)
	t.Cleanup(func() {
		if t.Failed() {
			describe(t, name)
		}
		if out, err := try(context.Background(), "kubectl", "delete", "namespace", name, "--timeout=3m"); err != nil {
			t.Error(out)
		}
		checkNothingLeft(t)
	})
	return name
}

// describe prints what a user would look at.
func describe(t *testing.T, namespaces ...string) {
	for _, ns := range append(namespaces, namespace) {
		for _, args := range [][]string{
			{"get", "pods,pvc", "-o", "wide"},
			{"get", "events", "--sort-by=.lastTimestamp"},
		} {
			out, _ := try(context.Background(), "kubectl", append([]string{"-n", ns}, args...)...)
			t.Logf("namespace %s, %s:\n%s", ns, args, tail(out, 40))
		}
	}
	out, _ := try(context.Background(), "kubectl", "-n", namespace, "logs", "-l", "app.kubernetes.io/name=trivet", "-c", "trivet", "--prefix", "--tail=40")
	t.Logf("the drivers' logs:\n%s", out)
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// waitReady waits for all pods of a namespace.
func waitReady(t *testing.T, ns string) {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=3m")
}

// nodeOf is the node that a pod is on.
func nodeOf(t *testing.T, ns, pod string) string {
	t.Helper()
	return kubectl(t, "-n", ns, "get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")
}

// in runs a shell command in a pod.
func in(t *testing.T, ns, pod, command string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "-n", ns, "exec", pod, "--", "sh", "-c", command))
}

// workloads are the driver's, as the manifests have them.
var workloads = []string{"daemonset/trivet-node", "deployment/trivet-controller"}

// waitDriver waits until all of the driver's pods are ready, and each kubelet has registered the
// driver.
func waitDriver(t *testing.T) {
	t.Helper()
	for _, w := range workloads {
		kubectl(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
	for _, n := range nodes() {
		waitRegistered(t, n)
	}
}

func waitRegistered(t *testing.T, n node) {
	t.Helper()
	eventually(t, time.Minute, "driver in CSINode "+n.name, func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "get", "csinode", n.name, "-o", "jsonpath={.spec.drivers[*].name}")
		return out, err == nil && strings.Contains(out, driverName)
	})
}

// driverPods are the names of the driver's pods with those labels, but for those that
// are ending.
func driverPods(t *testing.T, labels string) []string {
	t.Helper()
	all, err := client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=trivet," + labels})
	must(t, err)
	var names []string
	for _, pod := range all.Items {
		if pod.DeletionTimestamp == nil {
			names = append(names, pod.Name)
		}
	}
	return names
}

const (
	ofBoth  = "app.kubernetes.io/component in (node, controller)"
	ofNodes = "app.kubernetes.io/component=node"
)

// driverPod is the name of the driver's pod on the node.
func (n node) driverPod(t *testing.T) string {
	t.Helper()
	for _, pod := range driverPods(t, ofNodes) {
		if nodeOf(t, namespace, pod) == n.name {
			return pod
		}
	}
	t.Fatalf("no driver's pod is on %s", n.name)
	return ""
}

// restarts is how often the driver's containers have been started again, by pod.
func restarts(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "pod", "-l", "app.kubernetes.io/name=trivet", "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[?(@.name=="trivet")].restartCount}{"\n"}{end}`)
}

// remove deletes the objects of a file and waits until they no longer exist. It is for the end of
// a test, when the test's context has ended.
func remove(t *testing.T, ns, path string) {
	t.Helper()
	if out, err := try(context.Background(), "kubectl", "-n", ns, "delete", "-f", path, "--ignore-not-found", "--timeout=3m"); err != nil {
		t.Error(out)
	}
}

// applyText applies a manifest that a test has made.
func applyText(t *testing.T, ns, manifest string) {
	t.Helper()
	pipe(t, manifest, "-n", ns, "apply", "-f", "-")
}

// kubectlLast is kubectl at the end of a test, when its context is over.
func kubectlLast(t *testing.T, args ...string) {
	t.Helper()
	if out, err := try(context.Background(), "kubectl", args...); err != nil {
		t.Error(out)
	}
}

// volumeOf is the PersistentVolume of a claim, as soon as it is bound.
func volumeOf(t *testing.T, ns, claim string) string {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "pvc", claim, "--for=jsonpath={.status.phase}=Bound", "--timeout=2m")
	return kubectl(t, "-n", ns, "get", "pvc", claim, "-o", "jsonpath={.spec.volumeName}")
}

// placeOf is the node that a PersistentVolume is on.
func placeOf(t *testing.T, volume string) string {
	t.Helper()
	return kubectl(t, "get", "pv", volume, "-o", "jsonpath={.spec.nodeAffinity.required.nodeSelectorTerms[*].matchExpressions[*].values[*]}")
}

// eventuallySays waits until `kubectl describe` of an object has all words.
func eventuallySays(t *testing.T, patience time.Duration, ns, object string, words ...string) {
	t.Helper()
	eventually(t, patience, fmt.Sprintf("%s says %q", object, words), func() (string, bool) {
		out, _ := try(t.Context(), "kubectl", "-n", ns, "describe", object)
		missing := slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(out, w) })
		return tail(out, 30), !missing
	})
}
