package manifest

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// readFiles decodes files, given as alternating names and texts, and merges their objects.
func readFiles(t *testing.T, files ...string) *Objects {
	t.Helper()
	r := reader{files: make(map[string]*file), found: true}
	for i := 0; i < len(files); i += 2 {
		entries, err := decode([]byte(files[i+1]), filepath.Ext(files[i]) == ".json")
		must(t, err)
		r.files[files[i]] = &file{entries: entries, valid: true}
	}
	return r.merge()
}

const (
	podHead   = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers: [{name: app}]\n"
	claimHead = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: a}\nspec: "
	pvHead    = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: a}\nspec: "
)

// TestInvalid: an invalid object is left out with a problem. Objects are then incomplete, except if the
// kind exists in Kubernetes and is not supported.
func TestInvalid(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: v1\nkind: Pod\nmetadata: {}\nspec: {containers: [{name: app}]}":                                         "metadata.name: Required",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: ../a}\nspec: {containers: [{name: app}]}":                               `metadata.name: Invalid value: "../a"`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: a/b}\nspec: {containers: [{name: app}]}":                  `metadata.namespace: Invalid value: "a/b"`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a, uid: a/b}\nspec: {containers: [{name: app}]}":                        `metadata.uid: Invalid value: "a/b"`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a, uid: ..}\nspec: {containers: [{name: app}]}":                         `metadata.uid: Invalid value: ".."`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a}":                                                                     "spec.containers: Required",
		"apiVersion: v2\nkind: Pod\nmetadata: {name: a}":                                                                     `apiVersion: "v2": the apiVersion of a Pod is v1`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: a/b}]}":                                  `spec.containers[0].name: Invalid value: "a/b"`,
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: b}], initContainers: [{name: b}]}":       `spec.containers[0].name: Duplicate value: "b"`,
		podHead + "  volumes: [{name: ../b, emptyDir: {}}]":                                                                  `spec.volumes[0].name: Invalid value: "../b"`,
		podHead + "  volumes: [{name: b, emptyDir: {}}, {name: b, emptyDir: {}}]":                                            `spec.volumes[1].name: Duplicate value: "b"`,
		podHead + "  volumes: [{name: b}]":                                                                                   "spec.volumes[0]: Required value: set one source",
		podHead + "  volumes: [{name: b, emptyDir: {}, hostPath: {path: /}}]":                                                "only one source is allowed, not hostPath and emptyDir: remove all but one",
		podHead + "  volumes: [{name: b, csi: {driver: ../..}}]":                                                             `spec.volumes[0].csi.driver: Invalid value: "../.."`,
		podHead + "  volumes: [{name: b, persistentVolumeClaim: {claimName: a/b}}]":                                          `spec.volumes[0].persistentVolumeClaim.claimName: Invalid value: "a/b"`,
		podHead + "  volumes: [{name: b, ephemeral: {}}]":                                                                    "spec.volumes[0].ephemeral.volumeClaimTemplate: Required",
		podHead + "  ephemeralContainers: [{name: e, volumeMounts: [{name: b, mountPath: /b}]}]":                             `spec.ephemeralContainers[0].volumeMounts[0].name: Invalid value: "b"`,
		podHead + "  initContainers: [{name: e, volumeDevices: [{name: b, devicePath: /b}]}]":                                `spec.initContainers[0].volumeDevices[0].name: Invalid value: "b"`,
		podHead + "  initContainers: [{name: e, volumeMounts: [{name: b, subPath: a/../../b}]}]":                             `subPath: Invalid value: "a/../../b": must be relative`,
		podHead + "  initContainers: [{name: e, volumeMounts: [{name: b, subPathExpr: /b}]}]":                                `subPathExpr: Invalid value: "/b": must be relative`,
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a/b: c}":                                               `data[a/b]: Invalid value: "a/b"`,
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {..: c}":                                                `data[..]: Invalid value: ".."`,
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: c}\nbinaryData: {a: YQ==}":                          "binaryData[a]: Invalid value: \"a\": data has this key too",
		"apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {..a: c}":                                            `stringData[..a]: Invalid value: "..a"`,
		pvHead + "{hostPath: {path: /a}, accessModes: [ReadWriteOnce]}":                                                      "spec.capacity[storage]: Required",
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce]}":                                                  "spec: Required value: set one source",
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], csi: {driver: a}}":                                "spec.csi.volumeHandle: Required",
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], csi: {volumeHandle: a}}":                          "spec.csi.driver: Required",
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], csi: {driver: a/b, volumeHandle: a}}":             `spec.csi.driver: Invalid value: "a/b"`,
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteTwice], hostPath: {path: /a}}":                           `spec.accessModes[0]: Unsupported value: "ReadWriteTwice"`,
		pvHead + "{capacity: {storage: 1Gi}, hostPath: {path: /a}}":                                                          "spec.accessModes: Required",
		pvHead + "{capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /a}, volumeMode: Raw}":           `spec.volumeMode: Unsupported value: "Raw"`,
		"apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: a, namespace: b}\nspec: {}":                                "metadata.namespace: Forbidden: a PersistentVolume has no namespace",
		claimHead + "{accessModes: [ReadWriteOnce]}":                                                                         "spec.resources.requests[storage]: Required",
		claimHead + "{accessModes: [ReadWriteOnce], resources: {requests: {storage: -1}}}":                                   `spec.resources.requests[storage]: Invalid value: "-1"`,
		claimHead + "{accessModes: [ReadWriteOnce], resources: {requests: {storage: 1}}, volumeName: a/b}":                   `spec.volumeName: Invalid value: "a/b"`,
		"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: a}":                                             "provisioner: Required",
		"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: a}\nprovisioner: b\nreclaimPolicy: Recycle":     `reclaimPolicy: Unsupported value: "Recycle"`,
		"apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: a}\nspec: {fsGroupPolicy: Some}":                   `spec.fsGroupPolicy: Unsupported value: "Some"`,
		"apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: a}":                                  "spec.source: Required",
		"apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotContent\nmetadata: {name: a}\nspec: {driver: a}":        "spec.source: Required",
		"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, namespace: b}":                                           `kind: "Deployment" is not supported: supported kinds are CSIDriver`,
		"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: []}]":                                       `kind: "List" is not supported`,
		"apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: " + strings.Repeat("a", 64) + "}\nspec: {}":        "metadata.name: Too long",
		"apiVersion: storage.k8s.io/v1beta1\nkind: StorageClass\nmetadata: {name: a}\nprovisioner: b\nallowedTopologies: []": "the apiVersion of a StorageClass is storage.k8s.io/v1",
	} {
		o := readFiles(t, "a.yaml", text)
		if len(o.Problems) != 1 || !strings.Contains(o.Problems[0].Message, want) {
			t.Errorf("%s\ngot problems %v, want %s", text, o.Problems, want)
		}
		if unsupported := strings.Contains(want, "Deployment"); o.Complete != unsupported {
			t.Errorf("%s\ngot complete %t, want %t", text, o.Complete, unsupported)
		}
		if n := len(o.Pods) + len(o.Claims) + len(o.Volumes) + len(o.Classes) + len(o.ConfigMaps) + len(o.Secrets) + len(o.Drivers) + len(o.Snapshots) + len(o.SnapshotContents); n != 0 {
			t.Errorf("%s\nthe object was added, want it ignored", text)
		}
	}
}

// TestDefaults: objects have the defaults that an API server sets, and no status, except that snapshots
// keep their status.
func TestDefaults(t *testing.T) {
	o := readFiles(t, "a.yaml", `
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: other}, data: {a: b}, binaryData: {c: YQ==}}
- {apiVersion: v1, kind: Secret, metadata: {name: a}, data: {a: YQ==, b: YQ==}, stringData: {b: c}}
- apiVersion: v1
  kind: Pod
  metadata: {name: a}
  spec:
    containers: [{name: app, image: b, volumeMounts: [{name: a, mountPath: /a, subPath: b/c..d}]}]
    volumes:
    - name: a
      ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}}
  status: {phase: Running}
---
`+claimHead+`{accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
status: {phase: Bound}
---
`+pvHead+`{accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, csi: {driver: Example.com, volumeHandle: ../a}}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: a}, provisioner: b}
---
{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: a.b}, spec: {}}
---
{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: a}, spec: {source: {volumeSnapshotContentName: a}}, status: {readyToUse: true}}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: a}
spec: {driver: a.b, deletionPolicy: Retain, source: {snapshotHandle: a}, volumeSnapshotRef: {namespace: default, name: a}}
`)
	if !o.Complete || len(o.Problems) > 0 {
		t.Fatalf("got complete %t, problems %v; want complete, no problems", o.Complete, o.Problems)
	}
	id := types.NamespacedName{Namespace: "default", Name: "a"}
	pod, claim, pv, class, driver := o.Pods[id], o.Claims[id], o.Volumes["a"], o.Classes["a"], o.Drivers["a.b"]
	secret := o.Secrets[id]
	for what, ok := range map[string]bool{
		"the ConfigMap's namespace":                o.ConfigMaps[types.NamespacedName{Namespace: "other", Name: "a"}] != nil,
		"the Secret's stringData":                  string(secret.Data["a"]) == "a" && string(secret.Data["b"]) == "c" && secret.StringData == nil,
		"the Secret's type":                        secret.Type == corev1.SecretTypeOpaque,
		"the pod's status":                         pod.Status.Phase == "",
		"the claim's status and volumeMode":        claim.Status.Phase == "" && *claim.Spec.VolumeMode == corev1.PersistentVolumeFilesystem,
		"the volumeClaimTemplate's volumeMode":     *pod.Spec.Volumes[0].Ephemeral.VolumeClaimTemplate.Spec.VolumeMode == corev1.PersistentVolumeFilesystem,
		"the volume's policy and volumeMode":       pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain && *pv.Spec.VolumeMode == corev1.PersistentVolumeFilesystem,
		"the class's policy and binding mode":      *class.ReclaimPolicy == corev1.PersistentVolumeReclaimDelete && *class.VolumeBindingMode == storagev1.VolumeBindingImmediate,
		"the driver's bool fields":                 *driver.Spec.AttachRequired && !*driver.Spec.PodInfoOnMount && !*driver.Spec.RequiresRepublish && !*driver.Spec.SELinuxMount,
		"the driver's fsGroupPolicy and lifecycle": *driver.Spec.FSGroupPolicy == storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy && slices.Equal(driver.Spec.VolumeLifecycleModes, []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}),
		"the snapshot, with its status":            *o.Snapshots[id].Status.ReadyToUse,
		"the content":                              *o.SnapshotContents["a"].Spec.Source.SnapshotHandle == "a",
		"UIDs":                                     uidPattern.MatchString(string(pod.UID)) && pod.UID != claim.UID && claim.UID != pv.UID,
		"a UID that is the same in all releases":   pod.UID == "a35e61ec-44aa-8c59-a842-045806167094",
	} {
		if !ok {
			t.Errorf("%s: got another value than an API server would set", what)
		}
	}
}

// TestDuplicates: if several files contain the same object, or objects with the same UID, the first
// file by name takes precedence.
func TestDuplicates(t *testing.T) {
	pod := func(name, uid, label string) string {
		return fmt.Sprintf("---\napiVersion: v1\nkind: Pod\nmetadata: {name: %s, uid: %q, labels: {in: %s}}\nspec: {containers: [{name: app}]}\n", name, uid, label)
	}
	o := readFiles(t, "b.yaml", pod("one", "1", "b")+pod("three", "3", "b"), "a.yaml", pod("one", "1", "a")+pod("one", "2", "again")+pod("two", "3", "a"))
	var got []string
	for name, pod := range o.Pods {
		got = append(got, name.Name+" in "+pod.Labels["in"])
	}
	slices.Sort(got)
	if !slices.Equal(got, []string{"one in a", "two in a"}) || o.Complete {
		t.Errorf("got pods %v, complete %t; want one and two of a.yaml, incomplete", got, o.Complete)
	}
	want := []Problem{
		{"a.yaml", "Pod default/one", "a.yaml contains the same object and takes precedence: remove one of them"},
		{"b.yaml", "Pod default/one", "a.yaml contains the same object and takes precedence: remove one of them"},
		{"b.yaml", "Pod default/three", `metadata.uid: "3" is the UID of Pod default/two: remove this field, or change its value: until this is fixed, nothing is unmounted or deleted`},
	}
	if !slices.Equal(o.Problems, want) {
		t.Errorf("got problems %q, want %q", o.Problems, want)
	}
}

// FuzzDecode: each input results in an error or in entries, and each entry has either an object or a
// problem. No name in an accepted object leads out of a directory when it is used in a path.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{
		podHead + "  volumes: [{name: b, emptyDir: {}}]\n",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: a, uid: b}\nspec:\n  containers: [{name: app, volumeMounts: [{name: b, subPath: c/d}]}]\n  volumes: [{name: b, csi: {driver: e.f}}]\n",
		pvHead + "{accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, csi: {driver: Example.com, volumeHandle: ../a}}\n---\n" + claimHead + "{accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}\n",
		"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Secret, metadata: {name: a}, data: {a: YQ==}}\n",
		"...\n---\n&a [*a]\n", "{", "\ufeff---\r--- |\n x", "kind: 1", "!!binary a: b",
	} {
		f.Add([]byte(text), false)
		f.Add([]byte(text), true)
	}
	f.Add([]byte(`{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "b"}}`), true)
	f.Fuzz(func(t *testing.T, data []byte, isJSON bool) {
		entries, err := decode(data, isJSON)
		if err != nil && (entries != nil || err.Error() == "") {
			t.Fatalf("got entries %v and error %q, want no entries and an error with a text", entries, err)
		}
		for _, e := range entries {
			if (e.object == nil) == (e.problem == "") {
				t.Fatalf("entry %+v has both an object and a problem, or neither", e)
			}
			for _, part := range pathParts(e.object) {
				if part == "" || part == "." || part == ".." || path.Base(part) != part {
					t.Errorf("%s contains %q, which is not a single path component", e.key, part)
				}
			}
		}
	})
}

// pathParts returns the strings of an object that become parts of paths.
func pathParts(o metav1.Object) (all []string) {
	if o == nil {
		return nil
	}
	all = []string{o.GetName(), string(o.GetUID())}
	switch o := o.(type) {
	case *corev1.Pod:
		all = append(all, o.Namespace)
		for _, v := range o.Spec.Volumes {
			all = append(all, v.Name)
			if v.CSI != nil {
				all = append(all, v.CSI.Driver)
			}
		}
		for _, c := range o.Spec.Containers {
			all = append(all, c.Name)
			for _, m := range c.VolumeMounts {
				if m.SubPath != "" && !filepath.IsLocal(m.SubPath) {
					all = append(all, m.SubPath)
				}
			}
		}
	case *corev1.PersistentVolume:
		if o.Spec.CSI != nil {
			all = append(all, o.Spec.CSI.Driver)
		}
	case *corev1.ConfigMap:
		for k := range o.Data {
			all = append(all, k)
		}
	case *corev1.Secret:
		for k := range o.Data {
			all = append(all, k)
		}
	}
	return all
}
