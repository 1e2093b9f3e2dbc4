//go:build e2e

package e2e

import (
	"path/filepath"
	"testing"
	"time"
)

// TestDrained drains a node and uncordons it. While the node is drained, no volume is staged on it.
// Afterwards the pods start again with their data.
func TestDrained(t *testing.T) {
	ns := newNamespace(t, "drained")
	apply(t, ns, filepath.Join(examples, "statefulset.yaml"))
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	execIn(t, ns, "example-stateful-0", "echo kept >/data/kept && sync /data/kept")

	n := nodeNamed(t, nodeOf(t, ns, "example-stateful-0"))
	t.Cleanup(func() { kubectlLast(t, "uncordon", n.name) })
	kubectl(t, "drain", n.name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=3m")
	n.checkDetached(t)
	waitDescribed(t, time.Minute, ns, "pod/example-stateful-0", "didn't match PersistentVolume's node affinity")

	kubectl(t, "uncordon", n.name)
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	waitReady(t, ns)
	if got := execIn(t, ns, "example-stateful-0", "cat /data/kept"); got != "kept" {
		t.Errorf("got %q from /data/kept after the drain, want %q", got, "kept")
	}
}
