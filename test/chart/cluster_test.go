package chart

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// Objects that a cluster may have when the chart is installed, by path, without irrelevant values.
const (
	storage    = "/apis/storage.k8s.io/v1/"
	snapshots  = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
	attached   = `{"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "csi.trivet.dev"%s}, "spec": {"attachRequired": true}}`
	inline     = `{"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "csi.trivet.dev"%s}, "spec": {"attachRequired": true, "volumeLifecycleModes": ["Persistent", "Ephemeral"]}}`
	class      = `{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "trivet-loop"%s}, "provisioner": "csi.trivet.dev", "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer", "parameters": {"allocation": "thin", "backend": "loop", "csi.storage.k8s.io/fstype": "%s", "pool": "default"}}`
	volumes    = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-other", "finalizers": ["external-attacher/other"]}, "spec": {"csi": {"driver": "other"}}}, {"metadata": {"name": "pvc-nfs"}, "spec": {"nfs": {}}}, {"metadata": {"name": "pvc-ours", "finalizers": ["kubernetes.io/pv-protection"%s]}, "spec": {"csi": {"driver": "csi.trivet.dev"}}}]}`
	restricted = `{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "trivet-system", "labels": {"pod-security.kubernetes.io/enforce": "%s"}}}`
	nodes      = `{"apiVersion": "v1", "kind": "NodeList", "items": [{"metadata": {"name": "a", "labels": {"kubernetes.io/os": "linux", "kubernetes.io/hostname": "host-a"}}}, {"metadata": {"name": "b", "labels": {"kubernetes.io/os": "%s", "kubernetes.io/hostname": "host-b"}}}]}`
	placed     = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-nfs"}, "spec": {"nfs": {}}}, {"metadata": {"name": "pvc-a"}, "spec": {"csi": {"driver": "csi.trivet.dev"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "csi.trivet.dev/node", "operator": "In", "values": ["a"]}]}]}}}}, {"metadata": {"name": "pvc-b"}, "spec": {"csi": {"driver": "csi.trivet.dev"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "csi.trivet.dev/node", "operator": "In", "values": ["%s"]}]}]}}}}]}`
	handles    = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-other"}, "spec": {"csi": {"driver": "other", "volumeHandle": "loop:gone.01234567:a"}}}, {"metadata": {"name": "pvc-direct"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "nfs:=nas=/tank:a"}}}, {"metadata": {"name": "static"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "nfs:web:data", "volumeAttributes": {"Server": "nas", "share": "/web"}}}}, {"metadata": {"name": "pvc-ours"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "%s"}}}]}`
	content    = `{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContentList", "items": [{"metadata": {"name": "new"}, "spec": {"driver": "csi.trivet.dev"}}, {"metadata": {"name": "taken"}, "spec": {"driver": "csi.trivet.dev"}, "status": {"snapshotHandle": "%s"}}]}`
	// ours is the metadata that Helm requires of an existing object.
	ours = `, "labels": {"app.kubernetes.io/managed-by": "Helm"}, "annotations": {"meta.helm.sh/release-name": "trivet", "meta.helm.sh/release-namespace": "trivet-system"}`
)

// TestCluster: the chart checks the objects of the cluster before it changes anything.
func TestCluster(t *testing.T) {
	for _, tc := range []struct {
		name, values string
		has          map[string]string
		says         []string // none: it is accepted
	}{
		{name: "empty"},
		{
			name: "the same objects",
			has:  map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(attached, ours), storage + "storageclasses/trivet-loop": fmt.Sprintf(class, ours, "ext4")},
		},
		{
			name: "another attachRequired", values: "attachRequired: false",
			has:  map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(attached, ours)},
			says: []string{"attachRequired: CSIDriver csi.trivet.dev has true", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name: "inline volumes for the first time", values: "ephemeral: {enabled: true, memory: 1Gi}",
			has:  map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(attached, ours)},
			says: []string{"ephemeral.enabled: CSIDriver csi.trivet.dev has volumeLifecycleModes [Persistent]", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name: "inline volumes removed",
			has:  map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(inline, ours)},
			says: []string{"ephemeral.enabled: CSIDriver csi.trivet.dev has volumeLifecycleModes [Persistent, Ephemeral]", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name: "inline volumes as before", values: "ephemeral: {enabled: true, memory: 1Gi}",
			has: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(inline, ours)},
		},
		{
			name: "volumes that need the attacher", values: "attachRequired: false",
			has:  map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumes, `, "external-attacher/csi-trivet-dev"`)},
			says: []string{"attachRequired: 1 volumes", "pvc-ours", "Delete their claims"},
		},
		{
			name: "volumes without the attacher", values: "attachRequired: false",
			has: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumes, "")},
		},
		{
			name: "the pools of all volumes", values: "pools: {nas: {nfs: {server: nas, export: /e}}}",
			has: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(handles, "loop:default.01234567:pvc-1"), snapshots: fmt.Sprintf(content, "nfs:nas:group-1.2")},
		},
		{
			name: "a removed pool with volumes", values: "pools: {default: null, other: {directory: {path: /srv/other}}}",
			has:  map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(handles, "loop:default.01234567:pvc-1")},
			says: []string{"pools.default is missing", "PersistentVolume pvc-ours is in that pool"},
		},
		{
			name: "a removed export with volumes",
			has:  map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(handles, "nfs:nas:pvc-1")},
			says: []string{"pools.nas is missing", "PersistentVolume pvc-ours"},
		},
		{
			name: "a removed pool with snapshots",
			has:  map[string]string{snapshots: fmt.Sprintf(content, "local:fast.01234567:group-1.2")},
			says: []string{"pools.fast is missing", "VolumeSnapshotContent taken"},
		},
		{
			name: "another class with the name",
			has:  map[string]string{storage + "storageclasses/trivet-loop": fmt.Sprintf(class, ours, "xfs")},
			says: []string{"storageClass trivet-loop exists", "kubectl delete storageclass trivet-loop"},
		},
		{
			name: "a namespace that refuses the pod",
			has:  map[string]string{"/api/v1/namespaces/trivet-system": fmt.Sprintf(restricted, "baseline")},
			says: []string{"namespace trivet-system enforces the Pod Security level baseline", "kubectl label"},
		},
		{
			name: "a namespace that allows the pod",
			has:  map[string]string{"/api/v1/namespaces/trivet-system": fmt.Sprintf(restricted, "privileged")},
		},
		{
			name: "two nodes",
			has:  map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux"), "/api/v1/persistentvolumes": fmt.Sprintf(placed, "b")},
		},
		{
			name: "one node of two", values: oneNode,
			has:  map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux")},
			says: []string{"node.nodeSelector: 2 nodes match", "has the pools", "kubectl -n trivet-system get pod -o wide", `--set node.nodeSelector.kubernetes\\.io/hostname=host-a`, `--set node.nodeSelector.kubernetes\\.io/hostname=host-b`},
		},
		{
			name: "the selected node of two", values: oneNode + "node: {nodeSelector: {kubernetes.io/hostname: host-b}}",
			has: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux")},
		},
		{
			name: "one node and one of another kind", values: oneNode,
			has: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "windows")},
		},
		{
			name: "one node for the volumes of two", values: oneNode,
			has:  map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(placed, "b")},
			says: []string{"shape: volumes are on 2 nodes (a, b)", "shape=cluster"},
		},
		{
			name: "one node for its volumes", values: oneNode,
			has: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(placed, "a")},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			checkMessage(t, tc.values, tc.says, "--dry-run=server", "--disable-openapi-validation", "--kubeconfig", cluster(t, tc.has))
		})
	}
}

// cluster serves the part of the Kubernetes API that finds objects, and returns a kubeconfig for it.
func cluster(t *testing.T, objects map[string]string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if object, ok := objects[r.URL.Path]; ok {
			fmt.Fprintln(w, object)
		} else if answer := discovery(r.URL.Path); answer != nil {
			_ = json.NewEncoder(w).Encode(answer) // the caller detects a truncated response
		} else {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintln(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}`)
		}
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"clusters": [{"name": "c", "cluster": {"server": "` + server.URL + `"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	must(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// withoutNamespace holds the cluster-scoped kinds of the chart.
var withoutNamespace = map[string]bool{
	"ClusterRole": true, "ClusterRoleBinding": true, "CSIDriver": true, "Namespace": true, "Node": true, "PersistentVolume": true, "StorageClass": true,
	"ValidatingAdmissionPolicy": true, "ValidatingAdmissionPolicyBinding": true, "VolumeSnapshotContent": true,
}

func init() {
	scheme.Scheme.AddKnownTypeWithName(schema.FromAPIVersionAndKind("snapshot.storage.k8s.io/v1", "VolumeSnapshotContent"), &unstructured.Unstructured{})
}

// discovery returns the response to a discovery request: all kinds of client-go, and snapshots.
func discovery(path string) any {
	if path == "/version" {
		return map[string]string{"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
	}
	if path == "/api" {
		return metav1.APIVersions{Versions: []string{"v1"}}
	}
	groups := metav1.APIGroupList{}
	for _, gv := range scheme.Scheme.PrioritizedVersionsAllGroups() {
		v := metav1.GroupVersionForDiscovery{GroupVersion: gv.String(), Version: gv.Version}
		if gv.Group != "" && gv.Version == "v1" {
			groups.Groups = append(groups.Groups, metav1.APIGroup{Name: gv.Group, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v})
		}
		if path != "/apis/"+gv.String() && path != "/api/"+gv.String() {
			continue
		}
		list := metav1.APIResourceList{GroupVersion: gv.String()}
		for kind := range scheme.Scheme.KnownTypes(gv) {
			plural, singular := meta.UnsafeGuessKindToResource(gv.WithKind(kind))
			list.APIResources = append(list.APIResources, metav1.APIResource{
				Name: plural.Resource, SingularName: singular.Resource, Kind: kind, Namespaced: !withoutNamespace[kind], Verbs: []string{"get", "list"},
			})
		}
		return list
	}
	if path == "/apis" {
		return groups
	}
	return nil
}
