//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"testing"
	"time"
)

// TestIOLimits changes the VolumeAttributesClass of a claim while a pod uses it. Nodes with cgroup v1 refuse limits, with the reason
// in an event, and the claim then accepts another class.
func TestIOLimits(t *testing.T) {
	ensureInstalled(t)
	ns := newNamespace(t, "limits")
	limited, unlimited := ns+"-limited", ns+"-unlimited"
	for name, value := range map[string]string{limited: "1000", unlimited: "max"} {
		kubectlInput(t, fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: %s}
driverName: csi.trivet.dev
parameters: {iopsRead: "%s"}
`, name, value), "apply", "-f", "-")
		t.Cleanup(func() { kubectlLast(t, "delete", "volumeattributesclass", name) })
	}
	startPod(t, ns, claimPod{name: "data"})
	use := func(class string) {
		t.Helper()
		kubectl(t, "-n", ns, "patch", "pvc", "data", "-p", fmt.Sprintf(`{"spec":{"volumeAttributesClassName":%q}}`, class))
	}
	has := func(class string) {
		t.Helper()
		kubectl(t, "-n", ns, "wait", "pvc", "data", "--for=jsonpath={.status.currentVolumeAttributesClassName}="+class, "--timeout=2m")
	}
	use(unlimited)
	has(unlimited)
	use(limited)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); errors.Is(err, fs.ErrNotExist) {
		waitDescribed(t, 2*time.Minute, ns, "pvc/data", "not a cgroup v2 hierarchy")
		kubectl(t, "-n", ns, "wait", "pvc", "data", "--for=jsonpath={.status.modifyVolumeStatus.status}=Infeasible", "--timeout=2m")
	} else {
		has(limited)
	}
	use(unlimited)
	has(unlimited)
	deletePod(t, ns, "data")
}
