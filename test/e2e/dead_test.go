//go:build e2e

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// die kills the node's kubelet and all processes of its containers. The kubelet does not start again before
// revive.
func (n node) die(t *testing.T) {
	t.Helper()
	n.killWithKubelet(t, n.containerProcesses)
}

// killWithKubelet kills the node's kubelet and other processes. The kubelet does not start again before revive.
func (n node) killWithKubelet(t *testing.T, others func() []int) {
	t.Helper()
	must(t, os.WriteFile(n.stopFile(), nil, 0o600))
	t.Cleanup(func() { n.revive(t) })
	if kill(n.kubeletProcesses()...) == 0 || kill(others()...) == 0 {
		t.Fatalf("got no kubelet or no other processes to kill on %s, want both", n.name)
	}
	eventually(t, time.Minute, "the kubelet and the other processes of "+n.name+" have ended", func() (string, bool) {
		return "", kill(n.kubeletProcesses()...)+kill(others()...) == 0
	})
}

// revive lets the node's kubelet start again.
func (n node) revive(t *testing.T) {
	if err := os.Remove(n.stopFile()); err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
}

// stopFile returns the path of the file that keeps the kubelet from starting (see cluster/node.sh).
func (n node) stopFile() string { return filepath.Join(n.dir, "kubelet.stop") }

// outOfService is the key of the taint with which an administrator declares that a node is shut down.
const outOfService = "node.kubernetes.io/out-of-service"

// TestDeadNode kills the kubelet and the containers of a node. The node's pods can be evicted and its volumes
// detached, the other node's volumes are not affected, and a volume that is deleted meanwhile is removed when
// the node is back.
func TestDeadNode(t *testing.T) {
	ns := newNamespace(t, "dead")
	immediateClass(t)
	alive, dead := nodes()[0], nodes()[1]
	startPod(t, ns, claimPod{name: "kept", node: dead.name})
	startPod(t, ns, claimPod{name: "dropped", node: dead.name})
	dropped := volumeOf(t, ns, "dropped")

	dead.die(t)
	kubectl(t, "wait", "node", dead.name, "--for=condition=Ready=Unknown", "--timeout=3m")
	kubectl(t, "taint", "node", dead.name, outOfService+"=nodeshutdown:NoExecute")
	t.Cleanup(func() { _, _ = try(context.Background(), "kubectl", "taint", "node", dead.name, outOfService+"-") })
	eventually(t, 3*time.Minute, "the pods and VolumeAttachments of the dead node are deleted", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pod,volumeattachment", "-o", "name")
		return out, err == nil && out == ""
	})

	// Volumes on the other node can be created and deleted.
	checkServes(t, ns, alive)
	// A volume on the dead node cannot be deleted yet.
	kubectl(t, "-n", ns, "delete", "pvc", "dropped")
	waitDescribed(t, 2*time.Minute, "default", "pv/"+dropped, "VolumeFailedDelete", `node "`+dead.name+`"`)

	dead.revive(t)
	kubectl(t, "wait", "node", dead.name, "--for=condition=Ready", "--timeout=3m")
	kubectl(t, "taint", "node", dead.name, outOfService+"-")
	kubectl(t, "wait", "pv", dropped, "--for=delete", "--timeout=3m")
	startPod(t, ns, claimPod{name: "kept", node: dead.name, command: checkToken})
	waitDriver(t)
}

// checkServes creates, uses and deletes volumes, with a pod and without. They must be on the given node,
// because the other one is down.
func checkServes(t *testing.T, ns string, n node) {
	t.Helper()
	startPod(t, ns, claimPod{name: "meanwhile"})
	applyText(t, ns, claim("immediate", "immediate", "32Mi", ""))
	for _, name := range []string{"meanwhile", "immediate"} {
		if at := nodeOfVolume(t, volumeOf(t, ns, name)); at != n.name {
			t.Errorf("got volume of claim %s on %s, want %s", name, at, n.name)
		}
	}
	deletePod(t, ns, "meanwhile")
	volume := volumeOf(t, ns, "immediate")
	kubectl(t, "-n", ns, "delete", "pvc", "immediate")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
}

// TestGoneNode follows docs/operations/nodes.md for a node that is lost with its disk. Then another machine joins
// with the same name.
func TestGoneNode(t *testing.T) {
	ns := newNamespace(t, "gone")
	immediateClass(t)
	alive, gone := nodes()[0], nodes()[1]
	startPod(t, ns, claimPod{name: "lost", node: gone.name})
	volume := volumeOf(t, ns, "lost")
	kubectl(t, "-n", ns, "delete", "pod", "lost")
	gone.checkDetached(t)

	gone.die(t)
	removeAll(t, gone.path(stateDir))
	kubectl(t, "delete", "node", gone.name)
	checkServes(t, ns, alive)
	kubectl(t, "-n", ns, "delete", "pvc", "lost")
	waitDescribed(t, 3*time.Minute, "default", "pv/"+volume, "VolumeFailedDelete", `"`+gone.name+`" is gone`)
	kubectl(t, "delete", "pv", volume, "--wait=false")
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	eventually(t, time.Minute, "the PersistentVolume is deleted", func() (string, bool) {
		all, err := client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		return "", err == nil && len(all.Items) == 0
	})

	gone.revive(t)
	eventually(t, 2*time.Minute, "the new node is ready", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "wait", "node", gone.name, "--for=condition=Ready", "--timeout=1s")
		return out, err == nil
	})
	waitDriver(t)
	startPod(t, ns, claimPod{name: "found", node: gone.name})
}
