//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestReplacedNode follows docs/operations/nodes.md for a node that is replaced by one with another name, and for a
// cluster that has lost its PersistentVolumes. It moves the pool's directory to the other node, and writes a
// PersistentVolume with the values that `trivet volumes` shows.
func TestReplacedNode(t *testing.T) {
	ns := newNamespace(t, "replaced")
	from, to := nodes()[0], nodes()[1]
	startPod(t, ns, claimPod{name: "moved", node: from.name})
	kubectl(t, "-n", ns, "delete", "pod", "moved")
	from.checkDetached(t)

	// Delete the volume's objects in the cluster, and keep the volume on the node.
	volume := kubectl(t, "-n", ns, "get", "pvc", "moved", "-o", "jsonpath={.spec.volumeName}")
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	kubectl(t, "-n", ns, "delete", "pvc", "moved")
	kubectl(t, "delete", "pv", volume)

	// Move the state directory to the other node. The first node starts with an empty one.
	stopNodes(t)
	removeAll(t, to.path(stateDir))
	run(t, "rsync", "-aHAXS", from.path(stateDir)+"/", to.path(stateDir)+"/")
	removeAll(t, from.path(stateDir))
	install(t)
	run(t, "sh", "-c", moveCommand(t, to))
	eventually(t, 2*time.Minute, "doctor reports no pool that is recorded for another node", func() (string, bool) {
		out := doctorOfController(t)
		return out, !strings.Contains(out, "is recorded for node")
	})

	var listed []struct {
		ID        string `json:"id"`
		SizeBytes int64  `json:"sizeBytes"`
		Content   string `json:"content"`
	}
	out := kubectl(t, "-n", namespace, "exec", to.driverPod(t), "-c", "trivet", "--", "trivet", "volumes", "-o", "json")
	if err := json.Unmarshal([]byte(out), &listed); err != nil || len(listed) != 1 {
		t.Fatalf("got error %v and volumes %s, want one volume", err, out)
	}
	found := listed[0]
	applyText(t, ns, fmt.Sprintf(restored, volume, found.SizeBytes, found.Content, found.ID, ns, to.name))
	startPod(t, ns, claimPod{name: "moved", node: to.name, volume: volume, command: checkToken})
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
}

// restored is the manifest of a PersistentVolume in docs/operations/nodes.md.
const restored = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[1]s, annotations: {pv.kubernetes.io/provisioned-by: csi.trivet.dev}}
spec:
  capacity: {storage: "%[2]d"}
  accessModes: [ReadWriteOnce]
  storageClassName: trivet-loop
  persistentVolumeReclaimPolicy: Retain
  csi: {driver: csi.trivet.dev, volumeHandle: "%[4]s", fsType: %[3]s}
  claimRef: {namespace: %[5]s, name: moved}
  nodeAffinity:
    required: {nodeSelectorTerms: [{matchExpressions: [{key: csi.trivet.dev/node, operator: In, values: [%[6]s]}]}]}
`

// stopNodes ends the drivers of all nodes. The controller and its record of the pools' nodes stay.
func stopNodes(t *testing.T) {
	t.Helper()
	kubectl(t, "-n", namespace, "delete", "daemonset/trivet-node", "--cascade=foreground", "--timeout=3m")
}

// recordCommand matches the command that records a pool for another node.
var recordCommand = regexp.MustCompile(`kubectl -n \S+ patch configmap \S+ --type=merge -p '[^']*'`)

// moveCommand returns the command that doctor suggests after a pool was moved to a node.
func moveCommand(t *testing.T, to node) (command string) {
	t.Helper()
	eventually(t, 2*time.Minute, "doctor suggests a command for "+to.name, func() (string, bool) {
		out := doctorOfController(t)
		command = recordCommand.FindString(out)
		return out, strings.Contains(command, `"`+to.name+`"`)
	})
	return command
}

// doctorOfController returns the output of `trivet doctor` in the controller's pod, even if it reports
// failures.
func doctorOfController(t *testing.T) string {
	t.Helper()
	out, _ := try(t.Context(), "kubectl", "-n", namespace, "exec", "deployment/trivet-controller", "-c", "trivet", "--", "trivet", "doctor")
	return out
}

// TestCopiedDisk copies the pool of one node to another. The recorded node must still work. On the other node,
// no volume may be created or deleted until it has a different pool.
func TestCopiedDisk(t *testing.T) {
	ns := newNamespace(t, "copied")
	owner, copied := nodes()[0], nodes()[1]
	startPod(t, ns, claimPod{name: "data", node: owner.name})
	volume := volumeOf(t, ns, "data")
	kubectl(t, "-n", ns, "delete", "pod", "data")
	owner.checkDetached(t)

	stopNodes(t)
	removeAll(t, copied.path(stateDir))
	run(t, "rsync", "-aHAXS", owner.path(stateDir)+"/", copied.path(stateDir)+"/")
	install(t)
	applyText(t, ns, claimPod{name: "more", node: copied.name}.manifest())
	waitDescribed(t, time.Minute, ns, "pod/more", "did not have enough free storage")
	kubectl(t, "-n", ns, "delete", "pvc", "data")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
	if _, err := os.Stat(filepath.Join(copied.path(stateDir), "pools/default/volumes", volume)); err != nil {
		t.Errorf("got error %v for the volume in the copied pool, want it unchanged", err)
	}

	removeAll(t, copied.path(stateDir))
	kubectl(t, "-n", namespace, "delete", "pod", copied.driverPod(t))
	kubectl(t, "-n", ns, "wait", "pod", "more", "--for=condition=Ready", "--timeout=3m")
	waitDriver(t)
	startPod(t, ns, claimPod{name: "there", node: owner.name})
}

// TestPoolOwnersRights checks that the controller may patch the ConfigMap that records the nodes of pools, and
// that the nodes' pods may not change it.
func TestPoolOwnersRights(t *testing.T) {
	ensureInstalled(t)
	for account, rights := range map[string]map[string]string{
		"trivet-node":       {"patch": "no", "update": "no", "delete": "no", "create": "no"},
		"trivet-controller": {"patch": "yes", "update": "no", "delete": "no"},
	} {
		for verb, want := range rights {
			out, _ := try(t.Context(), "kubectl", "auth", "can-i", verb, "configmaps/trivet-pools", "-n", namespace, "--as=system:serviceaccount:"+namespace+":"+account)
			if got := strings.TrimSpace(strings.SplitN(out, "\n", 2)[0]); got != want {
				t.Errorf("%s may %s the ConfigMap: got %s, want %s", account, verb, out, want)
			}
		}
	}
}
