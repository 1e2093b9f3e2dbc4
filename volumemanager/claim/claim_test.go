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

// checkBound fails the test if a claim is not bound to the volume. If volume is "", the claim must be
// unbound.
func (f *fixture) checkBound(name, volume string) {
	f.t.Helper()
	c, v, err := f.manager.controller.Volume(named(name))
	if volume == "" {
		if err == nil {
			f.t.Errorf("claim %s is bound to volume %s, want it unbound", name, v.Name)
		}
		return
	}
	if err != nil {
		f.t.Errorf("claim %s is not bound, want volume %s: %v", name, volume, err)
		return
	}
	if v.Name != volume || c.Spec.VolumeName != volume || v.Spec.ClaimRef.UID != c.UID {
		f.t.Errorf("claim %s: got volume %s, want %s; the claim names volume %s, the volume has the claim UID %s", name, v.Name, volume, c.Spec.VolumeName, v.Spec.ClaimRef.UID)
	}
}

// checkMessage fails the test if a message lacks one of the words.
func (f *fixture) checkMessage(message string, words ...string) {
	f.t.Helper()
	for _, word := range words {
		if !strings.Contains(message, word) {
			f.t.Errorf("message %q does not contain %q", message, word)
		}
	}
}

// checkEmpty fails the test if the driver has volumes or the store has records.
func (f *fixture) checkEmpty() {
	f.t.Helper()
	if len(f.driver.volumes)+len(f.manager.store.Claims())+len(f.manager.store.Volumes()) > 0 {
		f.t.Errorf("got volumes of the driver %v, records %s; want none", f.driver.volumes, f.status())
	}
}

// TestBinding: a claim is bound to the same volume as in Kubernetes, also after a restart. If no volume
// matches, the claim's message says why.
func TestBinding(t *testing.T) {
	prebound := newVolume("v", "1Gi", "slow")
	prebound.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "c"}
	reserved := newVolume("v", "1Gi", "")
	reserved.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "other"}
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
		want    string // the volume of the claim; "" if the claim stays unbound
		message string // a part of the claim's message
	}{
		"smallest volume that is large enough":     {newClaim("c", "2Gi", ""), []*corev1.PersistentVolume{newVolume("a", "9Gi", ""), newVolume("b", "3Gi", ""), newVolume("d", "1Gi", "")}, "b", ""},
		"first of equal volumes by name":           {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{newVolume("b", "1Gi", ""), newVolume("a", "1Gi", "")}, "a", ""},
		"volumeName":                               {naming, []*corev1.PersistentVolume{newVolume("a", "1Gi", ""), newVolume("b", "3Gi", "")}, "b", ""},
		"volumeName of a missing volume":           {naming, []*corev1.PersistentVolume{newVolume("a", "1Gi", "")}, "", `"b": no such volume`},
		"volumeName of a volume that is too small": {naming, []*corev1.PersistentVolume{newVolume("b", "1Mi", "")}, "", "capacity 1Mi is less than 1Gi"},
		"claimRef with the claim's name":           {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{prebound, newVolume("a", "1Gi", "")}, "v", ""},
		"claimRef with another claim":              {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{reserved}, "", "is free"},
		"other class":                              {newClaim("c", "1Gi", "fast"), []*corev1.PersistentVolume{newVolume("v", "1Gi", "")}, "", `StorageClass "fast" is in no manifest`},
		"same class":                               {newClaim("c", "1Gi", "fast"), []*corev1.PersistentVolume{newVolume("v", "1Gi", "fast")}, "v", ""},
		"other volumeMode":                         {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{block}, "", "volumeMode Block is not Filesystem"},
		"other accessModes":                        {many, []*corev1.PersistentVolume{newVolume("v", "1Gi", "")}, "", "ReadWriteMany"},
		"matching selector":                        {selecting, []*corev1.PersistentVolume{newVolume("a", "1Gi", ""), labelled}, "v", ""},
		"selector without a match":                 {selecting, []*corev1.PersistentVolume{newVolume("a", "1Gi", "")}, "", "disk=ssd"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			for _, v := range row.volumes {
				f.add(v)
			}
			f.apply(row.claim)
			f.checkBound("c", row.want)
			f.checkMessage(f.claim("c").Message, row.message)
			f.restart()
			f.checkBound("c", row.want)
		})
	}
}

// withAffinity restricts a volume to machines with a label.
func withAffinity(v *corev1.PersistentVolume, label, value string) *corev1.PersistentVolume {
	requirement := corev1.NodeSelectorRequirement{Key: label, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{requirement}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}}
	return v
}

// TestAffinity: no claim is bound to a volume whose nodeAffinity does not match the machine, even if
// the claim names the volume or the volume names the claim. A bound claim keeps its volume.
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
		"neither names the other":    {newClaim("c", "1Gi", ""), newVolume("v", "1Gi", "")},
		"claim names volume":         {naming, newVolume("v", "1Gi", "")},
		"volume names claim":         {newClaim("c", "1Gi", ""), prebound("")},
		"volume names claim and UID": {newClaim("c", "1Gi", ""), prebound("uid-c")},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.apply(withAffinity(row.volume.DeepCopy(), corev1.LabelHostname, "there"), row.claim)
			f.checkBound("c", "")
			f.checkMessage(f.claim("c").Message, "v", "nodeAffinity does not match this node", "kubernetes.io/hostname=here")

			f.apply(withAffinity(row.volume.DeepCopy(), "zone", "a"))
			f.checkBound("c", "")
			f.zone = "a" // the driver registers
			f.settle()
			f.checkBound("c", "v")
			f.zone = ""
			f.restartAndSettle()
			f.checkBound("c", "v")
			f.deleteClaim("c")
			if phase := f.volume("v").Phase; phase != "Released" {
				t.Errorf("phase of the volume: got %s, want Released", phase)
			}
			f.apply(newClaim("c", "1Gi", ""), newVolume("another", "1Gi", ""))
			f.checkBound("c", "v")
		})
	}
}

// TestDefaultClass: the newest default class applies to a claim without a class, but not to a claim with
// an empty class.
func TestDefaultClass(t *testing.T) {
	f := newFixture(t)
	for i, name := range []string{"a", "b"} {
		class := newClass(name)
		class.Annotations = map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}
		class.CreationTimestamp = metav1.Unix(int64(i), 0)
		f.add(class)
	}
	c := newClaim("c", "1Gi", "")
	c.Spec.StorageClassName = nil
	f.apply(c, newClaim("static", "1Gi", ""))
	f.checkBound("c", "pvc-uid-c")
	if got := f.volume("pvc-uid-c").StorageClass; got != "b" {
		t.Errorf("class of the volume: got %q, want b, the newest default class", got)
	}
	f.checkBound("static", "")
}

// TestTwoClaims: if several claims match a volume, the first by name gets the volume, and keeps it when
// another claim is added that precedes it by name and names the volume.
func TestTwoClaims(t *testing.T) {
	for _, volumeName := range []string{"", "v"} {
		f := newFixture(t)
		f.objects.Volumes["v"] = newVolume("v", "1Gi", "")
		for _, c := range []string{"b", "c", "d"} {
			claim := newClaim(c, "1Gi", "")
			claim.Spec.VolumeName = volumeName
			f.objects.Claims[named(c)] = claim
		}
		f.update()
		f.settle()
		f.checkBound("b", "v")
		f.checkBound("c", "")
		later := newClaim("a", "1Gi", "")
		later.Spec.VolumeName = "v"
		f.apply(later)
		f.restartAndSettle()
		f.checkBound("b", "v")
		f.checkBound("a", "")
		f.checkMessage(f.claim("a").Message, "default/b", "name another")
	}
}

// TestProvision: a volume is provisioned for a claim, and deleted after the claim is removed.
func TestProvision(t *testing.T) {
	f := newFixture(t)
	f.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
	if c := f.claim("c"); c.Phase != "Pending" || !strings.Contains(c.Message, "being provisioned") {
		t.Errorf("claim during the provisioning: got %+v, want phase Pending and a message", c)
	}
	f.settle()
	f.checkBound("c", "pvc-uid-c")
	if c := f.claim("c"); c.Phase != "Bound" || c.SizeBytes != 1<<30 || c.Message != "" {
		t.Errorf("claim after the provisioning: got %+v, want it Bound with 1Gi and no message", c)
	}
	if v := f.volume("pvc-uid-c"); v.Phase != "Bound" || v.Claim != "default/c" || v.ReclaimPolicy != "Delete" {
		t.Errorf("volume after the provisioning: got %+v, want it Bound to default/c with policy Delete", v)
	}
	f.deleteClaim("c")
	f.checkEmpty()
	if f.claim("c") != (claim.ClaimStatus{}) || f.volume("pvc-uid-c") != (claim.VolumeStatus{}) {
		t.Errorf("the status still contains the removed claim or its volume: %s", f.status())
	}
	if _, _, err := f.manager.controller.Volume(named("c")); !errors.Is(err, plugins.ErrNotFound) {
		t.Errorf("missing claim: got error %v, want %v", err, plugins.ErrNotFound)
	}
}

// TestProvisionFails: after a failure that certainly created no volume, the claim has a message and no
// record. A changed class ends the back-off.
func TestProvisionFails(t *testing.T) {
	f := newFixture(t)
	f.driver.fails = func(string) result { return result{skip: true, err: errors.New("no room")} }
	other := newClass("other")
	other.Provisioner = "unknown.test"
	f.add(newClass("fast"), other, newClaim("c", "1Gi", "fast"), newClaim("d", "1Gi", "other"))
	f.wait()
	again := f.sync()
	if again.IsZero() {
		t.Error("Sync returned a zero time, want the time of the retry")
	}
	f.checkMessage(f.claim("c").Message, "no room")
	f.checkMessage(f.claim("d").Message, "unknown.test", "no volume plugin")
	if claims := f.manager.store.Claims(); len(claims) > 0 {
		t.Errorf("recorded claims: got %v, want none", claims)
	}
	f.driver.fails = nil
	changed := newClass("fast")
	changed.Parameters = map[string]string{"pool": "other"}
	f.add(changed)
	f.wait()
	f.sync()
	f.checkBound("c", "pvc-uid-c")
}

// TestUncertain: if a claim is removed while its volume may exist, the claim and a created volume are
// deleted, even if the manager is restarted and the driver is not registered in the meantime.
func TestUncertain(t *testing.T) {
	uncertain := &plugins.UncertainError{Err: errors.New("timeout")}
	for name, results := range map[string][]result{ // the results of the first calls
		"created":     {{err: uncertain}, {skip: true, err: errors.New("not registered")}},
		"not created": {{skip: true, err: uncertain}, {skip: true, err: errors.New("not registered")}},
		"refused":     {{skip: true, err: uncertain}, {skip: true, err: &plugins.RefusedError{Err: errors.New("too large")}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.driver.fails = func(string) (r result) {
				if len(results) > 0 {
					r, results = results[0], results[1:]
				}
				return r
			}
			f.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
			f.wait()
			f.removeClaim("c")
			f.restart()
			f.checkMessage(f.claim("c").Message, "may have been created")
			f.settle()
			if len(results) > 0 {
				t.Errorf("%d expected calls were not made", len(results))
			}
			f.checkEmpty()
		})
	}
}

// TestOtherProvisioner: while one driver may have created a claim's volume, no other driver is called.
func TestOtherProvisioner(t *testing.T) {
	f := newFixture(t)
	f.add(newClass("fast"))
	f.driver.fails = func(string) result {
		f.kill()
		return result{err: errKilled}
	}
	f.apply(newClaim("c", "1Gi", "fast"))
	f.driver.fails = nil
	other := newClass("fast")
	other.Provisioner = otherDriver
	f.add(other)
	f.restartAndSettle()
	f.checkBound("c", "")
	f.checkMessage(f.claim("c").Message, "may have been created by "+driverName, otherDriver, "set it back")
	f.deleteClaim("c")
	if len(f.manager.store.Claims()) != 1 {
		t.Errorf("the record of the claim was removed although its volume may exist: %s", f.status())
	}
	f.apply(newClass("fast"))
	f.checkEmpty()
}

// TestUncertainEdit: if the claim's request is edited while its volume may exist, CreateVolume is
// repeated with the earlier size if the new one is larger, and with the new size if it is smaller.
func TestUncertainEdit(t *testing.T) {
	for newSize, wantRequest := range map[string]string{"2Gi": "1Gi", "1Mi": "1Mi"} {
		f := newFixture(t)
		f.driver.fails = func(string) result {
			return result{skip: true, err: &plugins.UncertainError{Err: errors.New("timeout")}}
		}
		f.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
		f.wait()
		f.driver.fails = nil
		f.apply(newClaim("c", newSize, "fast"))
		f.checkBound("c", "pvc-uid-c")
		if got := f.driver.requests[0].Claim.Spec.Resources.Requests.Storage(); got.Cmp(resource.MustParse(wantRequest)) != 0 {
			t.Errorf("claim edited to %s: got a request of %s, want %s", newSize, got, wantRequest)
		}
		if c, want := f.claim("c"), resource.MustParse(newSize); c.SizeBytes != want.Value() {
			t.Errorf("got claim %+v, want capacity %s", c, newSize)
		}
	}
}

// TestWaitForFirstConsumer: a claim whose class has volumeBindingMode WaitForFirstConsumer is bound, or its
// volume is provisioned, when a pod uses the claim.
func TestWaitForFirstConsumer(t *testing.T) {
	f := newFixture(t)
	late := newClass("late")
	late.VolumeBindingMode = new(storagev1.VolumeBindingWaitForFirstConsumer)
	f.apply(late, newVolume("v", "1Gi", "late"), newClaim("c", "1Gi", "late"), newClaim("d", "1Gi", "late"))
	f.checkBound("c", "")
	f.checkMessage(f.claim("c").Message, "first pod")
	f.apply(newPod("p", "d"))
	f.checkBound("d", "v")
	f.apply(newPod("p", "c", "d"))
	f.checkBound("c", "pvc-uid-c")
}

// ephemeralPod returns a pod with the generic ephemeral volume scratch.
func ephemeralPod(name, uid string) *corev1.Pod {
	pod := newPod(name)
	pod.UID = types.UID(uid)
	template := &corev1.PersistentVolumeClaimTemplate{Spec: newClaim("", "1Gi", "fast").Spec}
	pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: template}}}}
	return pod
}

// TestEphemeral: the claim of a generic ephemeral volume exists as long as its pod. Another pod of the same
// name gets another claim. A claim of a manifest with the same name stays, and the pod gets a warning.
func TestEphemeral(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), ephemeralPod("p", "1"))
	c, v, err := f.manager.controller.Volume(named("p-scratch"))
	if err != nil || !metav1.IsControlledBy(c, f.objects.Pods[named("p")]) {
		t.Fatalf("got claim %+v, error %v; want a claim that the pod controls", c, err)
	}
	f.setInUse(v.Name, true)
	f.apply(ephemeralPod("p", "2"))
	f.checkBound("p-scratch", "")
	f.checkMessage(f.claim("p-scratch").Message, "earlier claim", "in use")
	f.setInUse(v.Name, false)
	f.settle()
	if _, now, err := f.manager.controller.Volume(named("p-scratch")); err != nil || now.Name == v.Name {
		t.Errorf("volume of the new pod: got %v, error %v; want a new volume", now, err)
	}
	f.removePod("p")
	f.settle()
	f.checkEmpty()

	f.apply(newClaim("p-scratch", "1Gi", "fast"), ephemeralPod("p", "3"))
	f.checkBound("p-scratch", "pvc-uid-p-scratch")
	if events := f.events.List(); !slices.ContainsFunc(events, func(e event.Event) bool {
		return e.Warning && e.Object == "pod default/p" && strings.Contains(e.Message, "rename")
	}) {
		t.Errorf("got events %+v, want a warning about the conflict of claim names", events)
	}
}

// TestOtherUID: a UID that is added to a claim's manifest, for example with the output of kubectl, does not
// remove the existing claim.
func TestOtherUID(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
	c := newClaim("c", "1Gi", "fast")
	c.UID = "other"
	f.apply(c)
	f.checkBound("c", "")
	f.checkMessage(f.claim("c").Message, "metadata.uid", "set the UID back")
	if f.driver.volumes["pvc-uid-c"] == nil {
		t.Fatal("the volume of the existing claim was deleted")
	}
	f.apply(newClaim("c", "1Gi", "fast"))
	f.checkBound("c", "pvc-uid-c")
	f.deleteClaim("c")
	f.apply(c)
	f.checkBound("c", "pvc-other")
}

// TestProtected: a removed claim stays while a pod of the manifests uses it, while its volume is in
// use, and until every manifest was read.
func TestProtected(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"), newPod("p", "c"))
	f.setInUse("pvc-uid-c", true)
	f.deleteClaim("c")
	f.checkBound("c", "pvc-uid-c")
	f.checkMessage(f.claim("c").Message, "default/p", "remove the pod")
	f.removePod("p")
	f.settle()
	if f.claim("c").Phase != "Terminating" || len(f.driver.volumes) != 1 {
		t.Errorf("while the volume is in use: got %s, want the claim Terminating, and the volume in the driver", f.status())
	}
	f.objects.Complete = false
	f.setInUse("pvc-uid-c", false)
	f.restartAndSettle()
	if len(f.driver.volumes) != 1 {
		t.Errorf("the volume was deleted before all manifests were read: %s", f.status())
	}
	// A claim that is added again is the same claim.
	f.objects.Complete = true
	f.apply(newClaim("c", "1Gi", "fast"))
	f.checkBound("c", "pvc-uid-c")
	f.deleteClaim("c")
	f.checkEmpty()
}

// TestAddedAgain: a claim that is added again after the deletion of its volume has begun is a new
// claim.
func TestAddedAgain(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
	first := f.driver.volumes["pvc-uid-c"]
	f.driver.fails = func(call string) result { return result{skip: call == "Delete", err: errors.New("busy")} }
	f.removeClaim("c")
	for range 3 {
		f.wait()
		f.sync()
	}
	if v := f.volume("pvc-uid-c"); v.Phase != "Failed" || !strings.Contains(v.Message, "busy") {
		t.Errorf("volume after failed deletions: got %+v, want phase Failed and the error", v)
	}
	f.add(newClaim("c", "1Gi", "fast"))
	f.restart()
	f.checkMessage(f.claim("c").Message, "waits until volume pvc-uid-c of an earlier claim with this UID")
	f.wait() // until the failing call has ended
	f.driver.fails = nil
	f.settle()
	f.checkBound("c", "pvc-uid-c")
	if first.deletes != 1 || f.driver.volumes["pvc-uid-c"] == first {
		t.Errorf("the first volume was deleted %d times, want once, and replaced with a new one", first.deletes)
	}
}

// TestRetain: a retained volume is bound to its earlier claim again, or to another claim that the
// volume's manifest names.
func TestRetain(t *testing.T) {
	f := newFixture(t)
	keep := newClass("keep")
	keep.ReclaimPolicy = new(corev1.PersistentVolumeReclaimRetain)
	f.apply(keep, newClaim("c", "1Gi", "keep"))
	for range 2 {
		f.deleteClaim("c")
		f.restartAndSettle()
		if v := f.volume("pvc-uid-c"); v.Phase != "Released" || len(f.driver.volumes) != 1 {
			t.Errorf("volume without its claim: got %+v, %d volumes in the driver; want it Released and in the driver", v, len(f.driver.volumes))
		}
		f.apply(newClaim("c", "1Gi", "keep"))
		f.checkBound("c", "pvc-uid-c")
	}
	f.deleteClaim("c")
	other := newClaim("other", "1Gi", "keep")
	other.Spec.VolumeName = "pvc-uid-c"
	f.apply(other)
	f.checkBound("other", "")
	record, err := f.manager.store.Volume("pvc-uid-c")
	if err != nil {
		t.Fatal(err)
	}
	declared := record.DeepCopy()
	declared.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "other"}
	f.apply(declared)
	f.checkBound("other", "pvc-uid-c")
}

// TestStaticDelete: a deleted volume that a manifest still declares is not bound to another claim.
func TestStaticDelete(t *testing.T) {
	f := newFixture(t)
	f.driver.volumes["v"] = &driverVolume{size: resource.MustParse("1Gi")}
	f.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	f.checkBound("c", "v")
	f.deleteClaim("c")
	if len(f.driver.volumes) > 0 {
		t.Errorf("the driver's volume was not deleted: %s", f.status())
	}
	f.apply(newClaim("d", "1Gi", ""), newClaim("c", "1Gi", ""))
	f.restartAndSettle()
	f.checkBound("c", "")
	f.checkBound("d", "")
	f.checkMessage(f.volume("v").Message, "remove its manifest")
	f.removeVolume()
	f.settle()
	if len(f.manager.store.Volumes()) > 0 {
		t.Errorf("the record of the volume was not removed: %s", f.status())
	}
	f.apply(newVolume("v", "1Gi", ""))
	f.checkBound("c", "v")
}

// TestPolicyChanged: if the policy is changed to Retain after deletion has begun, the remaining data
// is kept, even after the volume's manifest is removed.
func TestPolicyChanged(t *testing.T) {
	for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle} {
		f := newFixture(t)
		f.driver.volumes["v"] = &driverVolume{retain: true}
		f.apply(withPolicy(newVolume("v", "1Gi", ""), policy), newClaim("c", "1Gi", ""))
		f.checkBound("c", "v")
		f.driver.fails = func(string) result { // killed before the call
			f.kill()
			return result{skip: true, err: errKilled}
		}
		f.deleteClaim("c")
		f.driver.fails = nil
		f.add(newVolume("v", "1Gi", ""))
		f.restartAndSettle()
		f.checkMessage(f.volume("v").Message, "was changed to Retain", "the remaining data is kept")
		f.removeVolume()
		f.settle()
		if v := f.driver.volumes["v"]; v == nil || v.scrubs > 0 || len(f.manager.store.Volumes()) > 0 {
			t.Errorf("policy changed from %s: got driver volume %+v, records %s; want the volume unchanged and no records", policy, v, f.status())
		}
	}
}

// TestDuplicate: if two PersistentVolumes have the same source, the release of one does not delete the
// data while the other is bound.
func TestDuplicate(t *testing.T) {
	f := newFixture(t)
	duplicate := newVolume("duplicate", "1Gi", "b")
	duplicate.Spec.CSI.VolumeHandle = "v"
	f.driver.volumes["v"] = &driverVolume{}
	f.apply(withPolicy(newVolume("v", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete), duplicate, newClaim("c", "1Gi", "a"), newClaim("d", "1Gi", "b"))
	f.deleteClaim("c")
	f.restartAndSettle()
	f.checkMessage(f.volume("v").Message, "duplicate", "claim default/d")
	f.checkBound("d", "duplicate")
	if f.driver.volumes["v"] == nil {
		t.Error("a bound volume was deleted")
	}
	f.deleteClaim("d")
	if f.driver.volumes["v"] != nil {
		t.Errorf("the driver's volume was not deleted after both releases: %s", f.status())
	}
}

// TestRecycle: a volume with the policy Recycle is scrubbed before it is bound to another claim.
func TestRecycle(t *testing.T) {
	f := newFixture(t)
	f.driver.volumes["v"] = &driverVolume{}
	f.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle), newClaim("c", "1Gi", ""))
	f.apply(newClaim("d", "1Gi", ""))
	f.checkBound("d", "")
	f.deleteClaim("c")
	f.checkBound("d", "v")
	if f.driver.volumes["v"].scrubs != 1 {
		t.Errorf("the volume was scrubbed %d times, want once", f.driver.volumes["v"].scrubs)
	}
}

// TestBoundElsewhere: the binding to a volume is interrupted, and the claim is bound to another volume
// while the first one has no manifest. The first volume becomes available to other claims with its data.
func TestBoundElsewhere(t *testing.T) {
	f := newFixture(t)
	f.driver.volumes["v"] = &driverVolume{}
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	f.killAt(2) // between the writes of the volume and of the claim
	f.apply(v, newClaim("c", "1Gi", ""))
	f.removeVolume()
	f.setInUse("v", true) // so that its record stays
	f.add(newVolume("other", "1Gi", ""))
	f.restartAndSettle()
	f.checkBound("c", "other")
	f.setInUse("v", false)
	f.apply(v)
	if got := f.volume("v"); got.Phase != "Available" || got.Claim != "" || f.driver.volumes["v"] == nil {
		t.Errorf("the volume that the claim does not name: got %+v, volumes of the driver %v; want it Available with its data", got, f.driver.volumes)
	}
	f.checkBound("c", "other")
	f.deleteClaim("c")
	f.apply(newClaim("c", "1Gi", ""))
	f.checkBound("c", "other")
	f.apply(newClaim("d", "1Gi", ""))
	f.checkBound("d", "v")
}

// TestProvisionedBoundElsewhere: a volume that was provisioned for a claim is deleted if the claim's
// record names another volume.
func TestProvisionedBoundElsewhere(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
	f.checkBound("c", "pvc-uid-c")
	record, err := f.manager.store.Claim(named("c"))
	if err != nil {
		t.Fatal(err)
	}
	edited := record.DeepCopy()
	edited.Spec.VolumeName = "other"
	if err := f.manager.store.PutClaim(edited); err != nil {
		t.Fatal(err)
	}
	f.apply(newVolume("other", "1Gi", "fast"))
	f.checkBound("c", "other")
	if len(f.driver.volumes) > 0 || f.volume("pvc-uid-c").Name != "" {
		t.Errorf("the provisioned volume was not deleted: %s", f.status())
	}
}

// TestUnsupportedPolicy: a policy that the plugin does not support is reported and not applied.
func TestUnsupportedPolicy(t *testing.T) {
	f := newFixture(t)
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle)
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
	f.apply(v, newClaim("c", "1Gi", ""))
	f.checkBound("c", "v")
	f.deleteClaim("c")
	if v := f.volume("v"); v.Phase != "Failed" || v.Message == "" {
		t.Errorf("got volume %+v, want phase Failed and a message", v)
	}
}

// TestLost: a claim is Lost while its volume's manifest is missing. Volume still returns the volume, with an
// error, for pods that have it mounted. If the claim is removed too, the driver's volume is kept.
func TestLost(t *testing.T) {
	f := newFixture(t)
	f.driver.volumes["v"] = &driverVolume{}
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	f.apply(v, newClaim("c", "1Gi", ""))
	f.objects.Complete = false
	f.removeVolume()
	f.settle()
	f.checkBound("c", "v")
	f.objects.Complete = true
	f.update()
	f.settle()
	if c := f.claim("c"); c.Phase != "Lost" {
		t.Errorf("got claim %+v, want phase Lost", c)
	}
	if _, was, err := f.manager.controller.Volume(named("c")); err == nil || was == nil || was.Name != "v" {
		t.Errorf("volume of a lost claim: got %v, error %v; want v and an error", was, err)
	}
	f.apply(v)
	f.checkBound("c", "v")
	f.removeVolume()
	f.deleteClaim("c")
	if len(f.driver.volumes) != 1 || len(f.manager.store.Volumes())+len(f.manager.store.Claims()) > 0 {
		t.Errorf("got volumes of the driver %v, records %s; want the volume kept and no records", f.driver.volumes, f.status())
	}
}

// TestEdited: changes to the source of a bound volume and to the class of a bound claim have no effect and
// are reported.
func TestEdited(t *testing.T) {
	f := newFixture(t)
	f.apply(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	other := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	other.Spec.CSI.VolumeHandle = "other"
	f.driver.volumes["other"] = &driverVolume{}
	f.apply(other, newClaim("c", "1Gi", "elsewhere"))
	if _, v, err := f.manager.controller.Volume(named("c")); err != nil || v.Spec.CSI.VolumeHandle != "v" {
		t.Errorf("got volume %v, error %v; want the handle v", v, err)
	}
	f.checkMessage(f.volume("v").Message, "change the source back")
	f.checkMessage(f.claim("c").Message, "storageClassName", "change it back")
	f.deleteClaim("c")
	if f.driver.volumes["other"] == nil {
		t.Error("the volume of the changed source was deleted")
	}
}

// TestExpand: the volume of a bound claim is expanded by the driver and then, if the driver says so, on the
// node. The claim's capacity changes last. A volume cannot shrink.
func TestExpand(t *testing.T) {
	for _, node := range []bool{false, true} {
		f := newFixture(t)
		f.driver.node = node
		f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
		f.apply(newClaim("c", "2Gi", "fast"))
		_, v, err := f.manager.controller.Volume(named("c"))
		if err != nil || v.Spec.Capacity.Storage().String() != "2Gi" || (v.Annotations[plugins.NodeExpandAnnotation] == "true") != node {
			t.Errorf("after the expansion by the driver: got volume %v, error %v; want capacity 2Gi, node expansion needed %t", v, err, node)
		}
		if node {
			if c := f.claim("c"); c.SizeBytes != 1<<30 || c.Phase != "Bound" {
				t.Errorf("before the expansion on the node: got claim %+v, want it Bound with 1Gi", c)
			}
			f.restart()
			f.manager.controller.NodeExpanded("pvc-uid-c", resource.MustParse("1Gi"))
			f.settle()
			if f.claim("c").SizeBytes != 1<<30 {
				t.Error("the claim's capacity has changed although the node reported only 1Gi")
			}
			f.manager.controller.NodeExpanded("pvc-uid-c", resource.MustParse("2Gi"))
			f.settle()
			if _, v, err := f.manager.controller.Volume(named("c")); err != nil || v.Annotations[plugins.NodeExpandAnnotation] != "" {
				t.Errorf("after the expansion on the node: got volume %v, error %v; want no annotation %s", v, err, plugins.NodeExpandAnnotation)
			}
		}
		f.restart()
		if c := f.claim("c"); c.SizeBytes != 2<<30 || c.Message != "" {
			t.Errorf("got claim %+v, want capacity 2Gi and no message", c)
		}
		f.apply(newClaim("c", "1Gi", "fast"))
		f.checkBound("c", "pvc-uid-c")
		f.checkMessage(f.claim("c").Message, "less than the previous 2Gi", "set it back")
	}
}

// TestNotExpanded: a failed expansion is reported, and the claim stays bound.
func TestNotExpanded(t *testing.T) {
	f := newFixture(t)
	fixed := newClass("fixed")
	fixed.AllowVolumeExpansion = nil
	f.apply(fixed, newClass("fast"), newVolume("v", "1Gi", ""), newClaim("a", "1Gi", "fixed"), newClaim("b", "1Gi", ""), newClaim("c", "1Gi", "fast"))
	f.driver.fails = func(string) result { return result{skip: true, err: errors.New("no room")} }
	f.add(newClaim("a", "2Gi", "fixed"), newClaim("b", "2Gi", ""), newClaim("c", "2Gi", "fast"))
	f.wait()
	f.sync()
	f.checkMessage(f.claim("a").Message, "allowVolumeExpansion")
	f.checkMessage(f.claim("b").Message, "allowVolumeExpansion")
	f.checkMessage(f.claim("c").Message, "no room")
	for _, name := range []string{"a", "b", "c"} {
		if c := f.claim(name); c.Phase != "Bound" || c.SizeBytes != 1<<30 {
			t.Errorf("got claim %+v, want it Bound with 1Gi", c)
		}
	}
}

// TestSource: a claim's data source, a VolumeSnapshot or another claim, is passed to the driver. The message
// of a claim says why its source cannot be copied.
func TestSource(t *testing.T) {
	f := newFixture(t)
	f.objects.Snapshots = map[types.NamespacedName]*snapshotv1.VolumeSnapshot{
		named("s"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: new("content")}}},
		named("x"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: new("content")}}},
		named("y"): {Spec: snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: new("c")}}},
	}
	content := &snapshotv1.VolumeSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: "content"}}
	content.Spec.Driver = driverName
	content.Spec.VolumeSnapshotRef = corev1.ObjectReference{Namespace: "default", Name: "s"}
	content.Spec.Source.SnapshotHandle = new("handle")
	f.objects.SnapshotContents = map[string]*snapshotv1.VolumeSnapshotContent{"content": content}

	ofSnapshot := func(name, snapshot string) *corev1.PersistentVolumeClaim {
		c := newClaim(name, "1Gi", "fast")
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: new("snapshot.storage.k8s.io"), Kind: "VolumeSnapshot", Name: snapshot}
		return c
	}
	copied := newClaim("copy", "1Gi", "fast")
	copied.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "original"}
	ofPod := newClaim("of-pod", "1Gi", "fast")
	ofPod.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "p"}
	f.apply(newClass("fast"), ofSnapshot("a", "s"), ofSnapshot("b", "x"), ofSnapshot("c", "y"), ofSnapshot("d", "z"), copied, ofPod)
	f.checkBound("a", "pvc-uid-a")
	f.checkMessage(f.claim("b").Message, "spec.volumeSnapshotRef")
	f.checkMessage(f.claim("c").Message, "volumeSnapshotContentName")
	f.checkMessage(f.claim("d").Message, "in no manifest")
	f.checkMessage(f.claim("of-pod").Message, "Pod")
	f.checkMessage(f.claim("copy").Message, "default/original")
	if got := f.driver.requests[0].Source; got.SnapshotHandle != "handle" {
		t.Errorf("source of the first call: got %+v, want snapshot handle", got)
	}
	f.apply(newClaim("original", "1Gi", "fast"))
	f.checkBound("copy", "pvc-uid-copy")
	last := f.driver.requests[len(f.driver.requests)-1]
	if last.Source.Volume == nil || last.Source.Volume.Name != "pvc-uid-original" {
		t.Errorf("source of the last call: got %+v, want volume pvc-uid-original", last.Source)
	}
}

// TestSourceRemoved: a volume is not deleted while it is being copied.
func TestSourceRemoved(t *testing.T) {
	f := newFixture(t)
	f.apply(newClass("fast"), newClaim("original", "1Gi", "fast"))
	f.driver.fails = func(call string) result {
		if call != "Provision" {
			return result{}
		}
		return result{skip: true, err: &plugins.UncertainError{Err: errors.New("still copying")}}
	}
	copied := newClaim("copy", "1Gi", "fast")
	copied.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "original"}
	f.add(copied)
	f.wait()
	f.removeClaim("original")
	f.wait()
	f.sync()
	if f.driver.volumes["pvc-uid-original"] == nil {
		t.Error("the source volume was deleted while it was being copied")
	}
	f.checkMessage(f.claim("original").Message, "claim default/copy")
	f.driver.fails = nil
	f.settle()
	f.checkBound("copy", "pvc-uid-copy")
	if f.driver.volumes["pvc-uid-original"] != nil {
		t.Error("the source volume was not deleted after it had been copied")
	}
}

// TestUnreadable: a claim or volume whose record cannot be read is not changed.
func TestUnreadable(t *testing.T) {
	for _, file := range []string{"persistentvolumes/pvc-uid-c.json", "persistentvolumeclaims/default_c.json"} {
		for _, declared := range []bool{true, false} {
			f := newFixture(t)
			f.apply(newClass("fast"), newClaim("c", "1Gi", "fast"))
			f.stop()
			if err := os.WriteFile(filepath.Join(f.dir, file), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			if !declared {
				delete(f.objects.Claims, named("c"))
			}
			f.broken = true
			f.start()
			f.settle()
			f.checkBound("c", "")
			if len(f.driver.volumes) != 1 {
				t.Errorf("%s is unreadable: the volume was deleted from the driver", file)
			}
			if declared {
				f.checkMessage(f.claim("c").Message, filepath.Base(file))
			}
			if b, err := os.ReadFile(filepath.Join(f.dir, file)); err != nil || string(b) != "{" {
				t.Errorf("content of %s: got %q, error %v; want it unchanged", file, b, err)
			}
		}
	}
}
