//go:build e2e

package e2e

import (
	"testing"
	"time"
)

// shared is a claim for a volume on an export.
const shared = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec:
  storageClassName: nas
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 1Gi}}
`

// TestNoNFS enables NFS in the chart although the kernel has no NFS client. The driver must still run, the
// events of a claim for an export must name the reason, and volumes on nodes must work. The driver runs only
// on one node: with NFS its pods use the node's network, the nodes of this cluster share a network, and two
// drivers would use the same ports.
func TestNoNFS(t *testing.T) {
	ensureInstalled(t)
	rendered := run(t, "helm", "template", "trivet", chart, "-n", namespace,
		"--set", "plainManifests=true", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+nodes()[0].name, "--set", "nfs.storageClasses[0].name=nas,nfs.storageClasses[0].server=127.0.0.1,nfs.storageClasses[0].share=/export")
	t.Cleanup(func() {
		kubectlLast(t, "delete", "storageclass", "nas", "--ignore-not-found")
		kubectlLast(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
		for _, w := range workloads {
			kubectlLast(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
		}
	})
	kubectlInput(t, rendered, "apply", "--server-side", "--force-conflicts", "-f", "-")
	for _, w := range workloads {
		kubectl(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
	if got := kubectl(t, "-n", namespace, "get", "daemonset", "trivet-node", "-o", "jsonpath={.spec.template.spec.hostNetwork}"); got != "true" {
		t.Errorf("got hostNetwork %q of the nodes' pods, want true", got)
	}

	ns := newNamespace(t, "no-nfs")
	applyText(t, ns, shared)
	waitDescribed(t, time.Minute, ns, "pvc/shared", "ProvisioningFailed", "this kernel has no NFS client")
	startPod(t, ns, claimPod{name: "local", node: nodes()[0].name})
	deletePod(t, ns, "local")
	kubectl(t, "-n", ns, "delete", "pvc", "shared", "--timeout=1m")
}
