//go:build e2e

package e2e

import (
	"testing"
	"time"
)

// shared is a claim of an export.
const shared = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec:
  storageClassName: nas
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 1Gi}}
`

// TestNoNFS: where the kernel has no NFS client the driver runs with the chart's nfs all
// the same, the claim of an export says what is missing, and volumes of nodes are made
// and used as before. The driver is on one node: those of this cluster share their
// network, in which the nodes' pods are with NFS, and so one set of ports.
func TestNoNFS(t *testing.T) {
	installed(t)
	rendered := run(t, "helm", "template", "trivet", chart, "-n", namespace,
		"--set", "plainManifests=true", "--set", `node.nodeSelector.kubernetes\.io/hostname=`+nodes()[0].name, "--set", "nfs.storageClasses[0].name=nas,nfs.storageClasses[0].server=127.0.0.1,nfs.storageClasses[0].share=/export")
	t.Cleanup(func() {
		kubectlLast(t, "delete", "storageclass", "nas", "--ignore-not-found")
		kubectlLast(t, "apply", "--server-side", "--force-conflicts", "-f", manifests)
		for _, w := range workloads {
			kubectlLast(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
		}
	})
	pipe(t, rendered, "apply", "--server-side", "--force-conflicts", "-f", "-")
	for _, w := range workloads {
		kubectl(t, "-n", namespace, "rollout", "status", w, "--timeout=3m")
	}
	if of := kubectl(t, "-n", namespace, "get", "daemonset", "trivet-node", "-o", "jsonpath={.spec.template.spec.hostNetwork}"); of != "true" {
		t.Errorf("nodes' pods in the node's network: %q", of)
	}

	ns := newNamespace(t, "no-nfs")
	applyText(t, ns, shared)
	eventuallySays(t, time.Minute, ns, "pvc/shared", "ProvisioningFailed", "this kernel has no NFS client")
	moveIn(t, ns, tenant{name: "local", node: nodes()[0].name})
	moveOut(t, ns, "local")
	kubectl(t, "-n", ns, "delete", "pvc", "shared", "--timeout=1m")
}
