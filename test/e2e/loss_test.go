//go:build e2e

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	plugins "github.com/trivet-csi/trivet/cluster/kubectl"
)

// cache is a StatefulSet with a class that releases the claims of lost nodes.
const cache = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: released}
provisioner: csi.trivet.dev
volumeBindingMode: WaitForFirstConsumer
parameters: {backend: loop, onNodeLoss: release}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: cache}
spec:
  serviceName: cache
  replicas: 1
  selector: {matchLabels: {app: cache}}
  template:
    metadata: {labels: {app: cache}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: docker.io/library/busybox:1.37
        command: [sleep, infinity]
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec:
      storageClassName: released
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 64Mi}}
`

// TestNodeLoss loses a node. The pod of a StatefulSet whose class has onNodeLoss: release starts on the other node with an
// empty volume, and a claim of another class is kept. When the node returns with its disk, it still has both volumes.
func TestNodeLoss(t *testing.T) {
	ns := newNamespace(t, "loss")
	plugin := installPlugin(t, "trivet")
	// With attachRequired, the PersistentVolume stays six minutes longer, until Kubernetes detaches the volume by force.
	installLocal(t, "--set", "controller.nodeLoss.enabled=true", "--set", "controller.nodeLoss.delay=15s", "--set", "attachRequired=false")
	alive, lost := nodes()[0], nodes()[1]
	t.Cleanup(func() {
		kubectlLast(t, "wait", "node", lost.name, "--for=create", "--timeout=3m")
		kubectlLast(t, "wait", "node", lost.name, "--for=condition=Ready", "--timeout=3m")
		kubectlLast(t, "-n", ns, "delete", "statefulset,pod,pvc", "--all", "--timeout=3m")
		kubectlLast(t, "wait", "pv", "--all", "--for=delete", "--timeout=3m")
		kubectlLast(t, "delete", "storageclass", "released")
	})
	kubectl(t, "cordon", alive.name)
	t.Cleanup(func() { kubectlLast(t, "uncordon", alive.name) })
	applyText(t, ns, cache)
	startPod(t, ns, claimPod{name: "kept", node: lost.name})
	kept := volumeOf(t, ns, "kept")
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/cache", "--timeout=3m")
	kubectl(t, "uncordon", alive.name)
	const content = "this is the content of the lost node"
	execIn(t, ns, "cache-0", "echo "+content+" >/data/file; sync")
	volume := volumeOf(t, ns, "data-cache-0")
	handle := kubectl(t, "get", "pv", volume, "-o", "jsonpath={.spec.csi.volumeHandle}")
	if got := kubectl(t, "get", "pv", volume, "-o", "jsonpath={.spec.csi.volumeAttributes.onNodeLoss}"); got != "release" {
		t.Errorf("got onNodeLoss %q of the PersistentVolume, want release", got)
	}

	lost.die(t)
	kubectl(t, "delete", "node", lost.name)
	begin := time.Now()
	eventually(t, 5*time.Minute, "the StatefulSet's pod runs on the other node", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pod", "cache-0", "-o", `jsonpath={.spec.nodeName} {.status.conditions[?(@.type=="Ready")].status}`)
		return out, err == nil && out == alive.name+" True"
	})
	t.Logf("the pod runs on the other node %v after the Node object was deleted", time.Since(begin).Round(time.Second))
	if got := execIn(t, ns, "cache-0", "ls -A /data"); got != "lost+found" {
		t.Errorf("got files %q, want an empty volume", got)
	}
	waitDescribed(t, time.Minute, ns, "pvc/kept", "Bound", kept)
	if events := kubectl(t, "-n", ns, "get", "events", "--field-selector=reason=NodeLost", "-o", "jsonpath={.items[*].involvedObject.name}"); events != "data-cache-0" {
		t.Errorf("got events NodeLost of %q, want one of the claim data-cache-0", events)
	}
	kubectl(t, "wait", "pv", volume, "--for=delete", "--timeout=10m")
	t.Logf("the PersistentVolume was deleted %v after the Node object", time.Since(begin).Round(time.Second))
	if o, found := findOrphan(t, plugin, kept); !found || o.Kind != plugins.OrphanedPersistentVolume || o.Node != lost.name {
		t.Errorf("got orphan %+v, want the PersistentVolume of the kept claim on %s", o, lost.name)
	}

	lost.revive(t)
	kubectl(t, "wait", "node", lost.name, "--for=create", "--timeout=3m")
	kubectl(t, "wait", "node", lost.name, "--for=condition=Ready", "--timeout=3m")
	waitDriver(t)
	startPod(t, ns, claimPod{name: "kept", node: lost.name, command: checkToken})
	image, err := os.ReadFile(lost.throughMounts(filepath.Join(limitedPool, "volumes", volume, "image")))
	must(t, err)
	if !bytes.Contains(image, []byte(content)) {
		t.Error("the image of the released volume does not contain the data of its pod any more")
	}
	deleteOrphan(t, plugin, handle)
}
