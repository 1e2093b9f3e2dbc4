package move

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// object parses a manifest.
func object(t *testing.T, text string) (o kube.Object) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err)
	}
	return o
}

const (
	before = `{"metadata":{"name":"pv","uid":"x","labels":{"team":"a"},"annotations":{"note":"x","csi.trivet.dev/node-lost":"Delete"},"finalizers":["f"]},"spec":{
		"capacity":{"storage":"1Gi"},"persistentVolumeReclaimPolicy":"Retain","mountOptions":["noatime"],
		"claimRef":{"namespace":"ns","name":"data","uid":"u","resourceVersion":"7"},
		"csi":{"driver":"d","volumeHandle":"old","volumeAttributes":{"pool":"a","gone":"x"},"nodeStageSecretRef":{"name":"data-key","namespace":"ns"},"nodeExpandSecretRef":{"name":"data-key","namespace":"ns"}},
		"nodeAffinity":{"required":{"a":true}},"volumeAttributesClassName":"slow"},"status":{"phase":"Bound"}}`
	copied = `{"metadata":{"name":"pv-copy"},"spec":{
		"capacity":{"storage":"2Gi"},"persistentVolumeReclaimPolicy":"Delete",
		"claimRef":{"namespace":"ns","name":"copy","uid":"v"},
		"csi":{"driver":"d","volumeHandle":"new","volumeAttributes":{"pool":"b"},"nodeStageSecretRef":{"name":"copy-key","namespace":"ns"},"nodeExpandSecretRef":{"name":"copy-key","namespace":"ns"}},
		"nodeAffinity":{"required":{"b":true}}}}`
)

// TestNewVolumeManifest: the new PersistentVolume has the volume of the copy, and otherwise the properties of the old one. Without its
// references to Secrets, an encrypted volume could not be staged or expanded.
func TestNewVolumeManifest(t *testing.T) {
	want := object(t, `{"metadata":{"name":"pv","labels":{"team":"a"},"annotations":{"note":"x"}},"spec":{
		"capacity":{"storage":"2Gi"},"persistentVolumeReclaimPolicy":"Retain","mountOptions":["noatime"],
		"claimRef":{"namespace":"ns","name":"data","uid":"u"},
		"csi":{"driver":"d","volumeHandle":"new","volumeAttributes":{"pool":"b"},"nodeStageSecretRef":{"name":"data-key","namespace":"ns"},"nodeExpandSecretRef":{"name":"data-key","namespace":"ns"}},
		"nodeAffinity":{"required":{"b":true}}}}`)
	if got := newVolumeManifest(manifestOf(object(t, before)), object(t, copied)); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestKeptManifest: the PersistentVolume of the old volume has the policy Retain and a claim that never existed, and the provisioner can
// delete its volume.
func TestKeptManifest(t *testing.T) {
	m := &Mover{Options: Options{Namespace: "ns", ClaimName: strings.Repeat("x", 62) + "-data"}, state: state{ID: "1", Old: manifestOf(object(t, before))}}
	m.claim.Spec.VolumeName = "pv"
	v, err := kube.AsPersistentVolume(m.keptManifest())
	if err != nil || v.Metadata.Name != "pv-moved-1" || v.Spec.CSI.VolumeHandle != "old" || v.Spec.ReclaimPolicy != "Retain" {
		t.Errorf("got %+v, %v, want pv-moved-1 with the old volume and the policy Retain", v, err)
	}
	if ref := v.Spec.ClaimRef; ref.UID == "" || ref.UID == "u" || ref.Name == m.ClaimName {
		t.Errorf("got the claim %+v, want one that does not exist", ref)
	}
	if v.Metadata.Annotations["pv.kubernetes.io/provisioned-by"] != "d" || v.Metadata.Labels["team"] != "a" || v.Metadata.Labels[movedFromLabel] != strings.Repeat("x", 62) {
		t.Errorf("got %+v, want the driver, the old label, and the claim as a valid label", v.Metadata)
	}
	if name := m.state.Old["metadata"].(map[string]any)["name"]; name != "pv" {
		t.Errorf("got the old PersistentVolume with the name %v, want that it does not change", name)
	}
}

// TestReadState: the state is read as it was written, and another text or the state of another claim is an error.
func TestReadState(t *testing.T) {
	written := state{ID: "1", UID: "u", From: "a", To: "b", Step: swapping, Round: 2, Cordoned: true, Ended: []string{"p"}, Old: object(t, before)}
	text, err := json.Marshal(written)
	if err != nil {
		t.Fatal(err)
	}
	read := func(name, text string) (state, error) {
		return readState(kube.ConfigMap{Metadata: kube.Meta{Name: name}, Data: map[string]string{stateKey: text}})
	}
	if got, err := read("trivet-move-u", string(text)); err != nil || !reflect.DeepEqual(got, written) {
		t.Errorf("got %+v, %v, want %+v", got, err, written)
	}
	for name, text := range map[string]string{"trivet-move-u": "{", "trivet-move-v": string(text), "trivet-move-": "{}"} {
		if got, err := read(name, text); err == nil {
			t.Errorf("%s: got %+v for %s, want an error", name, got, text)
		}
	}
}
