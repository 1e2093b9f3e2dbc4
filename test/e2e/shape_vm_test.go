//go:build e2e && vm

package e2e

import (
	"testing"
	"time"
)

// extraTime is added to the time that a command or a condition may take, because the API server in the virtual machine may be
// too slow for the timeouts of its clients. Commands are repeated for this time.
const extraTime = 15 * time.Minute

// workloads are the DaemonSet of the driver.
var workloads = []string{"daemonset/trivet"}

// install installs the chart with its default values and waits for the driver.
func install(t *testing.T) {
	t.Helper()
	installOneNode(t)
	waitDriver(t)
}

// installOneNode installs the chart with the shape oneNode, which needs no leader election. The sidecars of the other shape lose
// their leases if the API server does not answer for 10 s.
func installOneNode(t *testing.T, options ...string) {
	t.Helper()
	run(t, "helm", append([]string{
		"upgrade", "--install", "trivet", chart, "-n", namespace, "--create-namespace", "--set", "shape=oneNode",
		"--wait", "--timeout=" + extraTime.String(),
	}, options...)...)
}
