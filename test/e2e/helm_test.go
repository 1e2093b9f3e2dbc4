//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// counting is a pod that appends a number to a file ten times a second and syncs the file. It ends when a
// write fails.
const counting = `
---
apiVersion: v1
kind: Pod
metadata: {name: counting}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sh, -c, 'i=0; while echo $i >>/data/numbers && sync /data/numbers; do i=$((i+1)); sleep 0.1; done']
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: counting}}]
`

// startCounting creates the pod counting with a claim of a StorageClass, and waits until the pod is ready.
func startCounting(t *testing.T, ns, class string) {
	t.Helper()
	applyText(t, ns, claim("counting", class, "64Mi", "")+counting)
	waitReady(t, ns)
}

// TestHelm replaces the plain manifests in a running cluster by the chart, upgrades, tests and uninstalls the
// release, while a pod writes all the time.
func TestHelm(t *testing.T) {
	ns := newNamespace(t, "upgraded")
	startCounting(t, ns, "trivet-loop")
	n := nodeNamed(t, nodeOf(t, ns, "counting"))
	mounted := mountOf(t, ns, "counting")
	stillCounting := func(after string) {
		t.Helper()
		before := numbers(t, ns)
		eventually(t, time.Minute, "the pod still writes after "+after, func() (string, bool) {
			n := numbers(t, ns)
			return strconv.Itoa(n), n > before
		})
		if now := mountOf(t, ns, "counting"); now != mounted {
			t.Errorf("after %s: got %s of the pod's volume, want %s as before", after, now, mounted)
		}
	}

	everything := run(t, "helm", "template", "trivet", chart, "-n", namespace, "--set", "node.podDisruptionBudget.enabled=true,networkPolicy.enabled=true,metrics.grafanaDashboard.enabled=true")
	kubectlInput(t, everything, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-")

	uninstall(t)
	t.Cleanup(func() { kubectlLast(t, "apply", "--server-side", "-f", manifests) })
	stillCounting("the manifests were deleted")

	previous := previousChart(t)
	run(t, "helm", "install", "trivet", previous, "-n", namespace, "--create-namespace", "--wait", "--timeout=3m")
	waitDriver(t)
	stillCounting("helm install")

	// The added pool must not replace the default pool, in which `helm test` below creates a volume.
	oldPods := driverPods(t, allPods)
	helmUpgrade(t, "--set", "pools.added.directory.path="+stateDir+"/pools/added")
	waitDriver(t)
	for _, pod := range driverPods(t, allPods) {
		if slices.Contains(oldPods, pod) {
			t.Errorf("got pod %s after the upgrade, want a new one", pod)
		}
	}
	stillCounting("helm upgrade")

	out, err := try(t.Context(), "helm", "upgrade", "trivet", chart, "-n", namespace, "--reset-then-reuse-values", "--set", "pools.default=null")
	if err == nil || !strings.Contains(err.Error(), "pools.default is missing, but PersistentVolume pvc-") {
		t.Errorf("upgrade that removes the pool of a volume: got error %v and output %s, want a refusal that names the volume", err, out)
	}
	out, err = try(t.Context(), "helm", "upgrade", "trivet", chart, "-n", namespace, "--set", "attachRequired=false")
	if err == nil || !strings.Contains(err.Error(), "Delete their claims first") {
		t.Errorf("upgrade that changes attachRequired: got error %v and output %s, want a refusal", err, out)
	}

	if out := run(t, "helm", "test", "trivet", "-n", namespace, "--timeout=3m"); !strings.Contains(out, "Succeeded") {
		t.Error(out)
	}

	eventually(t, time.Minute, "the volume of helm test is deleted", func() (string, bool) {
		all, err := client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		return fmt.Sprint(err), err == nil && len(all.Items) == 1
	})

	// Change to the shape oneNode and back. A volume that was attached in one shape can be deleted in the
	// other.
	startPod(t, ns, claimPod{name: "cluster", node: n.name})
	helmUpgrade(t, "--set", "shape=oneNode", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+n.name)
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/trivet", "--timeout=3m")
	waitRegistered(t, n)
	stillCounting("the upgrade to one node")
	deletePod(t, ns, "cluster")
	startPod(t, ns, claimPod{name: "one-node", node: n.name})
	helmUpgrade(t, "--set", "shape=cluster", "--set", "node.nodeSelector=null")
	waitDriver(t)
	stillCounting("the upgrade to a cluster")
	deletePod(t, ns, "one-node")

	run(t, "helm", "uninstall", "trivet", "-n", namespace, "--wait", "--timeout=3m")
	stillCounting("helm uninstall")
	for _, n := range nodes() {
		if _, err := os.Stat(n.path(defaultPool + "/volumes")); err != nil {
			t.Errorf("pool of %s after helm uninstall: got error %v, want it to exist", n.name, err)
		}
	}
	install(t)
	stillCounting("installing again")
	if ended := execIn(t, ns, "counting", "awk '$1 != NR-1 {print NR; exit}' /data/numbers"); ended != "" {
		t.Errorf("got a wrong number in line %s, want consecutive numbers", ended)
	}
}

// helmUpgrade upgrades the release to the chart, with its present values and the given options.
func helmUpgrade(t *testing.T, options ...string) {
	t.Helper()
	run(t, "helm", append([]string{"upgrade", "trivet", chart, "-n", namespace, "--reset-then-reuse-values", "--wait", "--timeout=3m"}, options...)...)
}

// previousChart returns a chart for the upgrade from an earlier version. Because no version is released yet,
// it is a copy of the chart with an older version and another default.
func previousChart(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	run(t, "cp", "-r", chart, dir)
	copied := filepath.Join(dir, filepath.Base(chart))
	change(t, filepath.Join(copied, "Chart.yaml"), "\nversion: ", "\nversion: 0.0.0-before-")
	change(t, filepath.Join(copied, "values.yaml"), "\nlogLevel: 2\n", "\nlogLevel: 3\n")
	return copied
}

// change replaces the first occurrence of a text in a file.
func change(t *testing.T, path, before, after string) {
	t.Helper()
	text := read(t, path)
	if !strings.Contains(text, before) {
		t.Fatalf("%s does not contain %q", path, before)
	}
	must(t, os.WriteFile(path, []byte(strings.Replace(text, before, after, 1)), 0o644))
}

// numbers returns how many numbers the pod counting has written.
func numbers(t *testing.T, ns string) int {
	t.Helper()
	n, err := strconv.Atoi(execIn(t, ns, "counting", "wc -l </data/numbers"))
	must(t, err)
	return n
}

// mountOf returns a description of the mount of a claim's volume. It differs for a new mount.
func mountOf(t *testing.T, ns, claim string) string {
	t.Helper()
	volume := volumeOf(t, ns, claim)
	for _, n := range nodes() {
		if mounts := n.mounts(t, func(m string) bool { return strings.Contains(m, volume) }); len(mounts) > 0 {
			return fmt.Sprintf("mount %d of %d:%d on %s", mounts[0].ID, mounts[0].Major, mounts[0].Minor, n.name)
		}
	}
	t.Fatalf("got no mount of volume %s on any node, want one", volume)
	return ""
}
