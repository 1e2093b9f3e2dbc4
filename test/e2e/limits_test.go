//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/linux/cgroup"
)

// TestIOLimits changes the VolumeAttributesClass of a claim while a pod uses it. Nodes with cgroup v2 limit the I/O of the pod. Nodes
// with cgroup v1 refuse limits, with the reason in an event, and the claim then accepts another class.
func TestIOLimits(t *testing.T) {
	c := limitedClaim{newNamespace(t, "limits")}
	for class, limit := range map[string]string{noLimits: "max", limits2Mi: "2Mi", limits4Mi: "4Mi"} {
		kubectlInput(t, fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: %s}
driverName: csi.trivet.dev
parameters: {bytesPerSecondRead: %[2]s, bytesPerSecondWrite: %[2]s}
`, class, limit), "apply", "-f", "-")
		t.Cleanup(func() { kubectlLast(t, "delete", "volumeattributesclass", class, "--ignore-not-found", "--wait=false") })
	}
	applyText(t, c.ns, claim("data", "trivet-loop", "128Mi", "")+quietPod("data", "data", "true"))
	kubectl(t, "-n", c.ns, "wait", "pod", "data", "--for=condition=Ready", "--timeout=3m")
	c.modify(t, noLimits)
	if _, err := os.Stat(filepath.Join(cgroup.Root, "cgroup.controllers")); errors.Is(err, fs.ErrNotExist) {
		c.testRefused(t)
	} else {
		c.testEnforced(t)
	}
}

// The VolumeAttributesClasses of TestIOLimits.
const (
	noLimits  = "limits-none"
	limits4Mi = "limits-4mi" // per second, for reads and for writes
	limits2Mi = "limits-2mi"
)

// limitedClaim is the claim data in a namespace, which a pod with the same name uses.
type limitedClaim struct{ ns string }

// use sets the VolumeAttributesClass of the claim.
func (c limitedClaim) use(t *testing.T, class string) {
	t.Helper()
	kubectl(t, "-n", c.ns, "patch", "pvc", "data", "-p", fmt.Sprintf(`{"spec":{"volumeAttributesClassName":%q}}`, class))
}

// modify is use, and waits until the volume is modified.
func (c limitedClaim) modify(t *testing.T, class string) {
	t.Helper()
	c.use(t, class)
	kubectl(t, "-n", c.ns, "wait", "pvc", "data", "--for=jsonpath={.status.currentVolumeAttributesClassName}="+class, "--timeout=2m")
}

// testRefused: a limit is infeasible, and the claim then accepts a class without limits.
func (c limitedClaim) testRefused(t *testing.T) {
	t.Helper()
	c.use(t, limits4Mi)
	waitDescribed(t, 2*time.Minute, c.ns, "pvc/data", "not a cgroup v2 hierarchy")
	kubectl(t, "-n", c.ns, "wait", "pvc", "data", "--for=jsonpath={.status.modifyVolumeStatus.status}=Infeasible", "--timeout=2m")
	c.modify(t, noLimits)
	deletePod(t, c.ns, "data")
}

// testEnforced: the pod's direct I/O has the limits of each class, also if the limit of the running pod was lost while the driver and
// the kubelet did not run. No limit is left after the pod.
func (c limitedClaim) testEnforced(t *testing.T) {
	t.Helper()
	pod := podCgroups(t)[kubectl(t, "-n", c.ns, "get", "pod", "data", "-o", "jsonpath={.metadata.uid}")]
	c.modify(t, limits2Mi)
	c.wantTime(t, "if=/dev/zero of=/data/file bs=256k count=80 oflag=direct conv=notrunc")
	c.modify(t, limits4Mi)
	c.wantTime(t, "if=/dev/zero of=/data/file bs=256k count=160 oflag=direct conv=notrunc")
	c.wantTime(t, "if=/data/file of=/dev/null bs=256k count=160 iflag=direct")

	limit := ioMax(t, pod)
	device, _, _ := strings.Cut(limit, " ")
	n := nodeNamed(t, nodeOf(t, c.ns, "data"))
	n.killWithKubelet(t, n.driverProcesses)
	must(t, os.WriteFile(filepath.Join(string(pod), "io.max"), []byte(device+" rbps=max wbps=max"), 0))
	if lost := ioMax(t, pod); lost != "" {
		t.Errorf("got io.max %q, want no limit", lost)
	}
	n.revive(t)
	eventually(t, 2*time.Minute, "the pod has the limit again", func() (string, bool) {
		now := ioMax(t, pod)
		return now, now == limit
	})
	waitDriver(t)
	c.wantTime(t, "if=/data/file of=/dev/null bs=256k count=160 iflag=direct")

	c.modify(t, noLimits)
	if got := ioMax(t, pod); got != "" {
		t.Errorf("got io.max %q with a class without limits, want nothing", got)
	}
	c.modify(t, limits4Mi)
	deletePod(t, c.ns, "data")
	eventually(t, time.Minute, "the pod has no cgroup, and no other pod has a limit for the device "+device, func() (string, bool) {
		var left []string
		for _, other := range podCgroups(t) {
			b, _ := os.ReadFile(filepath.Join(string(other), "io.max"))
			if other == pod || strings.Contains("\n"+string(b), "\n"+device+" ") {
				left = append(left, fmt.Sprintf("%s: %q", other, b))
			}
		}
		return strings.Join(left, "; "), len(left) == 0
	})
}

// podCgroups returns the cgroups of the pods on all nodes by their UIDs.
func podCgroups(t *testing.T) map[string]cgroup.Pod {
	t.Helper()
	pods, err := cgroup.Hierarchy(cgroup.Root).Pods()
	must(t, err)
	return pods
}

// ioMax returns the limits in the cgroup of a pod.
func ioMax(t *testing.T, pod cgroup.Pod) string {
	t.Helper()
	return strings.TrimSpace(read(t, filepath.Join(string(pod), "io.max")))
}

// wantTime fails the test unless dd(1) in the pod takes 10 seconds, which its limit requires, within a tenth.
func (c limitedClaim) wantTime(t *testing.T, dd string) {
	t.Helper()
	const want = 10 * time.Second
	lines := strings.Split(execIn(t, c.ns, "data", "time -f %e dd "+dd+" 2>&1"), "\n")
	seconds, err := strconv.ParseFloat(lines[len(lines)-1], 64)
	must(t, err)
	took := time.Duration(seconds * float64(time.Second))
	t.Logf("dd %s: %s, by the limit %s", dd, took, want)
	if took < want*9/10 || took > want*11/10 {
		t.Errorf("dd %s took %s, want %s within a tenth", dd, took, want)
	}
}
