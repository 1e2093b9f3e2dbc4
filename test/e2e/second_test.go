//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// growing is a pod on a node with two expandable claims: a filesystem and a block volume.
const growing = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: growing}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: xfs}
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: files}
spec:
  storageClassName: growing
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 400Mi}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: device}
spec:
  storageClassName: growing
  volumeMode: Block
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: growing}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeMounts: [{name: files, mountPath: /files}]
    volumeDevices: [{name: device, devicePath: /dev/device}]
  volumes:
  - {name: files, persistentVolumeClaim: {claimName: files}}
  - {name: device, persistentVolumeClaim: {claimName: device}}
`

// TestSecondNode checks, for both nodes, that volumes are created, attached, expanded and deleted only by the
// driver of their node, although one controller serves both nodes.
func TestSecondNode(t *testing.T) {
	all := nodes()
	for i, n := range all {
		t.Run(n.name, func(t *testing.T) {
			ns := newNamespace(t, "second-"+n.name)
			kubectlInput(t, fmt.Sprintf(growing, n.name), "-n", ns, "apply", "-f", "-")
			t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "growing") })
			waitReady(t, ns)
			execIn(t, ns, "growing", "echo kept >/files/kept; echo too | dd of=/dev/device conv=fsync")

			var volumes []string
			for _, claim := range []string{"files", "device"} {
				volume := volumeOf(t, ns, claim)
				if at := nodeOfVolume(t, volume); at != n.name {
					t.Errorf("got volume of claim %s on %s, want %s", claim, at, n.name)
				}
				attached := kubectl(t, "get", "volumeattachments", "-o", `jsonpath={.items[?(@.spec.source.persistentVolumeName=="`+volume+`")]['spec.nodeName','status.attached']}`)
				if attached != n.name+" true" {
					t.Errorf("got VolumeAttachment %q of claim %s, want %q", attached, claim, n.name+" true")
				}
				kubectl(t, "-n", ns, "patch", "pvc", claim, "--type=merge", "-p", `{"spec":{"resources":{"requests":{"storage":"800Mi"}}}}`)
				volumes = append(volumes, volume)
			}
			eventually(t, 2*time.Minute, "both claims have 800 MiB", func() (string, bool) {
				out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pvc", "-o", "jsonpath={.items[*].status.capacity.storage}")
				return out, err == nil && out == "800Mi 800Mi"
			})
			if got := execIn(t, ns, "growing", "df -m /files | awk 'END {print ($2 > 700)}'; blockdev --getsize64 /dev/device; cat /files/kept; head -c 3 /dev/device"); got != "1\n838860800\nkept\ntoo" {
				t.Errorf("after the expansion: got %q, want the larger filesystem and device with their data", got)
			}

			checkForwarded(t, n, all[1-i], volumes)
		})
	}
}

// checkForwarded checks that the log of the owner's driver contains the calls for the volumes, and that the
// log of the other driver does not contain the volumes.
func checkForwarded(t *testing.T, owner, other node, volumes []string) {
	t.Helper()
	logs := func(n node) string { return kubectl(t, "-n", namespace, "logs", n.driverPod(t), "-c", "trivet") }
	owners, others := logs(owner), logs(other)
	for _, volume := range volumes {
		for _, method := range []string{"CreateVolume", "ValidateVolumeCapabilities", "ControllerExpandVolume"} {
			if !hasLine(owners, `method="`+method+`"`, volume) {
				t.Errorf("got no %s of volume %s in the log of the driver on %s, want one", method, volume, owner.name)
			}
		}
		if strings.Contains(others, volume) {
			t.Errorf("got volume %s of %s in the log of the driver on %s, want it only on its node", volume, owner.name, other.name)
		}
	}
}

// hasLine reports whether a text has a line that contains all words.
func hasLine(text string, words ...string) bool {
lines:
	for line := range strings.Lines(text) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		return true
	}
	return false
}
