//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// eventually asks until want is satisfied, and fails with the last answer after
// patience.
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

// newNamespace makes a namespace that is gone, with all that is in it, at the end
// of the test; then nothing may be left of any volume.
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
	out, _ := try(context.Background(), "kubectl", "-n", namespace, "logs", "daemonset/trivet", "-c", "trivet", "--tail=60")
	t.Logf("the driver's log:\n%s", out)
}

func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func theNode(t *testing.T) corev1.Node {
	t.Helper()
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(nodes.Items) != 1 {
		t.Fatalf("%d nodes, want 1: %v", len(nodes.Items), err)
	}
	return nodes.Items[0]
}

// waitReady waits for all pods of a namespace.
func waitReady(t *testing.T, ns string) {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=3m")
}

// in runs a shell command in a pod.
func in(t *testing.T, ns, pod, command string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "-n", ns, "exec", pod, "--", "sh", "-c", command))
}

// waitDriver waits until the driver's pod is ready and the kubelet
// knows the driver.
func waitDriver(t *testing.T) {
	t.Helper()
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/trivet", "--timeout=3m")
	eventually(t, time.Minute, "driver in CSINode", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "get", "csinode", theNode(t).Name, "-o", "jsonpath={.spec.drivers[*].name}")
		return out, err == nil && strings.Contains(out, driverName)
	})
}

// driverPod is the name of the driver's pod.
func driverPod(t *testing.T) string {
	t.Helper()
	return strings.TrimPrefix(strings.TrimSpace(kubectl(t, "-n", namespace, "get", "pod", "-l", "app.kubernetes.io/name=trivet", "-o", "name")), "pod/")
}

// remove deletes what a file holds and waits until it is gone. It is for the end of
// a test, when the test's context is over.
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
