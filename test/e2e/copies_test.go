//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"
)

// copiesClass is a StorageClass with a value of the parameter copies.
const copiesClass = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: copies-%[1]s}
provisioner: csi.trivet.dev
parameters: {backend: loop, pool: limited, copies: %[1]s, csi.storage.k8s.io/fstype: ext4}
volumeBindingMode: WaitForFirstConsumer
---
`

// restoringPod is a claim for a volume that is restored from the snapshot "taken", and a pod that is ready when the volume has
// the token of the source. The last value is the affinity of the pod to nodes.
const restoringPod = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s}
spec:
  storageClassName: %[2]s
  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: taken}
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  affinity: {nodeAffinity: %[3]s}
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sh, -c, 'test "$(cat /data/token)" = source && touch /tmp/ready && sleep 1000000']
    readinessProbe: {exec: {command: [cat, /tmp/ready]}, periodSeconds: 1}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %[1]s}}]
`

// takenSnapshot is a snapshot of the claim "source", and its class.
const takenSnapshot = `
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: copies}
driver: csi.trivet.dev
deletionPolicy: Delete
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: taken}
spec: {volumeSnapshotClassName: copies, source: {persistentVolumeClaimName: source}}
`

// TestCopies restores a snapshot in pods that the scheduler places on the other node. With copies: anywhere the volume is created
// there. With copies: local the pod runs on the node of the snapshot if it may, and otherwise waits.
func TestCopies(t *testing.T) {
	ns := newNamespace(t, "copies")
	installSnapshotAPI(t)
	installLocal(t, "--set", "snapshots.enabled=true")
	for _, copies := range []string{"anywhere", "local"} {
		applyText(t, ns, fmt.Sprintf(copiesClass, copies))
		t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "copies-"+copies) })
	}
	from, to := nodes()[0].name, nodes()[1].name
	startPod(t, ns, claimPod{name: "source", class: "copies-anywhere", node: from})
	applyText(t, ns, takenSnapshot)
	t.Cleanup(func() { kubectlLast(t, "delete", "volumesnapshotclass", "copies") })
	waitSnapshot(t, ns, "taken")

	expression := fmt.Sprintf("matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]", to)
	only := fmt.Sprintf("{requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{%s}]}}", expression)
	preferred := fmt.Sprintf("{preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, preference: {%s}}]}", expression)
	for _, tc := range []struct{ name, copies, affinity, node string }{
		{"anywhere-only", "anywhere", only, to},
		{"anywhere-preferred", "anywhere", preferred, to},
		{"local-preferred", "local", preferred, from},
	} {
		applyText(t, ns, fmt.Sprintf(restoringPod, tc.name, "copies-"+tc.copies, tc.affinity))
		kubectl(t, "-n", ns, "wait", "pod", tc.name, "--for=condition=Ready", "--timeout=3m")
		if at := nodeOfVolume(t, volumeOf(t, ns, tc.name)); at != tc.node {
			t.Errorf("%s: the volume is on %s, want %s", tc.name, at, tc.node)
		}
	}
	applyText(t, ns, fmt.Sprintf(restoringPod, "local-only", "copies-local", only))
	waitDescribed(t, 2*time.Minute, ns, "pod/local-only", "didn't match PersistentVolume's node affinity")
	if at := nodeOfVolume(t, volumeOf(t, ns, "local-only")); at != from {
		t.Errorf("local-only: the volume is on %s, want %s", at, from)
	}
	kubectl(t, "-n", ns, "delete", "pod,pvc,volumesnapshot", "--all", "--timeout=3m")
	checkLimitedEmpty(t)
}
