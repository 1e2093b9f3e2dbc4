//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
)

// claimPod is a claim and a pod that uses it. The pod is ready when its command has succeeded.
type claimPod struct {
	name    string // the name of the claim, and of the pod if pod is empty
	pod     string // the name of the pod
	node    string // the node of the pod; empty for any
	class   string // the StorageClass; empty for trivet-loop
	size    string // the requested size; empty for 32Mi
	volume  string // the PersistentVolume of the claim; empty for a new one
	command string // writeToken or checkToken; empty for writeToken
}

// Commands that write a token to the volume, and that check the token of an earlier pod.
const (
	writeToken = `echo %[1]s >/data/token && sync /data/token`
	checkToken = `test "$(cat /data/token)" = %[1]s`
)

// manifest returns the manifests of the claim and the pod.
func (x claimPod) manifest() string {
	command := strings.ReplaceAll(fmt.Sprintf(cmp.Or(x.command, writeToken), x.name), "'", "''")
	return claim(x.name, cmp.Or(x.class, "trivet-loop"), cmp.Or(x.size, "32Mi"), x.volume) + fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  %s
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sh, -c, '%s && touch /tmp/ready && sleep 1000000']
    readinessProbe: {exec: {command: [cat, /tmp/ready]}, periodSeconds: 1}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %s}}]
`, cmp.Or(x.pod, x.name), optional("nodeSelector: {kubernetes.io/hostname: %s}", x.node), command, x.name)
}

// quietPod returns the manifest of a pod that runs a command and keeps its volume. It has no exec probe: starting a
// process in a container takes seconds in the virtual machine.
func quietPod(name, claim, command string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sh, -c, '%s && sleep 1000000']
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %s}}]
`, name, command, claim)
}

// claim returns the manifest of a claim.
func claim(name, class, size, volume string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: %s
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: %s}}
  %s
`, name, class, size, optional("volumeName: %s", volume))
}

// optional returns a line of a manifest, or an empty string if the value is empty.
func optional(format, value string) string {
	if value == "" {
		return ""
	}
	return fmt.Sprintf(format, value)
}

// startPod creates the claim and the pod, and waits until the pod is ready.
func startPod(t *testing.T, ns string, x claimPod) {
	t.Helper()
	applyText(t, ns, x.manifest())
	kubectl(t, "-n", ns, "wait", "pod", cmp.Or(x.pod, x.name), "--for=condition=Ready", "--timeout=3m")
}

// deletePod deletes the pod and the claim with a name, and waits until the PersistentVolume is deleted.
func deletePod(t *testing.T, ns, name string) {
	t.Helper()
	volume := volumeOf(t, ns, name)
	kubectl(t, "-n", ns, "delete", "pod", name, "--ignore-not-found", "--timeout=2m")
	kubectl(t, "-n", ns, "delete", "pvc", name, "--ignore-not-found", "--timeout=2m")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
}

// immediate is a StorageClass whose volumes are created without a pod.
const immediate = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: immediate}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: ext4}
volumeBindingMode: Immediate
`

// immediateClass creates the class until the end of the test.
func immediateClass(t *testing.T) {
	t.Helper()
	kubectlInput(t, immediate, "apply", "-f", "-")
	t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "immediate") })
}
