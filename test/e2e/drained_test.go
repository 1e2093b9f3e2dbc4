//go:build e2e

package e2e

import (
	"path/filepath"
	"testing"
	"time"
)

// TestDrained drains a node and gives it back: nothing stays staged meanwhile, and
// the pods come back with their data.
func TestDrained(t *testing.T) {
	ns := newNamespace(t, "drained")
	apply(t, ns, filepath.Join(examples, "statefulset.yaml"))
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	in(t, ns, "example-stateful-0", "echo kept >/data/kept && sync /data/kept")

	n := nodeNamed(t, nodeOf(t, ns, "example-stateful-0"))
	t.Cleanup(func() { kubectlLast(t, "uncordon", n.name) })
	kubectl(t, "drain", n.name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=3m")
	n.checkDetached(t)
	eventuallySays(t, time.Minute, ns, "pod/example-stateful-0", "didn't match PersistentVolume's node affinity")

	kubectl(t, "uncordon", n.name)
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	waitReady(t, ns)
	if got := in(t, ns, "example-stateful-0", "cat /data/kept"); got != "kept" {
		t.Errorf("came back with %q", got)
	}
}
