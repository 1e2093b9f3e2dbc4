//go:build e2e

package e2e

import (
	"os"
	"strings"
	"testing"
	"time"
)

// TestUnstageFails: while NodeUnstageVolume fails, here because a process uses the mount at the staging path, pods of
// the volume end, and new pods on the node can use it. The volume stays attached, therefore its PersistentVolume cannot
// be deleted.
func TestUnstageFails(t *testing.T) {
	ns := newNamespace(t, "unstage")
	n := nodes()[0]
	startPod(t, ns, claimPod{name: "data", node: n.name})
	volume := volumeOf(t, ns, "data")
	staged := n.mounts(t, func(m string) bool { return strings.Contains(m, "/plugins/kubernetes.io/csi/") })
	if len(staged) != 1 {
		t.Fatalf("got %d staging mounts on %s, want one", len(staged), n.name)
	}
	user, err := os.Open(n.throughMounts(staged[0].Mountpoint))
	must(t, err)
	defer user.Close()

	kubectl(t, "-n", ns, "delete", "pod", "data", "--timeout=1m")
	waitUnstageFails(t, n, volume)
	startPod(t, ns, claimPod{name: "data", pod: "second", node: n.name, command: checkToken})
	kubectl(t, "-n", ns, "delete", "pod", "second", "--timeout=1m")
	kubectl(t, "-n", ns, "delete", "pvc", "data", "--timeout=1m")
	waitDescribed(t, time.Minute, ns, "pv/"+volume, "Released", "is still attached to node "+n.name)

	must(t, user.Close())
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=4m") // a kubelet repeats a failed call after at most 2 minutes
}

// waitUnstageFails waits until the log of the node's driver has a failed NodeUnstageVolume of a volume.
func waitUnstageFails(t *testing.T, n node, volume string) {
	t.Helper()
	pod := n.driverPod(t)
	eventually(t, time.Minute, "NodeUnstageVolume of "+volume+" fails", func() (string, bool) {
		log := kubectl(t, "-n", namespace, "logs", pod, "-c", "trivet", "--tail=200")
		return tail(log, 10), hasLine(log, "NodeUnstageVolume", volume, "device or resource busy")
	})
}
