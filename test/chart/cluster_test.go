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

// API paths, and objects that a cluster may have when the chart is installed. Fields that the chart does
// not check are omitted. The test cases fill in each %s: further metadata, or the value that differs
// between the cases.
const (
	storage          = "/apis/storage.k8s.io/v1/"
	snapshots        = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
	csiDriver        = `{"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "csi.trivet.dev"%s}, "spec": {"attachRequired": true}}`
	inlineCSIDriver  = `{"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "csi.trivet.dev"%s}, "spec": {"attachRequired": true, "volumeLifecycleModes": ["Persistent", "Ephemeral"]}}`
	class            = `{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "trivet-loop"%s}, "provisioner": "csi.trivet.dev", "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer", "parameters": {"allocation": "thin", "backend": "loop", "csi.storage.k8s.io/fstype": "%s", "pool": "default"}}`
	volumes          = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-other", "finalizers": ["external-attacher/other"]}, "spec": {"csi": {"driver": "other"}}}, {"metadata": {"name": "pvc-nfs"}, "spec": {"nfs": {}}}, {"metadata": {"name": "pvc-ours", "finalizers": ["kubernetes.io/pv-protection"%s]}, "spec": {"csi": {"driver": "csi.trivet.dev"}}}]}`
	namespaceObject  = `{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "trivet-system", "labels": {"pod-security.kubernetes.io/enforce": "%s"}}}`
	nodes            = `{"apiVersion": "v1", "kind": "NodeList", "items": [{"metadata": {"name": "a", "labels": {"kubernetes.io/os": "linux", "kubernetes.io/hostname": "host-a"}}}, {"metadata": {"name": "b", "labels": {"kubernetes.io/os": "%s", "kubernetes.io/hostname": "host-b"}}}]}`
	placedVolumes    = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-nfs"}, "spec": {"nfs": {}}}, {"metadata": {"name": "pvc-a"}, "spec": {"csi": {"driver": "csi.trivet.dev"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "csi.trivet.dev/node", "operator": "In", "values": ["a"]}]}]}}}}, {"metadata": {"name": "pvc-b"}, "spec": {"csi": {"driver": "csi.trivet.dev"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "csi.trivet.dev/node", "operator": "In", "values": ["%s"]}]}]}}}}]}`
	volumeHandles    = `{"apiVersion": "v1", "kind": "PersistentVolumeList", "items": [{"metadata": {"name": "pvc-other"}, "spec": {"csi": {"driver": "other", "volumeHandle": "loop:gone.01234567:a"}}}, {"metadata": {"name": "pvc-direct"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "nfs:=nas=/tank:a"}}}, {"metadata": {"name": "static"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "nfs:web:data", "volumeAttributes": {"Server": "nas", "share": "/web"}}}}, {"metadata": {"name": "pvc-ours"}, "spec": {"csi": {"driver": "csi.trivet.dev", "volumeHandle": "%s"}}}]}`
	snapshotContents = `{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContentList", "items": [{"metadata": {"name": "new"}, "spec": {"driver": "csi.trivet.dev"}}, {"metadata": {"name": "taken"}, "spec": {"driver": "csi.trivet.dev"}, "status": {"snapshotHandle": "%s"}}]}`
	// helmMetadata is the metadata without which Helm refuses to change an existing object.
	helmMetadata = `, "labels": {"app.kubernetes.io/managed-by": "Helm"}, "annotations": {"meta.helm.sh/release-name": "trivet", "meta.helm.sh/release-namespace": "trivet-system"}`
)

// TestCluster checks that the chart refuses an installation that conflicts with objects of the cluster.
func TestCluster(t *testing.T) {
	for _, tc := range []struct {
		name, values string
		objects      map[string]string
		texts        []string // of the error; if empty, the chart must be accepted
	}{
		{name: "no objects"},
		{
			name:    "equal objects",
			objects: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(csiDriver, helmMetadata), storage + "storageclasses/trivet-loop": fmt.Sprintf(class, helmMetadata, "ext4")},
		},
		{
			name: "different attachRequired", values: "attachRequired: false",
			objects: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(csiDriver, helmMetadata)},
			texts:   []string{"attachRequired: CSIDriver csi.trivet.dev has true", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name: "inline volumes enabled", values: "ephemeral: {enabled: true, memory: 1Gi}",
			objects: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(csiDriver, helmMetadata)},
			texts:   []string{"ephemeral.enabled: CSIDriver csi.trivet.dev has volumeLifecycleModes [Persistent]", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name:    "inline volumes disabled",
			objects: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(inlineCSIDriver, helmMetadata)},
			texts:   []string{"ephemeral.enabled: CSIDriver csi.trivet.dev has volumeLifecycleModes [Persistent, Ephemeral]", "kubectl delete csidriver csi.trivet.dev"},
		},
		{
			name: "inline volumes still enabled", values: "ephemeral: {enabled: true, memory: 1Gi}",
			objects: map[string]string{storage + "csidrivers/csi.trivet.dev": fmt.Sprintf(inlineCSIDriver, helmMetadata)},
		},
		{
			name: "volumes that need the attacher", values: "attachRequired: false",
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumes, `, "external-attacher/csi-trivet-dev"`)},
			texts:   []string{"attachRequired: 1 volumes", "pvc-ours", "Delete their claims"},
		},
		{
			name: "volumes that do not need the attacher", values: "attachRequired: false",
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumes, "")},
		},
		{
			name: "pools of all volumes exist", values: "pools: {nas: {nfs: {server: nas, export: /e}}}",
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumeHandles, "loop:default.01234567:pvc-1"), snapshots: fmt.Sprintf(snapshotContents, "nfs:nas:group-1.2")},
		},
		{
			name: "removed pool with volumes", values: "pools: {default: null, other: {directory: {path: /srv/other}}}",
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumeHandles, "loop:default.01234567:pvc-1")},
			texts:   []string{"pools.default is missing", "PersistentVolume pvc-ours is in that pool"},
		},
		{
			name:    "removed export with volumes",
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(volumeHandles, "nfs:nas:pvc-1")},
			texts:   []string{"pools.nas is missing", "PersistentVolume pvc-ours"},
		},
		{
			name:    "removed pool with snapshots",
			objects: map[string]string{snapshots: fmt.Sprintf(snapshotContents, "local:fast.01234567:group-1.2")},
			texts:   []string{"pools.fast is missing", "VolumeSnapshotContent taken"},
		},
		{
			name:    "different class with the same name",
			objects: map[string]string{storage + "storageclasses/trivet-loop": fmt.Sprintf(class, helmMetadata, "xfs")},
			texts:   []string{"storageClass trivet-loop exists", "kubectl delete storageclass trivet-loop"},
		},
		{
			name:    "namespace that refuses the pods",
			objects: map[string]string{"/api/v1/namespaces/trivet-system": fmt.Sprintf(namespaceObject, "baseline")},
			texts:   []string{"namespace trivet-system enforces the Pod Security level baseline", "kubectl label"},
		},
		{
			name:    "namespace that allows the pods",
			objects: map[string]string{"/api/v1/namespaces/trivet-system": fmt.Sprintf(namespaceObject, "privileged")},
		},
		{
			name:    "shape cluster with two nodes",
			objects: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux"), "/api/v1/persistentvolumes": fmt.Sprintf(placedVolumes, "b")},
		},
		{
			name: "shape oneNode with two nodes", values: oneNode,
			objects: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux")},
			texts:   []string{"node.nodeSelector: 2 nodes match", "has the pools", "kubectl -n trivet-system get pod -o wide", `--set node.nodeSelector.kubernetes\\.io/hostname=host-a`, `--set node.nodeSelector.kubernetes\\.io/hostname=host-b`},
		},
		{
			name: "shape oneNode with one of two nodes selected", values: oneNode + "node: {nodeSelector: {kubernetes.io/hostname: host-b}}",
			objects: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "linux")},
		},
		{
			name: "shape oneNode with one Linux and one Windows node", values: oneNode,
			objects: map[string]string{"/api/v1/nodes": fmt.Sprintf(nodes, "windows")},
		},
		{
			name: "shape oneNode with volumes on two nodes", values: oneNode,
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(placedVolumes, "b")},
			texts:   []string{"shape: volumes are on 2 nodes (a, b)", "shape=cluster"},
		},
		{
			name: "shape oneNode with volumes on one node", values: oneNode,
			objects: map[string]string{"/api/v1/persistentvolumes": fmt.Sprintf(placedVolumes, "a")},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			checkMessage(t, tc.values, tc.texts, "--dry-run=server", "--disable-openapi-validation", "--kubeconfig", cluster(t, tc.objects))
		})
	}
}

// cluster starts an API server that only serves discovery and the given objects, by path. It returns the
// path of a kubeconfig.
func cluster(t *testing.T, objects map[string]string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if object, ok := objects[r.URL.Path]; ok {
			fmt.Fprintln(w, object)
		} else if answer := discovery(r.URL.Path); answer != nil {
			_ = json.NewEncoder(w).Encode(answer) // helm detects a truncated response
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

// withoutNamespace contains the cluster-scoped kinds that the chart uses.
var withoutNamespace = map[string]bool{
	"ClusterRole": true, "ClusterRoleBinding": true, "CSIDriver": true, "Namespace": true, "Node": true, "PersistentVolume": true, "StorageClass": true,
	"ValidatingAdmissionPolicy": true, "ValidatingAdmissionPolicyBinding": true, "VolumeSnapshotContent": true,
}

// init makes discovery announce VolumeSnapshotContent, which client-go does not know.
func init() {
	scheme.Scheme.AddKnownTypeWithName(schema.FromAPIVersionAndKind("snapshot.storage.k8s.io/v1", "VolumeSnapshotContent"), &unstructured.Unstructured{})
}

// discovery returns the response to a discovery request, or nil for another path. It announces all kinds
// of client-go, and VolumeSnapshotContent.
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
