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

// TestReplacedNode does what docs/kubernetes.md says of a node that is replaced by one
// of another name, and of a cluster that has lost its PersistentVolumes: the pool's
// directory is moved, and PersistentVolumes are written from what `trivet volumes` shows.
func TestReplacedNode(t *testing.T) {
	ns := newNamespace(t, "replaced")
	from, to := nodes()[0], nodes()[1]
	moveIn(t, ns, tenant{name: "moved", node: from.name})
	kubectl(t, "-n", ns, "delete", "pod", "moved")
	from.checkDetached(t)

	// The cluster forgets the volume, the node's disk does not.
	volume := kubectl(t, "-n", ns, "get", "pvc", "moved", "-o", "jsonpath={.spec.volumeName}")
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	kubectl(t, "-n", ns, "delete", "pvc", "moved")
	kubectl(t, "delete", "pv", volume)

	// The new machine has a copy; the old one begins with an empty disk.
	stopNodes(t)
	mustRemove(t, to.path(stateDir))
	run(t, "rsync", "-aHAXS", from.path(stateDir)+"/", to.path(stateDir)+"/")
	mustRemove(t, from.path(stateDir))
	install(t)
	run(t, "sh", "-c", moveCommand(t, to))
	eventually(t, 2*time.Minute, "doctor is content with the nodes", func() (string, bool) {
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
		t.Fatalf("%v: %s", err, out)
	}
	found := listed[0]
	applyText(t, ns, fmt.Sprintf(restored, volume, found.SizeBytes, found.Content, found.ID, ns, to.name))
	moveIn(t, ns, tenant{name: "moved", node: to.name, volume: volume, does: finds})
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
}

// restored is a PersistentVolume as docs/kubernetes.md has it.
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

// stopNodes ends the drivers of all nodes. The controller, and what it has on record, stay.
func stopNodes(t *testing.T) {
	t.Helper()
	kubectl(t, "-n", namespace, "delete", "daemonset/trivet-node", "--cascade=foreground", "--timeout=3m")
}

var recordCommand = regexp.MustCompile(`kubectl -n \S+ patch configmap \S+ --type=merge -p '[^']*'`)

// moveCommand is what doctor says to run if a pool was moved to a node.
func moveCommand(t *testing.T, to node) (command string) {
	t.Helper()
	eventually(t, 2*time.Minute, "doctor has a command", func() (string, bool) {
		out := doctorOfController(t)
		command = recordCommand.FindString(out)
		return out, strings.Contains(command, `"`+to.name+`"`)
	})
	return command
}

// doctorOfController is what the controller's doctor says, be it good or bad.
func doctorOfController(t *testing.T) string {
	t.Helper()
	out, _ := try(t.Context(), "kubectl", "-n", namespace, "exec", "deployment/trivet-controller", "-c", "trivet", "--", "trivet", "doctor")
	return out
}

// TestCopiedDisk: two nodes have one pool, since a disk was copied. The one on record is
// served as ever. In the other nothing is made or deleted until it has a pool of its own.
func TestCopiedDisk(t *testing.T) {
	ns := newNamespace(t, "copied")
	owner, copied := nodes()[0], nodes()[1]
	moveIn(t, ns, tenant{name: "data", node: owner.name})
	volume := volumeOf(t, ns, "data")
	kubectl(t, "-n", ns, "delete", "pod", "data")
	owner.checkDetached(t)

	stopNodes(t)
	mustRemove(t, copied.path(stateDir))
	run(t, "rsync", "-aHAXS", owner.path(stateDir)+"/", copied.path(stateDir)+"/")
	install(t)
	applyText(t, ns, tenant{name: "more", node: copied.name}.manifest())
	eventuallySays(t, time.Minute, ns, "pod/more", "did not have enough free storage")
	kubectl(t, "-n", ns, "delete", "pvc", "data")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
	if _, err := os.Stat(filepath.Join(copied.path(stateDir), "pools/default/volumes", volume)); err != nil {
		t.Errorf("the copy was changed: %v", err)
	}

	mustRemove(t, copied.path(stateDir))
	kubectl(t, "-n", namespace, "delete", "pod", copied.driverPod(t))
	kubectl(t, "-n", ns, "wait", "pod", "more", "--for=condition=Ready", "--timeout=3m")
	waitDriver(t)
	moveIn(t, ns, tenant{name: "there", node: owner.name})
}

// TestPoolOwnersRights: the controller may add to the record of pools, and the nodes' pods may not
// write it.
func TestPoolOwnersRights(t *testing.T) {
	installed(t)
	for account, rights := range map[string]map[string]string{
		"trivet-node":       {"patch": "no", "update": "no", "delete": "no", "create": "no"},
		"trivet-controller": {"patch": "yes", "update": "no", "delete": "no"},
	} {
		for verb, want := range rights {
			out, _ := try(t.Context(), "kubectl", "auth", "can-i", verb, "configmaps/trivet-pools", "-n", namespace, "--as=system:serviceaccount:"+namespace+":"+account)
			if got := strings.TrimSpace(strings.SplitN(out, "\n", 2)[0]); got != want {
				t.Errorf("%s may %s: %s", account, verb, out)
			}
		}
	}
}
