//go:build e2e

package e2e

import (
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDrained drains the node and gives it back: nothing stays staged meanwhile, and
// the pods come back with their data.
func TestDrained(t *testing.T) {
	ns := newNamespace(t, "drained")
	apply(t, ns, filepath.Join(examples, "statefulset.yaml"))
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	in(t, ns, "example-stateful-0", "echo kept >/data/kept && sync /data/kept")

	node := theNode(t).Name
	t.Cleanup(func() { kubectlLast(t, "uncordon", node) })
	kubectl(t, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=3m")
	eventually(t, 2*time.Minute, "nothing mounted or attached on the drained node", func() (string, bool) {
		left := append(leftMounts(t), leftDevices()...)
		return strings.Join(left, "; "), len(left) == 0
	})

	kubectl(t, "uncordon", node)
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	waitReady(t, ns)
	if got := in(t, ns, "example-stateful-0", "cat /data/kept"); got != "kept" {
		t.Errorf("came back with %q", got)
	}
}
