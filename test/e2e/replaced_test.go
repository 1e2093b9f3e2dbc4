//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestReplacedNode does what docs/kubernetes.md says of a node that is replaced and
// of a cluster that has lost its PersistentVolumes: the pool's directory is copied,
// and PersistentVolumes are written from what `trivet volumes` shows.
func TestReplacedNode(t *testing.T) {
	ns := newNamespace(t, "replaced")
	applyText(t, ns, fmt.Sprintf(claimAndPod, "moved", "0", fmt.Sprintf(writes, "moved")))
	waitReady(t, ns)
	kubectl(t, "-n", ns, "delete", "pod", "moved-0")
	eventually(t, 2*time.Minute, "the volume detached", func() (string, bool) {
		left := append(leftMounts(t), leftDevices()...)
		return strings.Join(left, "; "), len(left) == 0
	})

	// The cluster forgets the volume, the node's disk does not.
	volume := kubectl(t, "-n", ns, "get", "pvc", "moved", "-o", "jsonpath={.spec.volumeName}")
	kubectl(t, "patch", "pv", volume, "--type=merge", "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	kubectl(t, "-n", ns, "delete", "pvc", "moved")
	kubectl(t, "delete", "pv", volume)

	// The new machine has a copy.
	kubectl(t, "delete", "-f", manifests, "--timeout=3m")
	run(t, "sh", "-c", "mv "+stateDir+" "+stateDir+".old && rsync -aHAXS "+stateDir+".old/ "+stateDir+"/")
	t.Cleanup(func() { mustRemove(t, stateDir+".old") })
	install(t)

	var listed []struct {
		ID        string `json:"id"`
		SizeBytes int64  `json:"sizeBytes"`
		Content   string `json:"content"`
	}
	out := kubectl(t, "-n", namespace, "exec", "daemonset/trivet", "-c", "trivet", "--", "trivet", "volumes", "-o", "json")
	if err := json.Unmarshal([]byte(out), &listed); err != nil || len(listed) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	found := listed[0]
	applyText(t, ns, fmt.Sprintf(restored, volume, found.SizeBytes, found.Content, found.ID, ns, theNode(t).Name))
	applyText(t, ns, strings.Replace(fmt.Sprintf(claimAndPod, "moved", "1", fmt.Sprintf(finds, "moved")), "spec:\n", "spec:\n  volumeName: "+volume+"\n", 1))
	waitReady(t, ns)
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
