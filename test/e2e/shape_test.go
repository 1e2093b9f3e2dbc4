//go:build e2e && !vm

package e2e

import "testing"

// extraTime is added to the time that a command or a condition may take.
const extraTime = 0

// workloads are the DaemonSet and the Deployment of the driver.
var workloads = []string{"daemonset/trivet-node", "deployment/trivet-controller"}

// install applies the unmodified manifests and waits for the driver.
func install(t *testing.T) {
	t.Helper()
	kubectl(t, "apply", "--server-side", "-f", manifests)
	waitDriver(t)
}
