//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	drivers "github.com/trivet-csi/trivet/driver"
)

// TestCheckAndTrim trims and checks the volume of a running pod with `kubectl trivet`, in a cluster and with the shape oneNode,
// whose pods have other labels. The driver of the latter also checks it when it is due.
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
	records, err := filepath.Glob(n.throughMounts(filepath.Join(limitedPool, "volumes/*/checked")))
	if err != nil || len(records) != 1 {
		t.Fatalf("got records %v of checks and error %v, want one", records, err)
	}
	const old = `{"at":"2026-01-01T00:00:00Z","damaged":false}`
	must(t, os.WriteFile(records[0], []byte(old), 0o600))
	helmUpgrade(t, "--set", "pools.limited.check=weekly", "--set", "shape=oneNode", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+n.name)
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/trivet", "--timeout=3m")
	waitRegistered(t, n)
	eventually(t, time.Minute, "the volume is checked as its pool says", func() (string, bool) {
		record := read(t, records[0])
		return record, record != old
	})
	trimAndCheck()
	deletePod(t, ns, "data")
}
