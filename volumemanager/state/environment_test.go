package state_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// volumeWithExpr returns the volume of a pod whose container main mounts the volume with a subPathExpr.
// variables is the container's env and envFrom in YAML.
func volumeWithExpr(t *testing.T, variables, expression string) *state.PodVolume {
	t.Helper()
	main := corev1.Container{Name: "main", VolumeMounts: []corev1.VolumeMount{{Name: "data", SubPathExpr: expression}}}
	if err := yaml.UnmarshalStrict([]byte(variables), &main); err != nil {
		t.Fatal(err)
	}
	main.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m")}
	other := corev1.Container{Name: "other", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Ki")}}}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u", Labels: map[string]string{"app": "shop"}, Annotations: map[string]string{"a/B": "note"}},
		Spec: corev1.PodSpec{
			NodeName: "elsewhere", Containers: []corev1.Container{main, other}, Volumes: []corev1.Volume{empty("data")},
			Resources: &corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("2Ki")}},
		},
	}
	p := state.Populator{Registry: plugins.Registry{emptyDirPlugin{}}, Paths: plugins.Paths{Root: "/"}, Node: "node-1"}
	return p.Populate(&manifest.Objects{
		Complete: true,
		Pods:     map[types.NamespacedName]*corev1.Pod{{Namespace: "default", Name: "web"}: pod},
		ConfigMaps: map[types.NamespacedName]*corev1.ConfigMap{
			{Namespace: "default", Name: "settings"}: {Data: map[string]string{"A": "config-a", "B": "config-b", "none": ""}, BinaryData: map[string][]byte{"bin": []byte("x")}},
			{Namespace: "other", Name: "foreign"}:    {Data: map[string]string{"A": "foreign"}},
		},
		Secrets: map[types.NamespacedName]*corev1.Secret{
			{Namespace: "default", Name: "keys"}: {Data: map[string][]byte{"A": []byte("secret-a")}},
		},
	}).Volumes[0]
}

// TestSubPathExpr: a subPathExpr is expanded with the environment that a kubelet gives to the container.
// If a variable in it has no value, the volume has an error and no subPath, so that nothing is mounted.
func TestSubPathExpr(t *testing.T) {
	for _, tc := range []struct{ name, expression, variables, want, err string }{
		{"node", "$(V)", "env: [{name: V, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]", "node-1", ""},
		{"service account", "$(V)", "env: [{name: V, valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}}]", "default", ""},
		{"label", "$(L)", "env: [{name: L, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['app']\"}}}]", "shop", ""},
		{"annotation", "$(L)", "env: [{name: L, valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['a/B']\"}}}]", "note", ""},
		{"two variables with one name: the last one counts", "$(A)", "env: [{name: A, value: '1'}, {name: B, value: $(A)}, {name: A, value: '2'}]", "2", ""},
		{"value refers to an earlier variable that is replaced later", "$(B)", "env: [{name: A, value: '1'}, {name: B, value: $(A)}, {name: A, value: '2'}]", "1", ""},
		{"value refers to an earlier variable of the same name", "$(A)", "env: [{name: A, value: '1'}, {name: A, value: $(A)0}]", "10", ""},
		{"value refers to a later variable", "$(A)", "env: [{name: A, value: x-$(LATER)}, {name: LATER, value: '1'}]", "x-$(LATER)", ""},
		{"value refers to an empty variable", "$(A)", "env: [{name: E}, {name: A, value: x$(E)y}]", "xy", ""},
		{"escaped and unclosed dollar signs", "$$(A)-$A-$(A-$", "env: [{name: A, value: '1'}]", "$(A)-$A-$(A-$", ""},
		{"keys of a ConfigMap and a Secret", "$(K)/$(S)", "env: [{name: K, valueFrom: {configMapKeyRef: {name: settings, key: A}}}, {name: S, valueFrom: {secretKeyRef: {name: keys, key: A}}}]", "config-a/secret-a", ""},
		{"envFrom of a ConfigMap and a Secret", "$(A)/$(p_A)/$(B)", "envFrom: [{configMapRef: {name: settings}}, {prefix: p_, secretRef: {name: keys}}]", "config-a/secret-a/config-b", ""},
		{"two sources in envFrom: the last one counts", "$(A)", "envFrom: [{configMapRef: {name: settings}}, {secretRef: {name: keys}}]", "secret-a", ""},
		{"env replaces envFrom", "$(A)", "{envFrom: [{configMapRef: {name: settings}}], env: [{name: A, value: own-$(A)}]}", "own-config-a", ""},
		{"missing optional sources", "$(A)", `
envFrom: [{configMapRef: {name: missing, optional: true}}, {secretRef: {name: missing, optional: true}}]
env:
- {name: A, value: '1'}
- {name: A, valueFrom: {configMapKeyRef: {name: missing, key: A, optional: true}}}
- {name: A, valueFrom: {secretKeyRef: {name: missing, key: A, optional: true}}}
- {name: A, valueFrom: {configMapKeyRef: {name: settings, key: missing, optional: true}}}
- {name: A, valueFrom: {secretKeyRef: {name: keys, key: missing, optional: true}}}
`, "1", ""},
		{"limit of the container", "$(R)", "env: [{name: R, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}]", "2", ""},
		{"request of another container", "$(R)", "env: [{name: R, valueFrom: {resourceFieldRef: {containerName: other, resource: requests.memory}}}]", "1024", ""},
		{"limit of the pod", "$(R)", "env: [{name: R, valueFrom: {resourceFieldRef: {resource: limits.memory}}}]", "2048", ""},
		{"an unused variable has no known value", "$(A)", "env: [{name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: A, value: '1'}]", "1", ""},

		{"undefined variable", "x$(A)", "", "", `variable "A" is not in`},
		{"variable without a name", "$()", "", "", `variable "" is not in`},
		{"empty variable", "$(A)", "env: [{name: A}]", "", `variable "A" is empty`},
		{"empty variable as the last part", "x/$(A)", "env: [{name: A}]", "", `variable "A" is empty`},
		{"value that consists of empty variables", "$(A)", "env: [{name: E}, {name: A, value: $(E)$(E)}]", "", `variable "A" is empty`},
		{"no such label", "$(A)", "env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['none']\"}}}]", "", `variable "A" is empty`},
		{"empty key", "$(A)", "env: [{name: A, valueFrom: {configMapKeyRef: {name: settings, key: none}}}]", "", `variable "A" is empty`},
		{"binary key", "$(A)", "env: [{name: A, valueFrom: {configMapKeyRef: {name: settings, key: bin}}}]", "", `no key "bin"`},
		{"no such ConfigMap", "x", "env: [{name: A, valueFrom: {configMapKeyRef: {name: missing, key: A}}}]", "", "env[0].valueFrom.configMapKeyRef: ConfigMap default/missing"},
		{"ConfigMap of another namespace", "x", "env: [{name: A, valueFrom: {configMapKeyRef: {name: foreign, key: A}}}]", "", "ConfigMap default/foreign"},
		{"no such Secret", "x", "env: [{name: A, valueFrom: {secretKeyRef: {name: missing, key: A}}}]", "", "Secret default/missing"},
		{"no such key", "x", "env: [{name: A, valueFrom: {secretKeyRef: {name: keys, key: missing}}}]", "", `no key "missing"`},
		{"no such Secret in envFrom", "x", "envFrom: [{secretRef: {name: missing}}]", "", "envFrom[0].secretRef: Secret default/missing"},
		{"no source in envFrom", "x", "envFrom: [{}]", "", "envFrom[0]: set one of"},
		{"no source in valueFrom", "x", "env: [{name: A, valueFrom: {}}]", "", "env[0].valueFrom: set one of"},
		{"field status.podIP", "$(IP)", "env: [{name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]", "", `"status.podIP"`},
		{"value refers to status.hostIP", "$(A)", "env: [{name: IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}, {name: A, value: at-$(IP)}]", "", `"status.hostIP"`},
		{"fileKeyRef", "$(A)", "env: [{name: A, valueFrom: {fileKeyRef: {volumeName: data, path: x, key: A}}}]", "", "fileKeyRef"},
		{"unsupported field", "x", "env: [{name: A, valueFrom: {fieldRef: {fieldPath: metadata.labels}}}]", "", `fieldPath "metadata.labels"`},
		{"no such container", "x", "env: [{name: A, valueFrom: {resourceFieldRef: {containerName: none, resource: limits.cpu}}}]", "", `containerName "none"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := volumeWithExpr(t, tc.variables, tc.expression)
			switch {
			case tc.err != "":
				if v.Err == nil || !strings.Contains(v.Err.Error(), tc.err) || len(v.SubPaths) > 0 {
					t.Errorf("got error %v, subPaths %+v; want error %s", v.Err, v.SubPaths, tc.err)
				}
			case v.Err != nil || len(v.SubPaths) != 1 || v.SubPaths[0].SubPath != tc.want:
				t.Errorf("got subPaths %+v, error %v; want subPath %q", v.SubPaths, v.Err, tc.want)
			}
		})
	}
}
