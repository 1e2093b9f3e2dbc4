//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
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
	kubectl(t, "delete", "-f", manifests, "--timeout=3m")
	mustRemove(t, to.path(stateDir))
	run(t, "rsync", "-aHAXS", from.path(stateDir)+"/", to.path(stateDir)+"/")
	mustRemove(t, from.path(stateDir))
	install(t)

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

// TestCopiedDisk: two nodes have one pool, since a disk was copied. Nothing is made or
// deleted there until one of them is without it.
func TestCopiedDisk(t *testing.T) {
	ns := newNamespace(t, "copied")
	owner, copied := nodes()[0], nodes()[1]
	moveIn(t, ns, tenant{name: "data", node: owner.name})
	volume := volumeOf(t, ns, "data")
	kubectl(t, "-n", ns, "delete", "pod", "data")
	owner.checkDetached(t)

	kubectl(t, "delete", "-f", manifests, "--timeout=3m")
	mustRemove(t, copied.path(stateDir))
	run(t, "rsync", "-aHAXS", owner.path(stateDir)+"/", copied.path(stateDir)+"/")
	install(t)
	kubectl(t, "-n", ns, "delete", "pvc", "data")
	eventuallySays(t, time.Minute, "default", "pv/"+volume, "VolumeFailedDelete", "one of their disks is a copy of the other's")
	applyText(t, ns, tenant{name: "more", node: owner.name}.manifest())
	eventuallySays(t, time.Minute, ns, "pod/more", "did not have enough free storage")

	mustRemove(t, copied.path(stateDir))
	kubectl(t, "-n", namespace, "delete", "pod", copied.driverPod(t))
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
	kubectl(t, "-n", ns, "wait", "pod", "more", "--for=condition=Ready", "--timeout=3m")
	waitDriver(t)
	moveIn(t, ns, tenant{name: "there", node: copied.name})
}
