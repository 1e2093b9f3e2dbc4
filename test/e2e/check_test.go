//go:build e2e

package e2e

import (
	"testing"

	drivers "github.com/trivet-csi/trivet/driver"
)

// TestCheckAndTrim trims and checks the volume of a running pod with `kubectl trivet`, in a cluster and with the shape oneNode,
// whose pods have other labels.
func TestCheckAndTrim(t *testing.T) {
	ns := newNamespace(t, "check")
	plugin := installPlugin(t, "trivet")
	installLocal(t)
	n := nodes()[0]
	startPod(t, ns, claimPod{name: "data", node: n.name, size: "512Mi"})
	trimAndCheck := func() {
		t.Helper()
		execIn(t, ns, "data", "dd if=/dev/urandom of=/data/deleted bs=1M count=64 && sync && rm /data/deleted && sync")
		var trimmed []drivers.TrimResult
		readJSON(t, plugin(t.Context(), "trim", "data", "-n", ns, "-o", "json"), &trimmed)
		if len(trimmed) != 1 || trimmed[0].Problem != "" || trimmed[0].TrimmedBytes < 64<<20 {
			t.Errorf("trim: got %+v, want at least 64 MiB of one volume", trimmed)
		}
		var checked []drivers.CheckResult
		readJSON(t, plugin(t.Context(), "check", "data", "-n", ns, "-o", "json"), &checked)
		if len(checked) != 1 || checked[0].Result != drivers.CheckClean || checked[0].Problem != "" {
			t.Errorf("check: got %+v, want one volume that is clean", checked)
		}
	}
	trimAndCheck()
	helmUpgrade(t, "--set", "shape=oneNode", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+n.name)
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/trivet", "--timeout=3m")
	waitRegistered(t, n)
	trimAndCheck()
	deletePod(t, ns, "data")
}
