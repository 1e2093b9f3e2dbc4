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

// die ends the node's kubelet and all of its containers, and keeps them so until revive.
func (n node) die(t *testing.T) {
	t.Helper()
	must(t, os.WriteFile(n.stopped(), nil, 0o600))
	t.Cleanup(func() { n.revive(t) })
	if kill(n.kubelet()...) == 0 || kill(n.contained()...) == 0 {
		t.Fatalf("%s has no kubelet or no containers to kill", n.name)
	}
	eventually(t, time.Minute, n.name+" is dead", func() (string, bool) {
		return "", kill(n.kubelet()...)+kill(n.contained()...) == 0
	})
}

func (n node) revive(t *testing.T) {
	if err := os.Remove(n.stopped()); err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
}

func (n node) stopped() string { return filepath.Join(n.dir, "kubelet.stop") }

const outOfService = "node.kubernetes.io/out-of-service"

// TestDeadNode: kubelet and drivers of a node end without a word. Its pods can be
// moved and its volumes detached, the other node's volumes are not affected, and what
// is deleted meanwhile goes when the node is back.
func TestDeadNode(t *testing.T) {
	ns := newNamespace(t, "dead")
	immediateClass(t)
	alive, dead := nodes()[0], nodes()[1]
	moveIn(t, ns, tenant{name: "kept", node: dead.name})
	moveIn(t, ns, tenant{name: "dropped", node: dead.name})
	dropped := volumeOf(t, ns, "dropped")

	dead.die(t)
	kubectl(t, "wait", "node", dead.name, "--for=condition=Ready=Unknown", "--timeout=3m")
	kubectl(t, "taint", "node", dead.name, outOfService+"=nodeshutdown:NoExecute")
	t.Cleanup(func() { _, _ = try(context.Background(), "kubectl", "taint", "node", dead.name, outOfService+"-") })
	eventually(t, 3*time.Minute, "pods and attachments of the dead node gone", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pod,volumeattachment", "-o", "name")
		return out, err == nil && out == ""
	})

	// The living node's volumes are made and deleted as ever.
	checkServes(t, ns, alive)
	// The dead one's wait.
	kubectl(t, "-n", ns, "delete", "pvc", "dropped")
	eventuallySays(t, 2*time.Minute, "default", "pv/"+dropped, "VolumeFailedDelete", `node "`+dead.name+`"`)

	dead.revive(t)
	kubectl(t, "wait", "node", dead.name, "--for=condition=Ready", "--timeout=3m")
	kubectl(t, "taint", "node", dead.name, outOfService+"-")
	kubectl(t, "wait", "pv", dropped, "--for=delete", "--timeout=3m")
	moveIn(t, ns, tenant{name: "kept", node: dead.name, does: finds})
	waitDriver(t)
}

// checkServes creates, uses and deletes volumes, with a pod and without. They must be on that
// node, because the other one is down.
func checkServes(t *testing.T, ns string, n node) {
	t.Helper()
	moveIn(t, ns, tenant{name: "meanwhile"})
	applyText(t, ns, claim("immediate", "immediate", "32Mi", ""))
	for _, name := range []string{"meanwhile", "immediate"} {
		if at := placeOf(t, volumeOf(t, ns, name)); at != n.name {
			t.Errorf("the volume of %s is on %s", name, at)
		}
	}
	moveOut(t, ns, "meanwhile")
	volume := volumeOf(t, ns, "immediate")
	kubectl(t, "-n", ns, "delete", "pvc", "immediate")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
}

// TestGoneNode does what docs/kubernetes.md says of a node that is gone with its disk,
// and another machine then has its name.
func TestGoneNode(t *testing.T) {
	ns := newNamespace(t, "gone")
	immediateClass(t)
	alive, gone := nodes()[0], nodes()[1]
	moveIn(t, ns, tenant{name: "lost", node: gone.name})
	volume := volumeOf(t, ns, "lost")
	kubectl(t, "-n", ns, "delete", "pod", "lost")
	gone.checkDetached(t)

	gone.die(t)
	mustRemove(t, gone.path(stateDir))
	kubectl(t, "delete", "node", gone.name)
	checkServes(t, ns, alive)
	kubectl(t, "-n", ns, "delete", "pvc", "lost")
	eventuallySays(t, 3*time.Minute, "default", "pv/"+volume, "VolumeFailedDelete", `"`+gone.name+`" is gone`)
	kubectl(t, "delete", "pv", volume, "--wait=false")
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	eventually(t, time.Minute, "PersistentVolume gone", func() (string, bool) {
		all, err := client.CoreV1().PersistentVolumes().List(t.Context(), metav1.ListOptions{})
		return "", err == nil && len(all.Items) == 0
	})

	gone.revive(t)
	eventually(t, 2*time.Minute, "the new node", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "wait", "node", gone.name, "--for=condition=Ready", "--timeout=1s")
		return out, err == nil
	})
	waitDriver(t)
	moveIn(t, ns, tenant{name: "found", node: gone.name})
}
