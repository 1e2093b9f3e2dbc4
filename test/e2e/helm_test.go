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

// counting is a pod that appends a number to a file ten times a second, durably, and
// ends if it ever cannot.
const counting = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: counting}
spec:
  storageClassName: trivet-loop
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
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

// TestHelm moves a running cluster from the plain manifests to the chart, upgrades
// it, tests it and uninstalls it, while a pod writes all the time.
func TestHelm(t *testing.T) {
	ns := newNamespace(t, "upgraded")
	applyText(t, ns, counting)
	waitReady(t, ns)
	n := nodeNamed(t, nodeOf(t, ns, "counting"))
	mounted := mountOf(t, ns)
	stillCounting := func(after string) {
		t.Helper()
		before := numbers(t, ns)
		eventually(t, time.Minute, "the pod still writes after "+after, func() (string, bool) {
			n := numbers(t, ns)
			return strconv.Itoa(n), n > before
		})
		if now := mountOf(t, ns); now != mounted {
			t.Errorf("after %s the pod's volume is mounted as %s, before as %s", after, now, mounted)
		}
	}

	everything := run(t, "helm", "template", "trivet", chart, "-n", namespace, "--set", "node.podDisruptionBudget.enabled=true,networkPolicy.enabled=true,metrics.grafanaDashboard.enabled=true")
	pipe(t, everything, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-")

	kubectl(t, "delete", "-f", manifests, "--timeout=3m")
	t.Cleanup(func() { kubectlLast(t, "apply", "--server-side", "-f", manifests) })
	stillCounting("the manifests were deleted")

	previous := previousChart(t)
	run(t, "helm", "install", "trivet", previous, "-n", namespace, "--create-namespace", "--wait", "--timeout=3m")
	waitDriver(t)
	stillCounting("helm install")

	// The pool that is added replaces none: helm test below makes a volume in the default one.
	was := driverPods(t, ofBoth)
	helmUpgrade(t, "--set", "pools.added.directory.path="+stateDir+"/pools/added")
	waitDriver(t)
	for _, pod := range driverPods(t, ofBoth) {
		if slices.Contains(was, pod) {
			t.Errorf("the upgrade did not replace %s", pod)
		}
	}
	stillCounting("helm upgrade")

	out, err := try(t.Context(), "helm", "upgrade", "trivet", chart, "-n", namespace, "--reset-then-reuse-values", "--set", "pools.default=null")
	if err == nil || !strings.Contains(err.Error(), "pools.default is missing, and PersistentVolume pvc-") {
		t.Errorf("an upgrade that drops the pool of a volume: %v %s", err, out)
	}
	out, err = try(t.Context(), "helm", "upgrade", "trivet", chart, "-n", namespace, "--set", "attachRequired=false")
	if err == nil || !strings.Contains(err.Error(), "Delete their claims first") {
		t.Errorf("an upgrade that changes attachRequired: %v %s", err, out)
	}

	if out := run(t, "helm", "test", "trivet", "-n", namespace, "--timeout=3m"); !strings.Contains(out, "Succeeded") {
		t.Error(out)
	}

	eventually(t, time.Minute, "the volume of helm test gone", func() (string, bool) {
		all, err := client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		return fmt.Sprint(err), err == nil && len(all.Items) == 1
	})

	// To one pod on one node and back: what was attached in one shape can be deleted
	// in the other.
	moveIn(t, ns, tenant{name: "cluster", node: n.name})
	helmUpgrade(t, "--set", "shape=oneNode", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+n.name)
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/trivet", "--timeout=3m")
	waitRegistered(t, n)
	stillCounting("the upgrade to one node")
	moveOut(t, ns, "cluster")
	moveIn(t, ns, tenant{name: "one-node", node: n.name})
	helmUpgrade(t, "--set", "shape=cluster", "--set", "node.nodeSelector=null")
	waitDriver(t)
	stillCounting("the upgrade to a cluster")
	moveOut(t, ns, "one-node")

	run(t, "helm", "uninstall", "trivet", "-n", namespace, "--wait", "--timeout=3m")
	stillCounting("helm uninstall")
	for _, n := range nodes() {
		if _, err := n.inPool("volumes"); err != nil {
			t.Errorf("uninstalled, and the pool is not there: %v", err)
		}
	}
	install(t)
	stillCounting("installing again")
	if ended := in(t, ns, "counting", "awk '$1 != NR-1 {print NR; exit}' /data/numbers"); ended != "" {
		t.Errorf("the numbers are not whole from line %s on", ended)
	}
}

func helmUpgrade(t *testing.T, options ...string) {
	t.Helper()
	run(t, "helm", append([]string{"upgrade", "trivet", chart, "-n", namespace, "--reset-then-reuse-values", "--wait", "--timeout=3m"}, options...)...)
}

// previousChart is the chart as a version before: there is no release yet, so it is
// today's with an older version and another default.
func previousChart(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	run(t, "cp", "-r", chart, dir)
	copied := filepath.Join(dir, filepath.Base(chart))
	change(t, filepath.Join(copied, "Chart.yaml"), "\nversion: ", "\nversion: 0.0.0-before-")
	change(t, filepath.Join(copied, "values.yaml"), "\nlogLevel: 2\n", "\nlogLevel: 3\n")
	return copied
}

func change(t *testing.T, path, before, after string) {
	t.Helper()
	text := read(t, path)
	if !strings.Contains(text, before) {
		t.Fatalf("%s does not hold %q", path, before)
	}
	must(t, os.WriteFile(path, []byte(strings.Replace(text, before, after, 1)), 0o644))
}

// numbers is how many the pod of counting has written.
func numbers(t *testing.T, ns string) int {
	t.Helper()
	n, err := strconv.Atoi(in(t, ns, "counting", "wc -l </data/numbers"))
	must(t, err)
	return n
}

// mountOf identifies the mount of the only volume in the namespace, so that a new mount differs.
func mountOf(t *testing.T, ns string) string {
	t.Helper()
	volume := kubectl(t, "-n", ns, "get", "pvc", "counting", "-o", "jsonpath={.spec.volumeName}")
	for _, n := range nodes() {
		if mounts := n.mounts(t, func(m string) bool { return strings.Contains(m, volume) }); len(mounts) > 0 {
			return fmt.Sprintf("mount %d of %d:%d on %s", mounts[0].ID, mounts[0].Major, mounts[0].Minor, n.name)
		}
	}
	t.Fatalf("volume %s is mounted nowhere", volume)
	return ""
}
