package volumemanager

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestSubPathExpr: a subPathExpr is expanded as by a kubelet. If it cannot be expanded, the volume is
// not mounted.
func TestSubPathExpr(t *testing.T) {
	m := newMachine(t)
	expression := func(name, expression, env string) string {
		return `
apiVersion: v1
kind: Pod
metadata: {name: ` + name + `, uid: ` + name + `, labels: {app: shop}}
spec:
  containers:
  - name: main
    volumeMounts: [{name: data, mountPath: /data, subPathExpr: "` + expression + `"}]
    env: [` + env + `]
  volumes: [{name: data, emptyDir: {}}]
`
	}
	const settings = "{apiVersion: v1, kind: ConfigMap, metadata: {name: settings}, data: {shelf: upper}}\n"
	m.put("expanded", expression("expanded", "$(NODE)/$(APP)/$(SHELF)/$(TWICE)/$(LATE)", strings.Join([]string{
		"{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}",
		`{name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}`,
		"{name: SHELF, valueFrom: {configMapKeyRef: {name: settings, key: shelf}}}",
		"{name: TWICE, value: first}, {name: TWICE, value: second}",
		"{name: LATE, value: $(LATER)}, {name: LATER, value: x}",
	}, ", ")))
	m.awaitVolume("expanded", "data", state.Pending, "ConfigMap default/settings")
	m.put("settings", settings)
	parts := m.await("expanded")["data"].SubPaths
	if len(parts) != 1 || parts[0].SubPath != nodeName+"/shop/upper/second/$(LATER)" {
		t.Errorf("got subPaths %+v, want one of %s/shop/upper/second/$(LATER)", parts, nodeName)
	}
	m.put("empty", expression("empty", "$(NONE)", `{name: NONE, value: ""}`))
	m.awaitVolume("empty", "data", state.Failed, `variable "NONE" is empty`)
	m.put("parent", expression("parent", "$(UP)", `{name: UP, value: a/../b}`))
	m.awaitVolume("parent", "data", state.Failed, "without ..")
	for _, pod := range []string{"empty", "parent"} {
		if mounts := mountsBelow(t, filepath.Join(m.root, "pods", pod)); len(mounts) > 0 {
			t.Errorf("pod %s: got mounts %q, want none", pod, mounts)
		}
		if _, err := os.Lstat(filepath.Join(m.root, "pods", pod, "volume-subpaths/data/main/0")); !os.IsNotExist(err) {
			t.Errorf("pod %s: the target of the subPath exists, or Lstat failed: %v", pod, err)
		}
	}
	// A mounted subPath stays when the ConfigMap with the value of its variable is removed.
	m.remove("settings")
	m.awaitVolume("expanded", "data", state.Pending, "ConfigMap default/settings")
	if mounts := mountsBelow(t, filepath.Join(m.root, "pods/expanded/volume-subpaths")); len(mounts) != 1 {
		t.Errorf("after the removal of the ConfigMap: got mounts %q, want one", mounts)
	}
	m.removeAll()
}
