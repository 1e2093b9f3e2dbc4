//go:build e2e

package e2e

import (
	"testing"
	"time"
)

// TestMistypedClass checks that the events of a claim name the mistake in its StorageClass, although the volume is
// created only after the scheduler has selected a node with enough capacity.
func TestMistypedClass(t *testing.T) {
	ensureInstalled(t)
	ns := newNamespace(t, "mistyped")
	for name, c := range map[string]struct{ parameters, event string }{
		"key":    {`{pol: default}`, "did you mean pool?"},
		"pool":   {`{pool: defaults}`, "did you mean default?"},
		"kind":   {`{backend: disk, pool: default}`, `pool="default"`},
		"option": {`{mkfsOptions: "-K"}`, "each option needs a value"},
	} {
		t.Run(name, func(t *testing.T) {
			class := ns + "-" + name
			kubectlInput(t, `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: `+class+`}
provisioner: csi.trivet.dev
parameters: `+c.parameters+`
volumeBindingMode: WaitForFirstConsumer
`, "apply", "-f", "-")
			t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", class) })
			applyText(t, ns, claimPod{name: name, class: class}.manifest())
			waitDescribed(t, 2*time.Minute, ns, "pvc/"+name, c.event)
			kubectl(t, "-n", ns, "delete", "pod,pvc", name, "--timeout=1m")
		})
	}
}
