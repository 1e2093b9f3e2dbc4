package volumemanager

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestSubPathExpr: a subPathExpr is expanded as by the kubelet, or the volume is not mounted.
func TestSubPathExpr(t *testing.T) {
	g := newGround(t)
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
	g.put("expanded", expression("expanded", "$(NODE)/$(APP)/$(SHELF)/$(TWICE)/$(LATE)", strings.Join([]string{
		"{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}",
		`{name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}`,
		"{name: SHELF, valueFrom: {configMapKeyRef: {name: settings, key: shelf}}}",
		"{name: TWICE, value: first}, {name: TWICE, value: second}",
		"{name: LATE, value: $(LATER)}, {name: LATER, value: x}",
	}, ", ")))
	g.says("expanded", "data", state.Pending, "ConfigMap default/settings")
	g.put("settings", settings)
	parts := g.await("expanded")["data"].SubPaths
	if len(parts) != 1 || parts[0].SubPath != nodeName+"/shop/upper/second/$(LATER)" {
		t.Errorf("parts: %+v", parts)
	}
	g.put("empty", expression("empty", "$(NONE)", `{name: NONE, value: ""}`))
	g.says("empty", "data", state.Failed, `variable "NONE" is empty`)
	g.put("climbs", expression("climbs", "$(UP)", `{name: UP, value: a/../b}`))
	g.says("climbs", "data", state.Failed, "without ..")
	for _, pod := range []string{"empty", "climbs"} {
		if mounts := mountsBelow(t, filepath.Join(g.root, "pods", pod)); len(mounts) > 0 {
			t.Errorf("mounted for pod %s: %q", pod, mounts)
		}
		if _, err := os.Lstat(filepath.Join(g.root, "pods", pod, "volume-subpaths/data/main/0")); !os.IsNotExist(err) {
			t.Errorf("a part of pod %s is there: %v", pod, err)
		}
	}
	// A subPath stays when the object with its variables is removed.
	g.remove("settings")
	g.says("expanded", "data", state.Pending, "ConfigMap default/settings")
	if mounts := mountsBelow(t, filepath.Join(g.root, "pods/expanded/volume-subpaths")); len(mounts) != 1 {
		t.Errorf("mounted: %q", mounts)
	}
	g.wantNothing()
}
