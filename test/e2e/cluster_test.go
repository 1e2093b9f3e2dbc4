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

// try runs a command and returns its output, even if it fails.
func try(ctx context.Context, command string, args ...string) (string, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String() + errs.String(), fmt.Errorf("%s %s: %w: %s%s", command, strings.Join(args, " "), err, out.String(), errs.String())
	}
	return out.String(), nil
}

// run runs a command, which must succeed, and returns its output.
func run(t *testing.T, command string, args ...string) string {
	t.Helper()
	out, err := repeat(t.Context(), func(ctx context.Context) (string, error) { return try(ctx, command, args...) })
	must(t, err)
	return out
}

// repeat calls a function until it succeeds or ctx ends, but not after extraTime.
func repeat(ctx context.Context, call func(context.Context) (string, error)) (string, error) {
	deadline := time.Now().Add(extraTime)
	for {
		out, err := call(ctx)
		if err == nil || ctx.Err() != nil || !time.Now().Before(deadline) {
			return out, err
		}
		time.Sleep(time.Second)
	}
}

// kubectl runs kubectl, which must succeed, and returns its output.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return run(t, "kubectl", args...)
}

// tryKubectlInput runs kubectl with text on its standard input, and returns its output, even if it fails.
func tryKubectlInput(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// kubectlInput is tryKubectlInput for a call that must succeed.
func kubectlInput(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, err := repeat(t.Context(), func(ctx context.Context) (string, error) { return tryKubectlInput(ctx, input, args...) })
	must(t, err)
	return out
}

// eventually polls until a condition is satisfied. It fails the test after the timeout and extraTime. what describes the
// condition as a clause, and seen the current state.
func eventually(t *testing.T, timeout time.Duration, what string, satisfied func() (seen string, ok bool)) {
	t.Helper()
	timeout += extraTime
	deadline := time.Now().Add(timeout)
	for {
		seen, ok := satisfied()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("timed out after %v waiting until %s; last state: %s", timeout, what, seen)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// newNamespace creates a namespace. At the end of the test it deletes the namespace with its objects, and
// checks that nothing of any volume is left.
func newNamespace(t *testing.T, name string) string {
	t.Helper()
	ensureInstalled(t)
	kubectlInput(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+name+"}}", "apply", "-f", "-")
	t.Cleanup(func() {
		if t.Failed() {
			describe(t, name)
		}
		kubectlLast(t, "delete", "namespace", name, "--ignore-not-found", "--timeout=3m")
		checkNothingLeft(t)
	})
	return name
}

// describe logs the pods, claims and events of namespaces, and the logs of the drivers.
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

// tail returns the last n lines of a text.
func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// waitReady waits until all pods of a namespace are ready.
func waitReady(t *testing.T, ns string) {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=3m")
}

// nodeOf returns the name of a pod's node.
func nodeOf(t *testing.T, ns, pod string) string {
	t.Helper()
	return kubectl(t, "-n", ns, "get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")
}

// execIn runs a shell command in a pod and returns its output.
func execIn(t *testing.T, ns, pod, command string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "-n", ns, "exec", pod, "--", "sh", "-c", command))
}

// waitDriver waits until all pods of the driver are ready and each kubelet has registered the driver.
func waitDriver(t *testing.T) {
	t.Helper()
	for _, w := range workloads {
		kubectl(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
	for _, n := range nodes() {
		waitRegistered(t, n)
	}
}

// waitRegistered waits until the node's kubelet has registered the driver.
func waitRegistered(t *testing.T, n node) {
	t.Helper()
	eventually(t, time.Minute, "CSINode "+n.name+" lists the driver", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "get", "csinode", n.name, "-o", "jsonpath={.spec.drivers[*].name}")
		return out, err == nil && strings.Contains(out, driverName)
	})
}

// driverPods returns the names of the driver's pods that match a label selector and are not being deleted.
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

// Label selectors for driverPods.
const (
	allPods  = "app.kubernetes.io/component in (node, controller)"
	nodePods = "app.kubernetes.io/component=node"
)

// driverPod returns the name of the driver's pod on the node.
func (n node) driverPod(t *testing.T) string {
	t.Helper()
	for _, pod := range driverPods(t, nodePods) {
		if nodeOf(t, namespace, pod) == n.name {
			return pod
		}
	}
	t.Fatalf("got no pod of the driver on %s, want one", n.name)
	return ""
}

// restarts returns the restart counts of the driver's containers, one line per pod.
func restarts(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "pod", "-l", "app.kubernetes.io/name=trivet", "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[?(@.name=="trivet")].restartCount}{"\n"}{end}`)
}

// applyText applies a manifest in a namespace.
func applyText(t *testing.T, ns, manifest string) {
	t.Helper()
	kubectlInput(t, manifest, "-n", ns, "apply", "-f", "-")
}

// kubectlLast runs kubectl in a cleanup, when the test's context has ended.
func kubectlLast(t *testing.T, args ...string) {
	t.Helper()
	_, err := repeat(context.Background(), func(ctx context.Context) (string, error) { return try(ctx, "kubectl", args...) })
	if err != nil {
		t.Error(err)
	}
}

// volumeOf waits until a claim is bound and returns the name of its PersistentVolume.
func volumeOf(t *testing.T, ns, claim string) string {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "pvc", claim, "--for=jsonpath={.status.phase}=Bound", "--timeout=2m")
	return kubectl(t, "-n", ns, "get", "pvc", claim, "-o", "jsonpath={.spec.volumeName}")
}

// nodeOfVolume returns the name of the node in the node affinity of a PersistentVolume.
func nodeOfVolume(t *testing.T, volume string) string {
	t.Helper()
	return kubectl(t, "get", "pv", volume, "-o", "jsonpath={.spec.nodeAffinity.required.nodeSelectorTerms[*].matchExpressions[*].values[*]}")
}

// waitDescribed waits until `kubectl describe` of an object contains all words.
func waitDescribed(t *testing.T, timeout time.Duration, ns, object string, words ...string) {
	t.Helper()
	eventually(t, timeout, fmt.Sprintf("kubectl describe %s contains %q", object, words), func() (string, bool) {
		out, _ := try(t.Context(), "kubectl", "-n", ns, "describe", object)
		missing := slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(out, w) })
		return tail(out, 30), !missing
	})
}
