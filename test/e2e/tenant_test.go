//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
)

// tenant is a pod with a volume of its own, and ready when it has done its work there.
type tenant struct {
	name   string // the claim's, and the pod's
	pod    string // the pod's, if it is another
	node   string // of the pod; empty: any
	class  string // empty: trivet-loop
	size   string // empty: 32Mi
	volume string // the claim wants this one; empty: a new one
	does   string // writes or finds
}

// A token that is the claim's: one pod writes it durably, another finds it.
const (
	writes = `echo %[1]s >/data/token && sync /data/token`
	finds  = `test "$(cat /data/token)" = %[1]s`
)

func (x tenant) manifest() string {
	does := strings.ReplaceAll(fmt.Sprintf(cmp.Or(x.does, writes), x.name), "'", "''")
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
`, cmp.Or(x.pod, x.name), optional("nodeSelector: {kubernetes.io/hostname: %s}", x.node), does, x.name)
}

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

// optional is a line of a manifest, if there is something to say.
func optional(format, value string) string {
	if value == "" {
		return ""
	}
	return fmt.Sprintf(format, value)
}

// moveIn applies a tenant and waits until it has done its work.
func moveIn(t *testing.T, ns string, x tenant) {
	t.Helper()
	applyText(t, ns, x.manifest())
	kubectl(t, "-n", ns, "wait", "pod", cmp.Or(x.pod, x.name), "--for=condition=Ready", "--timeout=3m")
}

// moveOut deletes the pod and the claim of that name, and waits until the volume is
// gone.
func moveOut(t *testing.T, ns, name string) {
	t.Helper()
	volume := volumeOf(t, ns, name)
	kubectl(t, "-n", ns, "delete", "pod", name, "--timeout=2m")
	kubectl(t, "-n", ns, "delete", "pvc", name, "--timeout=2m")
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=2m")
}

// immediate is a StorageClass whose volumes are made before a pod is there.
const immediate = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: immediate}
provisioner: csi.trivet.dev
parameters: {backend: loop, csi.storage.k8s.io/fstype: ext4}
volumeBindingMode: Immediate
`

func immediateClass(t *testing.T) {
	t.Helper()
	pipe(t, immediate, "apply", "-f", "-")
	t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "immediate") })
}
