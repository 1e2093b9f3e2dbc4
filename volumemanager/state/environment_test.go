package state_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

func variable(name, value string) corev1.EnvVar { return corev1.EnvVar{Name: name, Value: value} }

func variableFrom(name string, source corev1.EnvVarSource) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &source}
}

func fieldVariable(name, path string) corev1.EnvVar {
	return variableFrom(name, corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}})
}

func resourceVariable(name, container, of string) corev1.EnvVar {
	return variableFrom(name, corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: container, Resource: of}})
}

func configMapVariable(name, configMap, key string, optional *bool) corev1.EnvVar {
	return variableFrom(name, corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: configMap}, Key: key, Optional: optional}})
}

func secretVariable(name, secret, key string, optional *bool) corev1.EnvVar {
	return variableFrom(name, corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: secret}, Key: key, Optional: optional}})
}

func fromConfigMap(name string, optional *bool) corev1.EnvFromSource {
	return corev1.EnvFromSource{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}, Optional: optional}}
}

func fromSecret(prefix, name string, optional *bool) corev1.EnvFromSource {
	return corev1.EnvFromSource{Prefix: prefix, SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}, Optional: optional}}
}

// expanded is the volume of a pod whose container main mounts it with a subPathExpr.
func expanded(main corev1.Container, expression string) *state.PodVolume {
	main.Name, main.VolumeMounts = "main", []corev1.VolumeMount{{Name: "data", SubPathExpr: expression}}
	main.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m")}
	other := corev1.Container{Name: "other", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Ki")}}}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u", Labels: map[string]string{"app": "shop"}, Annotations: map[string]string{"a/B": "note"}},
		Spec: corev1.PodSpec{
			NodeName: "elsewhere", Containers: []corev1.Container{main, other}, Volumes: []corev1.Volume{empty("data")},
			Resources: &corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("2Ki")}},
		},
	}
	p := state.Populator{Registry: plugins.Registry{own{}}, Paths: plugins.Paths{Root: "/"}, Node: "node-1"}
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

// TestSubPathExpr: a container has the environment that a kubelet gives it, but for what
// needs a network or an API server.
func TestSubPathExpr(t *testing.T) {
	optional := new(true)
	for _, tc := range []struct {
		name, expression string
		from             []corev1.EnvFromSource
		env              []corev1.EnvVar
		want             string
	}{
		{name: "node", expression: "$(N)", env: []corev1.EnvVar{fieldVariable("N", "spec.nodeName")}, want: "node-1"},
		{name: "service account", expression: "$(N)", env: []corev1.EnvVar{fieldVariable("N", "spec.serviceAccountName")}, want: "default"},
		{name: "label", expression: "$(L)", env: []corev1.EnvVar{fieldVariable("L", "metadata.labels['app']")}, want: "shop"},
		{name: "annotation", expression: "$(L)", env: []corev1.EnvVar{fieldVariable("L", "metadata.annotations['a/B']")}, want: "note"},
		{name: "the last of a name", expression: "$(A)", env: []corev1.EnvVar{variable("A", "1"), variable("B", "$(A)"), variable("A", "2")}, want: "2"},
		{name: "the value at that point", expression: "$(B)", env: []corev1.EnvVar{variable("A", "1"), variable("B", "$(A)"), variable("A", "2")}, want: "1"},
		{name: "its own former value", expression: "$(A)", env: []corev1.EnvVar{variable("A", "1"), variable("A", "$(A)0")}, want: "10"},
		{name: "undefined in a value", expression: "$(A)", env: []corev1.EnvVar{variable("A", "x-$(LATER)"), variable("LATER", "1")}, want: "x-$(LATER)"},
		{name: "empty in a value", expression: "$(A)", env: []corev1.EnvVar{variable("E", ""), variable("A", "x$(E)y")}, want: "xy"},
		{name: "dollars", expression: "$$(A)-$A-$(A-$", env: []corev1.EnvVar{variable("A", "1")}, want: "$(A)-$A-$(A-$"},
		{name: "key", expression: "$(K)/$(S)", env: []corev1.EnvVar{configMapVariable("K", "settings", "A", nil), secretVariable("S", "keys", "A", nil)}, want: "config-a/secret-a"},
		{name: "all keys", expression: "$(A)/$(p_A)/$(B)", from: []corev1.EnvFromSource{fromConfigMap("settings", nil), fromSecret("p_", "keys", nil)}, want: "config-a/secret-a/config-b"},
		{name: "the last of several", expression: "$(A)", from: []corev1.EnvFromSource{fromConfigMap("settings", nil), fromSecret("", "keys", nil)}, want: "secret-a"},
		{name: "env before envFrom", expression: "$(A)", from: []corev1.EnvFromSource{fromConfigMap("settings", nil)}, env: []corev1.EnvVar{variable("A", "own-$(A)")}, want: "own-config-a"},
		{
			name: "optional", expression: "$(A)", want: "1",
			from: []corev1.EnvFromSource{fromConfigMap("missing", optional), fromSecret("", "missing", optional)},
			env: []corev1.EnvVar{
				variable("A", "1"), configMapVariable("A", "missing", "A", optional), secretVariable("A", "missing", "A", optional),
				configMapVariable("A", "settings", "missing", optional), secretVariable("A", "keys", "missing", optional),
			},
		},
		{name: "own limit", expression: "$(R)", env: []corev1.EnvVar{resourceVariable("R", "", "limits.cpu")}, want: "2"},
		{name: "another's request", expression: "$(R)", env: []corev1.EnvVar{resourceVariable("R", "other", "requests.memory")}, want: "1024"},
		{name: "the pod's limit", expression: "$(R)", env: []corev1.EnvVar{resourceVariable("R", "", "limits.memory")}, want: "2048"},
		{name: "unused and unknown", expression: "$(A)", env: []corev1.EnvVar{fieldVariable("IP", "status.podIP"), variable("A", "1")}, want: "1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := expanded(corev1.Container{Env: tc.env, EnvFrom: tc.from}, tc.expression)
			if v.Err != nil || len(v.SubPaths) != 1 || v.SubPaths[0].SubPath != tc.want {
				t.Errorf("%v: %+v; want %q", v.Err, v.SubPaths, tc.want)
			}
		})
	}
}

// TestSubPathExprRefused: the whole volume is never mounted for a part that is unknown.
func TestSubPathExprRefused(t *testing.T) {
	for _, tc := range []struct {
		name, expression string
		from             []corev1.EnvFromSource
		env              []corev1.EnvVar
		says             string
	}{
		{name: "undefined", expression: "x$(A)", says: `variable "A" is not in`},
		{name: "no name", expression: "$()", says: `variable "" is not in`},
		{name: "empty value", expression: "$(A)", env: []corev1.EnvVar{variable("A", "")}, says: `variable "A" is empty`},
		{name: "empty value in a path", expression: "x/$(A)", env: []corev1.EnvVar{variable("A", "")}, says: `variable "A" is empty`},
		{name: "only empty ones", expression: "$(A)", env: []corev1.EnvVar{variable("E", ""), variable("A", "$(E)$(E)")}, says: `variable "A" is empty`},
		{name: "no such label", expression: "$(A)", env: []corev1.EnvVar{fieldVariable("A", "metadata.labels['none']")}, says: `variable "A" is empty`},
		{name: "empty key", expression: "$(A)", env: []corev1.EnvVar{configMapVariable("A", "settings", "none", nil)}, says: `variable "A" is empty`},
		{name: "binary key", expression: "$(A)", env: []corev1.EnvVar{configMapVariable("A", "settings", "bin", nil)}, says: `no key "bin"`},
		{name: "no such ConfigMap", expression: "x", env: []corev1.EnvVar{configMapVariable("A", "missing", "A", nil)}, says: "env[0].valueFrom.configMapKeyRef: ConfigMap default/missing"},
		{name: "ConfigMap of another namespace", expression: "x", env: []corev1.EnvVar{configMapVariable("A", "foreign", "A", nil)}, says: "ConfigMap default/foreign"},
		{name: "no such Secret", expression: "x", env: []corev1.EnvVar{secretVariable("A", "missing", "A", nil)}, says: "Secret default/missing"},
		{name: "no such key", expression: "x", env: []corev1.EnvVar{secretVariable("A", "keys", "missing", nil)}, says: `no key "missing"`},
		{name: "none to take all from", expression: "x", from: []corev1.EnvFromSource{fromSecret("", "missing", nil)}, says: "envFrom[0].secretRef: Secret default/missing"},
		{name: "no source at all", expression: "x", from: []corev1.EnvFromSource{{}}, says: "envFrom[0]: set one of"},
		{name: "no source", expression: "x", env: []corev1.EnvVar{variableFrom("A", corev1.EnvVarSource{})}, says: "env[0].valueFrom: set one of"},
		{name: "address", expression: "$(IP)", env: []corev1.EnvVar{fieldVariable("IP", "status.podIP")}, says: `"status.podIP"`},
		{name: "address in a value", expression: "$(A)", env: []corev1.EnvVar{fieldVariable("IP", "status.hostIP"), variable("A", "at-$(IP)")}, says: `"status.hostIP"`},
		{name: "file", expression: "$(A)", env: []corev1.EnvVar{variableFrom("A", corev1.EnvVarSource{FileKeyRef: &corev1.FileKeySelector{}})}, says: "fileKeyRef"},
		{name: "no field of variables", expression: "x", env: []corev1.EnvVar{fieldVariable("A", "metadata.labels")}, says: `fieldPath "metadata.labels"`},
		{name: "no such container", expression: "x", env: []corev1.EnvVar{resourceVariable("A", "none", "limits.cpu")}, says: `containerName "none"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := expanded(corev1.Container{Env: tc.env, EnvFrom: tc.from}, tc.expression)
			if v.Err == nil || !strings.Contains(v.Err.Error(), tc.says) || len(v.SubPaths) > 0 {
				t.Errorf("%v: %+v; want %s", v.Err, v.SubPaths, tc.says)
			}
		})
	}
}
