package claim_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// bound fails the test if a claim is not bound to the volume; "" means that it must be unbound.
func (w *world) bound(name, volume string) {
	w.t.Helper()
	c, v, err := w.life.controller.Volume(named(name))
	if volume == "" {
		if err == nil {
			w.t.Errorf("claim %s is bound to %s", name, v.Name)
		}
		return
	}
	if err != nil {
		w.t.Errorf("claim %s: %v", name, err)
		return
	}
	if v.Name != volume || c.Spec.VolumeName != volume || v.Spec.ClaimRef.UID != c.UID {
		w.t.Errorf("claim %s has %s, want %s", name, v.Name, volume)
	}
}

// says fails the test if a message lacks one of the words.
func (w *world) says(message string, words ...string) {
	w.t.Helper()
	for _, word := range words {
		if !strings.Contains(message, word) {
			w.t.Errorf("message %q does not contain %q", message, word)
		}
	}
}

// checkEmpty fails the test if the driver has volumes or the store has records.
func (w *world) checkEmpty() {
	w.t.Helper()
	if len(w.driver.volumes)+len(w.life.store.Claims())+len(w.life.store.Volumes()) > 0 {
		w.t.Errorf("not removed: %v, %s", w.driver.volumes, w.status())
	}
}

func TestBinding(t *testing.T) {
	prebound := newVolume("v", "1Gi", "slow")
	prebound.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "c"}
	others := newVolume("v", "1Gi", "")
	others.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "other"}
	block := newVolume("v", "1Gi", "")
	block.Spec.VolumeMode = new(corev1.PersistentVolumeBlock)
	labelled := newVolume("v", "1Gi", "")
	labelled.Labels = map[string]string{"disk": "ssd"}
	selecting := newClaim("c", "1Gi", "")
	selecting.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"disk": "ssd"}}
	many := newClaim("c", "1Gi", "")
	many.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	naming := newClaim("c", "1Gi", "")
	naming.Spec.VolumeName = "b"

	for name, row := range map[string]struct {
		claim   *corev1.PersistentVolumeClaim
		volumes []*corev1.PersistentVolume
		want    string
		message string
	}{
		"smallest that fits": {newClaim("c", "2Gi", ""), []*corev1.PersistentVolume{newVolume("a", "9Gi", ""), newVolume("b", "3Gi", ""), newVolume("d", "1Gi", "")}, "b", ""},
		"first by name":      {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{newVolume("b", "1Gi", ""), newVolume("a", "1Gi", "")}, "a", ""},
		"named":              {naming, []*corev1.PersistentVolume{newVolume("a", "1Gi", ""), newVolume("b", "3Gi", "")}, "b", ""},
		"named is missing":   {naming, []*corev1.PersistentVolume{newVolume("a", "1Gi", "")}, "", `"b": no such volume`},
		"named is too small": {naming, []*corev1.PersistentVolume{newVolume("b", "1Mi", "")}, "", "capacity 1Mi is less than 1Gi"},
		"prebound":           {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{prebound, newVolume("a", "1Gi", "")}, "v", ""},
		"of another claim":   {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{others}, "", "is free"},
		"class":              {newClaim("c", "1Gi", "fast"), []*corev1.PersistentVolume{newVolume("v", "1Gi", "")}, "", `StorageClass "fast" is in no manifest`},
		"same class":         {newClaim("c", "1Gi", "fast"), []*corev1.PersistentVolume{newVolume("v", "1Gi", "fast")}, "v", ""},
		"mode":               {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{block}, "", "volumeMode Block is not Filesystem"},
		"access modes":       {many, []*corev1.PersistentVolume{newVolume("v", "1Gi", "")}, "", "ReadWriteMany"},
		"selector":           {selecting, []*corev1.PersistentVolume{newVolume("a", "1Gi", ""), labelled}, "v", ""},
		"selector of none":   {selecting, []*corev1.PersistentVolume{newVolume("a", "1Gi", "")}, "", "disk=ssd"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			for _, v := range row.volumes {
				w.add(v)
			}
			w.apply(row.claim)
			w.bound("c", row.want)
			w.says(w.claim("c").Message, row.message)
			w.restart()
			w.bound("c", row.want)
		})
	}
}

// only restricts a volume to machines with a label.
func only(v *corev1.PersistentVolume, label, value string) *corev1.PersistentVolume {
	requirement := corev1.NodeSelectorRequirement{Key: label, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{requirement}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}}
	return v
}

// TestAffinity: no claim is bound to a volume of another machine, even if one names the other. A
// bound claim keeps its volume.
func TestAffinity(t *testing.T) {
	naming := newClaim("c", "1Gi", "")
	naming.Spec.VolumeName = "v"
	prebound := func(uid types.UID) *corev1.PersistentVolume {
		v := newVolume("v", "1Gi", "")
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "c", UID: uid}
		return v
	}
	for name, row := range map[string]struct {
		claim  *corev1.PersistentVolumeClaim
		volume *corev1.PersistentVolume
	}{
		"fitting":           {newClaim("c", "1Gi", ""), newVolume("v", "1Gi", "")},
		"named":             {naming, newVolume("v", "1Gi", "")},
		"prebound":          {newClaim("c", "1Gi", ""), prebound("")},
		"prebound by a UID": {newClaim("c", "1Gi", ""), prebound("uid-c")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.apply(only(row.volume.DeepCopy(), corev1.LabelHostname, "there"), row.claim)
			w.bound("c", "")
			w.says(w.claim("c").Message, "v", "nodeAffinity: it does not match this node", "kubernetes.io/hostname=here")

			w.apply(only(row.volume.DeepCopy(), "zone", "a"))
			w.bound("c", "")
			w.zone = "a" // the driver registers
			w.settle()
			w.bound("c", "v")
			w.zone = ""
			w.restartAndSettle()
			w.bound("c", "v")
			w.deleteClaim("c")
			if phase := w.volume("v").Phase; phase != "Released" {
				t.Errorf("phase %s", phase)
			}
			w.apply(newClaim("c", "1Gi", ""), newVolume("another", "1Gi", ""))
			w.bound("c", "v")
		})
	}
}

// TestDefaultClass: the newest default class applies.
func TestDefaultClass(t *testing.T) {
	w := newWorld(t)
	for i, name := range []string{"a", "b"} {
		class := newClass(name)
		class.Annotations = map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}
		class.CreationTimestamp = metav1.Unix(int64(i), 0)
		w.add(class)
	}
	c := newClaim("c", "1Gi", "")
	c.Spec.StorageClassName = nil
	w.apply(c, newClaim("static", "1Gi", ""))
	w.bound("c", "pvc-uid-c")
	if got := w.volume("pvc-uid-c").Class; got != "b" {
		t.Errorf("class %q", got)
	}
	w.bound("static", "")
}

// TestTwoClaims: of two claims, the first one gets the volume, and keeps it when an older claim or
// one that names the volume is added.
func TestTwoClaims(t *testing.T) {
	for _, name := range []string{"", "v"} {
		w := newWorld(t)
		w.objects.Volumes["v"] = newVolume("v", "1Gi", "")
		for _, c := range []string{"b", "c", "d"} {
			claim := newClaim(c, "1Gi", "")
			claim.Spec.VolumeName = name
			w.objects.Claims[named(c)] = claim
		}
		w.update()
		w.settle()
		w.bound("b", "v")
		w.bound("c", "")
		older := newClaim("a", "1Gi", "")
		older.Spec.VolumeName = "v"
		w.apply(older)
		w.restartAndSettle()
		w.bound("b", "v")
		w.bound("a", "")
		w.says(w.claim("a").Message, "default/b", "name another")
	}
}

func TestProvision(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
	if c := w.claim("c"); c.Phase != "Pending" || !strings.Contains(c.Message, "being provisioned") {
		t.Errorf("%+v", c)
	}
	w.settle()
	w.bound("c", "pvc-uid-c")
	if c := w.claim("c"); c.Phase != "Bound" || c.Capacity != "1Gi" || c.Message != "" {
		t.Errorf("%+v", c)
	}
	if v := w.volume("pvc-uid-c"); v.Phase != "Bound" || v.Claim != "default/c" || v.ReclaimPolicy != "Delete" {
		t.Errorf("%+v", v)
	}
	w.deleteClaim("c")
	w.checkEmpty()
	if w.claim("c") != (claim.ClaimStatus{}) || w.volume("pvc-uid-c") != (claim.VolumeStatus{}) {
		t.Errorf("removed, but in the status: %s", w.status())
	}
	if _, _, err := w.life.controller.Volume(named("c")); !errors.Is(err, plugins.ErrNotFound) {
		t.Errorf("missing claim: %v", err)
	}
}

// TestProvisionFails: a certain failure leaves no record and is reported.
func TestProvisionFails(t *testing.T) {
	w := newWorld(t)
	w.driver.fails = func(string) result { return result{skip: true, err: errors.New("no room")} }
	other := newClass("other")
	other.Provisioner = "unknown.test"
	w.add(newClass("fast"), other, newClaim("c", "1Gi", "fast"), newClaim("d", "1Gi", "other"))
	w.wait()
	again := w.sync()
	if again.IsZero() {
		t.Error("Sync returned no time for the retry")
	}
	w.says(w.claim("c").Message, "no room")
	w.says(w.claim("d").Message, "unknown.test", "no volume plugin")
	if claims := w.life.store.Claims(); len(claims) > 0 {
		t.Errorf("recorded: %v", claims)
	}
	w.driver.fails = nil
	// A changed class ends the back-off.
	changed := newClass("fast")
	changed.Parameters = map[string]string{"pool": "other"}
	w.add(changed)
	w.wait()
	w.sync()
	w.bound("c", "pvc-uid-c")
}

// TestUncertain: a claim that is removed while its volume may exist is cleaned up, also if the
// manager was killed and the driver was not registered meanwhile.
func TestUncertain(t *testing.T) {
	uncertain := &plugins.UncertainError{Err: errors.New("timeout")}
	for name, results := range map[string][]result{
		"created":     {{err: uncertain}, {skip: true, err: errors.New("not registered")}},
		"not created": {{skip: true, err: uncertain}, {skip: true, err: errors.New("not registered")}},
		"refused":     {{skip: true, err: uncertain}, {skip: true, err: &plugins.RefusedError{Err: errors.New("too large")}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.driver.fails = func(string) (r result) {
				if len(results) > 0 {
					r, results = results[0], results[1:]
				}
				return r
			}
			w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
			w.wait()
			w.removeClaim("c")
			w.restart()
			w.says(w.claim("c").Message, "may have been created")
			w.settle()
			if len(results) > 0 {
				t.Errorf("not called: %v", results)
			}
			w.checkEmpty()
		})
	}
}

// TestOtherProvisioner: a volume that one driver may have created is not requested from another
// driver, which has no record of it.
func TestOtherProvisioner(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"))
	w.driver.fails = func(string) result {
		w.kill()
		return result{err: errKilled}
	}
	w.apply(newClaim("c", "1Gi", "fast"))
	w.driver.fails = nil
	other := newClass("fast")
	other.Provisioner = otherDriver
	w.add(other)
	w.restartAndSettle()
	w.bound("c", "")
	w.says(w.claim("c").Message, "may have been created by "+driverName, otherDriver, "set it back")
	w.deleteClaim("c")
	if len(w.life.store.Claims()) != 1 {
		t.Errorf("the claim was removed: %s", w.status())
	}
	w.apply(newClass("fast"))
	w.checkEmpty()
}

// TestUncertainEdit: while the volume may exist, a larger request applies later, a smaller one at
// once.
func TestUncertainEdit(t *testing.T) {
	for size, requested := range map[string]string{"2Gi": "1Gi", "1Mi": "1Mi"} {
		w := newWorld(t)
		w.driver.fails = func(string) result {
			return result{skip: true, err: &plugins.UncertainError{Err: errors.New("timeout")}}
		}
		w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
		w.wait()
		w.driver.fails = nil
		w.apply(newClaim("c", size, "fast"))
		w.bound("c", "pvc-uid-c")
		if got := w.driver.requests[0].Claim.Spec.Resources.Requests.Storage(); got.Cmp(resource.MustParse(requested)) != 0 {
			t.Errorf("requested %s", got)
		}
		if c := w.claim("c"); c.Capacity != size {
			t.Errorf("%+v", c)
		}
	}
}

func TestWaitForFirstConsumer(t *testing.T) {
	w := newWorld(t)
	late := newClass("late")
	late.VolumeBindingMode = new(storagev1.VolumeBindingWaitForFirstConsumer)
	w.apply(late, newVolume("v", "1Gi", "late"), newClaim("c", "1Gi", "late"), newClaim("d", "1Gi", "late"))
	w.bound("c", "")
	w.says(w.claim("c").Message, "first pod")
	w.apply(newPod("p", "d"))
	w.bound("d", "v")
	w.apply(newPod("p", "c", "d"))
	w.bound("c", "pvc-uid-c")
}

func ephemeralPod(name, uid string) *corev1.Pod {
	pod := newPod(name)
	pod.UID = types.UID(uid)
	template := &corev1.PersistentVolumeClaimTemplate{Spec: newClaim("", "1Gi", "fast").Spec}
	pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: template}}}}
	return pod
}

// TestEphemeral: the claim of a generic ephemeral volume exists as long as its pod, and belongs to
// this pod only.
func TestEphemeral(t *testing.T) {
	w := newWorld(t)
	w.apply(newClass("fast"), ephemeralPod("p", "1"))
	c, v, err := w.life.controller.Volume(named("p-scratch"))
	if err != nil || !metav1.IsControlledBy(c, w.objects.Pods[named("p")]) {
		t.Fatalf("%+v, %v", c, err)
	}
	w.use(v.Name, true)
	w.apply(ephemeralPod("p", "2"))
	w.bound("p-scratch", "")
	w.says(w.claim("p-scratch").Message, "earlier claim", "in use")
	w.use(v.Name, false)
	w.settle()
	if _, now, err := w.life.controller.Volume(named("p-scratch")); err != nil || now.Name == v.Name {
		t.Errorf("volume of the new pod: %v, %v", now, err)
	}
	w.removePod("p")
	w.settle()
	w.checkEmpty()

	w.apply(newClaim("p-scratch", "1Gi", "fast"), ephemeralPod("p", "3"))
	w.bound("p-scratch", "pvc-uid-p-scratch")
	if events := w.events.List(); !slices.ContainsFunc(events, func(e event.Event) bool {
		return e.Warning && e.Object == "pod default/p" && strings.Contains(e.Message, "rename")
	}) {
		t.Errorf("no event of the conflict: %+v", events)
	}
}

// TestOtherUID: setting a UID in a manifest, as kubectl does, does not remove the claim.
func TestOtherUID(t *testing.T) {
	w := newWorld(t)
	w.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
	c := newClaim("c", "1Gi", "fast")
	c.UID = "other"
	w.apply(c)
	w.bound("c", "")
	w.says(w.claim("c").Message, "metadata.uid", "set it back")
	if w.driver.volumes["pvc-uid-c"] == nil {
		t.Fatal("its volume was deleted")
	}
	w.apply(newClaim("c", "1Gi", "fast"))
	w.bound("c", "pvc-uid-c")
	w.deleteClaim("c")
	w.apply(c)
	w.bound("c", "pvc-other")
}

// TestProtected: a removed claim stays while a pod of the manifests uses it, while its volume is in
// use, and until every manifest was read.
func TestProtected(t *testing.T) {
	w := newWorld(t)
	w.apply(newClass("fast"), newClaim("c", "1Gi", "fast"), newPod("p", "c"))
	w.use("pvc-uid-c", true)
	w.deleteClaim("c")
	w.bound("c", "pvc-uid-c")
	w.says(w.claim("c").Message, "default/p", "remove the pod")
	w.removePod("p")
	w.settle()
	if w.claim("c").Phase != "Terminating" || len(w.driver.volumes) != 1 {
		t.Errorf("in use: %s", w.status())
	}
	w.objects.Complete = false
	w.use("pvc-uid-c", false)
	w.restartAndSettle()
	if len(w.driver.volumes) != 1 {
		t.Errorf("deleted before all manifests were read: %s", w.status())
	}
	// A claim that is added again is the same claim.
	w.objects.Complete = true
	w.apply(newClaim("c", "1Gi", "fast"))
	w.bound("c", "pvc-uid-c")
	w.deleteClaim("c")
	w.checkEmpty()
}

// TestAddedAgain: a claim that is added again after the deletion of its volume has begun is a new
// claim.
func TestAddedAgain(t *testing.T) {
	w := newWorld(t)
	w.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
	first := w.driver.volumes["pvc-uid-c"]
	w.driver.fails = func(call string) result { return result{skip: call == "Delete", err: errors.New("busy")} }
	w.removeClaim("c")
	for range 3 {
		w.wait()
		w.sync()
	}
	if v := w.volume("pvc-uid-c"); v.Phase != "Failed" || !strings.Contains(v.Message, "busy") {
		t.Errorf("%+v", v)
	}
	w.add(newClaim("c", "1Gi", "fast"))
	w.restart()
	w.says(w.claim("c").Message, "waits until volume pvc-uid-c of an earlier claim with this UID")
	w.wait() // for the failing call
	w.driver.fails = nil
	w.settle()
	w.bound("c", "pvc-uid-c")
	if first.deletes != 1 || w.driver.volumes["pvc-uid-c"] == first {
		t.Errorf("deleted %d times", first.deletes)
	}
}

// TestRetain: a retained volume is bound to its claim again, or to another one that its manifest
// names.
func TestRetain(t *testing.T) {
	w := newWorld(t)
	keep := newClass("keep")
	keep.ReclaimPolicy = new(corev1.PersistentVolumeReclaimRetain)
	w.apply(keep, newClaim("c", "1Gi", "keep"))
	for range 2 {
		w.deleteClaim("c")
		w.restartAndSettle()
		if v := w.volume("pvc-uid-c"); v.Phase != "Released" || len(w.driver.volumes) != 1 {
			t.Errorf("%+v", v)
		}
		w.apply(newClaim("c", "1Gi", "keep"))
		w.bound("c", "pvc-uid-c")
	}
	w.deleteClaim("c")
	other := newClaim("other", "1Gi", "keep")
	other.Spec.VolumeName = "pvc-uid-c"
	w.apply(other)
	w.bound("other", "")
	record, err := w.life.store.Volume("pvc-uid-c")
	if err != nil {
		t.Fatal(err)
	}
	given := record.DeepCopy()
	given.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "other"}
	w.apply(given)
	w.bound("other", "pvc-uid-c")
}

// TestStaticDelete: a deleted volume that a manifest still declares is not free.
func TestStaticDelete(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &backing{size: resource.MustParse("1Gi")}
	w.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	w.bound("c", "v")
	w.deleteClaim("c")
	if len(w.driver.volumes) > 0 {
		t.Errorf("not deleted: %s", w.status())
	}
	w.apply(newClaim("d", "1Gi", ""), newClaim("c", "1Gi", ""))
	w.restartAndSettle()
	w.bound("c", "")
	w.bound("d", "")
	w.says(w.volume("v").Message, "remove its manifest")
	w.removeVolume()
	w.settle()
	if len(w.life.store.Volumes()) > 0 {
		t.Errorf("not removed: %s", w.status())
	}
	w.apply(newVolume("v", "1Gi", ""))
	w.bound("c", "v")
}

// TestPolicyChanged: if the policy is changed to Retain after deletion has begun, the remaining data
// is kept, also without the manifest.
func TestPolicyChanged(t *testing.T) {
	for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle} {
		w := newWorld(t)
		w.driver.volumes["v"] = &backing{retain: true}
		w.apply(withPolicy(newVolume("v", "1Gi", ""), policy), newClaim("c", "1Gi", ""))
		w.bound("c", "v")
		w.driver.fails = func(string) result { // killed before the call
			w.kill()
			return result{skip: true, err: errKilled}
		}
		w.deleteClaim("c")
		w.driver.fails = nil
		w.add(newVolume("v", "1Gi", ""))
		w.restartAndSettle()
		w.says(w.volume("v").Message, "was changed to Retain", "the remaining data is kept")
		w.removeVolume()
		w.settle()
		if v := w.driver.volumes["v"]; v == nil || v.scrubs > 0 || len(w.life.store.Volumes()) > 0 {
			t.Errorf("%s: the driver has %+v, %s", policy, v, w.status())
		}
	}
}

// TestDuplicate: of two PersistentVolumes of one volume, the release of one does not delete the data
// while the other is bound.
func TestDuplicate(t *testing.T) {
	w := newWorld(t)
	duplicate := newVolume("duplicate", "1Gi", "b")
	duplicate.Spec.CSI.VolumeHandle = "v"
	w.driver.volumes["v"] = &backing{}
	w.apply(withPolicy(newVolume("v", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete), duplicate, newClaim("c", "1Gi", "a"), newClaim("d", "1Gi", "b"))
	w.deleteClaim("c")
	w.restartAndSettle()
	w.says(w.volume("v").Message, "duplicate", "claim default/d")
	w.bound("d", "duplicate")
	if w.driver.volumes["v"] == nil {
		t.Error("a bound volume was deleted")
	}
	w.deleteClaim("d")
	if w.driver.volumes["v"] != nil {
		t.Errorf("not deleted: %s", w.status())
	}
}

func TestRecycle(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &backing{}
	w.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle), newClaim("c", "1Gi", ""))
	w.apply(newClaim("d", "1Gi", ""))
	w.bound("d", "")
	w.deleteClaim("c")
	w.bound("d", "v")
	if w.driver.volumes["v"].scrubs != 1 {
		t.Errorf("scrubbed %d times", w.driver.volumes["v"].scrubs)
	}
}

// TestUnsupportedPolicy: a policy that the plugin does not support is reported and not applied.
func TestUnsupportedPolicy(t *testing.T) {
	w := newWorld(t)
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle)
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
	w.apply(v, newClaim("c", "1Gi", ""))
	w.bound("c", "v")
	w.deleteClaim("c")
	if v := w.volume("v"); v.Phase != "Failed" || v.Message == "" {
		t.Errorf("%+v", v)
	}
}

// TestLost: a claim is lost while its volume's manifest is missing. The volume is not changed, and
// Volume still returns it for pods that have it mounted.
func TestLost(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &backing{}
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	w.apply(v, newClaim("c", "1Gi", ""))
	w.objects.Complete = false
	w.removeVolume()
	w.settle()
	w.bound("c", "v")
	w.objects.Complete = true
	w.update()
	w.settle()
	if c := w.claim("c"); c.Phase != "Lost" {
		t.Errorf("%+v", c)
	}
	if _, was, err := w.life.controller.Volume(named("c")); err == nil || was == nil || was.Name != "v" {
		t.Errorf("volume of a lost claim: %v, %v", was, err)
	}
	w.apply(v)
	w.bound("c", "v")
	w.removeVolume()
	w.deleteClaim("c")
	if len(w.driver.volumes) != 1 || len(w.life.store.Volumes())+len(w.life.store.Claims()) > 0 {
		t.Errorf("%v, %s", w.driver.volumes, w.status())
	}
}

// TestEdited: the source of a bound volume does not change.
func TestEdited(t *testing.T) {
	w := newWorld(t)
	w.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	other := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	other.Spec.CSI.VolumeHandle = "other"
	w.driver.volumes["other"] = &backing{}
	moved := newClaim("c", "1Gi", "elsewhere")
	w.apply(other, moved)
	if _, v, err := w.life.controller.Volume(named("c")); err != nil || v.Spec.CSI.VolumeHandle != "v" {
		t.Errorf("%v, %v", v, err)
	}
	w.says(w.volume("v").Message, "change it back")
	w.says(w.claim("c").Message, "storageClassName", "change it back")
	w.deleteClaim("c")
	if w.driver.volumes["other"] == nil {
		t.Error("another volume was deleted")
	}
}

func TestExpand(t *testing.T) {
	for _, node := range []bool{false, true} {
		w := newWorld(t)
		w.driver.node = node
		w.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
		w.apply(newClaim("c", "2Gi", "fast"))
		_, v, err := w.life.controller.Volume(named("c"))
		if err != nil || v.Spec.Capacity.Storage().String() != "2Gi" || (v.Annotations[plugins.NodeExpandAnnotation] == "true") != node {
			t.Errorf("%v, %v", v, err)
		}
		if node {
			if c := w.claim("c"); c.Capacity != "1Gi" || c.Phase != "Bound" {
				t.Errorf("before the expansion on the node: %+v", c)
			}
			w.restart()
			w.life.controller.NodeExpanded("pvc-uid-c", resource.MustParse("1Gi"))
			w.settle()
			if w.claim("c").Capacity != "1Gi" {
				t.Error("expanded although the node reported less")
			}
			w.life.controller.NodeExpanded("pvc-uid-c", resource.MustParse("2Gi"))
			w.settle()
			if _, v, err := w.life.controller.Volume(named("c")); err != nil || v.Annotations[plugins.NodeExpandAnnotation] != "" {
				t.Errorf("%v, %v", v, err)
			}
		}
		w.restart()
		if c := w.claim("c"); c.Capacity != "2Gi" || c.Message != "" {
			t.Errorf("%+v", c)
		}
		w.apply(newClaim("c", "1Gi", "fast"))
		w.bound("c", "pvc-uid-c")
		w.says(w.claim("c").Message, "less than the previous 2Gi", "set it back")
	}
}

// TestNotExpanded: a failed expansion is reported, and the claim stays bound.
func TestNotExpanded(t *testing.T) {
	w := newWorld(t)
	fixed := newClass("fixed")
	fixed.AllowVolumeExpansion = nil
	w.apply(fixed, newClass("fast"), newVolume("v", "1Gi", ""), newClaim("a", "1Gi", "fixed"), newClaim("b", "1Gi", ""), newClaim("c", "1Gi", "fast"))
	w.driver.fails = func(string) result { return result{skip: true, err: errors.New("no room")} }
	w.add(newClaim("a", "2Gi", "fixed"), newClaim("b", "2Gi", ""), newClaim("c", "2Gi", "fast"))
	w.wait()
	w.sync()
	w.says(w.claim("a").Message, "allowVolumeExpansion")
	w.says(w.claim("b").Message, "allowVolumeExpansion")
	w.says(w.claim("c").Message, "no room")
	for _, name := range []string{"a", "b", "c"} {
		if c := w.claim(name); c.Phase != "Bound" || c.Capacity != "1Gi" {
			t.Errorf("%+v", c)
		}
	}
}

func TestSource(t *testing.T) {
	w := newWorld(t)
	w.objects.Snapshots = map[types.NamespacedName]*snapshotv1.VolumeSnapshot{
		named("s"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: new("content")}}},
		named("x"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: new("content")}}},
		named("y"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: new("c")}}},
	}
	content := &snapshotv1.VolumeSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: "content"}}
	content.Spec.Driver = driverName
	content.Spec.VolumeSnapshotRef = corev1.ObjectReference{Namespace: "default", Name: "s"}
	content.Spec.Source.SnapshotHandle = new("handle")
	w.objects.SnapshotContents = map[string]*snapshotv1.VolumeSnapshotContent{"content": content}

	snapshot := func(name, of string) *corev1.PersistentVolumeClaim {
		c := newClaim(name, "1Gi", "fast")
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: new("snapshot.storage.k8s.io"), Kind: "VolumeSnapshot", Name: of}
		return c
	}
	copied := newClaim("copy", "1Gi", "fast")
	copied.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "original"}
	odd := newClaim("odd", "1Gi", "fast")
	odd.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "p"}
	w.apply(newClass("fast"), snapshot("a", "s"), snapshot("b", "x"), snapshot("c", "y"), snapshot("d", "z"), copied, odd)
	w.bound("a", "pvc-uid-a")
	w.says(w.claim("b").Message, "spec.volumeSnapshotRef")
	w.says(w.claim("c").Message, "volumeSnapshotContentName")
	w.says(w.claim("d").Message, "in no manifest")
	w.says(w.claim("odd").Message, "Pod")
	w.says(w.claim("copy").Message, "default/original")
	if got := w.driver.requests[0].Source; got.SnapshotHandle != "handle" {
		t.Errorf("%+v", got)
	}
	w.apply(newClaim("original", "1Gi", "fast"))
	w.bound("copy", "pvc-uid-copy")
	last := w.driver.requests[len(w.driver.requests)-1]
	if last.Source.Volume == nil || last.Source.Volume.Name != "pvc-uid-original" {
		t.Errorf("%+v", last.Source)
	}
}

// TestSourceRemoved: a volume is not deleted while it is being copied.
func TestSourceRemoved(t *testing.T) {
	w := newWorld(t)
	w.apply(newClass("fast"), newClaim("original", "1Gi", "fast"))
	w.driver.fails = func(call string) result {
		if call != "Provision" {
			return result{}
		}
		return result{skip: true, err: &plugins.UncertainError{Err: errors.New("still copying")}}
	}
	copied := newClaim("copy", "1Gi", "fast")
	copied.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "original"}
	w.add(copied)
	w.wait()
	w.removeClaim("original")
	w.wait()
	w.sync()
	if w.driver.volumes["pvc-uid-original"] == nil {
		t.Error("deleted while it was being copied")
	}
	w.says(w.claim("original").Message, "claim default/copy")
	w.driver.fails = nil
	w.settle()
	w.bound("copy", "pvc-uid-copy")
	if w.driver.volumes["pvc-uid-original"] != nil {
		t.Error("not deleted after the copy")
	}
}

// TestUnreadable: a claim or volume whose record cannot be read is not changed.
func TestUnreadable(t *testing.T) {
	for file, word := range map[string]string{"persistentvolumes/pvc-uid-c.json": "pvc-uid-c.json", "persistentvolumeclaims/default_c.json": "default_c.json"} {
		for _, declared := range []bool{true, false} {
			w := newWorld(t)
			w.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
			w.stop()
			if err := os.WriteFile(filepath.Join(w.dir, file), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			if !declared {
				delete(w.objects.Claims, named("c"))
			}
			w.broken = true
			w.start()
			w.settle()
			w.bound("c", "")
			if len(w.driver.volumes) != 1 {
				t.Errorf("%s: deleted", file)
			}
			if declared {
				w.says(w.claim("c").Message, word)
			}
			if b, err := os.ReadFile(filepath.Join(w.dir, file)); err != nil || string(b) != "{" {
				t.Errorf("%s: %q, %v", file, b, err)
			}
		}
	}
}
