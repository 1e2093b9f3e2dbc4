package claim_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// bound fails a test in which a claim has not this volume; "" is none.
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
		w.t.Errorf("claim %s has %s, and is to have %s", name, v.Name, volume)
	}
}

// says fails a test in which a message lacks words.
func (w *world) says(message string, words ...string) {
	w.t.Helper()
	for _, word := range words {
		if !strings.Contains(message, word) {
			w.t.Errorf("message %q has no %q", message, word)
		}
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
		"named is not there": {naming, []*corev1.PersistentVolume{newVolume("a", "1Gi", "")}, "", `"b": no such volume`},
		"named is too small": {naming, []*corev1.PersistentVolume{newVolume("b", "1Mi", "")}, "", "capacity 1Mi is less than 1Gi"},
		"prebound":           {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{prebound, newVolume("a", "1Gi", "")}, "v", ""},
		"another's":          {newClaim("c", "1Gi", ""), []*corev1.PersistentVolume{others}, "", "is free"},
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
			w.add(row.claim)
			w.settle()
			w.bound("c", row.want)
			w.says(w.claim("c").Message, row.message)
			w.restart()
			w.bound("c", row.want)
		})
	}
}

// only has a volume be for machines with a label alone.
func only(v *corev1.PersistentVolume, label, value string) *corev1.PersistentVolume {
	is := corev1.NodeSelectorRequirement{Key: label, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{MatchExpressions: []corev1.NodeSelectorRequirement{is}},
	}}}
	return v
}

// TestElsewhere: no claim gets a volume that is for another machine, also if the one
// names the other; one that it has had here it keeps.
func TestElsewhere(t *testing.T) {
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
			w.add(only(row.volume.DeepCopy(), corev1.LabelHostname, "there"), row.claim)
			w.settle()
			w.bound("c", "")
			w.says(w.claim("c").Message, "v", "nodeAffinity: it is not for this machine", "kubernetes.io/hostname=here")

			w.add(only(row.volume.DeepCopy(), "zone", "a"))
			w.settle()
			w.bound("c", "")
			w.zone = "a" // the driver is there
			w.settle()
			w.bound("c", "v")
			w.zone = ""
			w.restart()
			w.settle()
			w.bound("c", "v")
			w.removeClaim("c")
			w.settle()
			if phase := w.volume("v").Phase; phase != "Released" {
				t.Errorf("the volume is %s", phase)
			}
			w.add(newClaim("c", "1Gi", ""), newVolume("another", "1Gi", ""))
			w.settle()
			w.bound("c", "v")
		})
	}
}

// TestDefaultClass: the newest counts.
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
	w.add(c, newClaim("static", "1Gi", ""))
	w.settle()
	w.bound("c", "pvc-uid-c")
	if got := w.volume("pvc-uid-c").Class; got != "b" {
		t.Errorf("class %q", got)
	}
	w.bound("static", "")
}

// TestTwoClaims for one volume: the first has it, and keeps it when one comes that is
// older or names it.
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
		w.add(older)
		w.settle()
		w.restart()
		w.settle()
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
	w.removeClaim("c")
	w.settle()
	if len(w.driver.volumes) > 0 || w.claim("c") != (claim.ClaimStatus{}) || w.volume("pvc-uid-c") != (claim.VolumeStatus{}) {
		t.Errorf("left: %v, %s", w.driver.volumes, w.tell())
	}
	if _, _, err := w.life.controller.Volume(named("c")); !errors.Is(err, plugins.ErrNotFound) {
		t.Errorf("a claim that is not there: %v", err)
	}
}

// TestNothingToProvision: what fails for certain leaves no record, and says why.
func TestNothingToProvision(t *testing.T) {
	w := newWorld(t)
	w.driver.fails = func(string) fate { return fate{undone: true, err: errors.New("no room: make some")} }
	other := newClass("other")
	other.Provisioner = "nobody.test"
	w.add(newClass("fast"), other, newClaim("c", "1Gi", "fast"), newClaim("d", "1Gi", "other"))
	w.wait()
	again := w.sync()
	if again.IsZero() {
		t.Error("it does not say when to try again")
	}
	w.says(w.claim("c").Message, "no room")
	w.says(w.claim("d").Message, "nobody.test", "no volume plugin")
	if claims := w.life.store.Claims(); len(claims) > 0 {
		t.Errorf("recorded: %v", claims)
	}
	w.driver.fails = nil
	// A class that has changed is tried at once.
	changed := newClass("fast")
	changed.Parameters = map[string]string{"pool": "other"}
	w.add(changed)
	w.wait()
	w.sync()
	w.bound("c", "pvc-uid-c")
}

// TestUncertain: a claim that goes while its volume may have been made is cleaned up, also
// if the manager was killed, and the driver was away meanwhile.
func TestUncertain(t *testing.T) {
	uncertain := &plugins.UncertainError{Err: errors.New("timeout")}
	for name, first := range map[string]fate{"made": {err: uncertain}, "not made": {undone: true, err: uncertain}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			fates := []fate{first, {undone: true, err: errors.New("not registered")}}
			w.driver.fails = func(string) (f fate) {
				if len(fates) > 0 {
					f, fates = fates[0], fates[1:]
				}
				return f
			}
			w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
			w.wait()
			w.removeClaim("c")
			w.restart()
			w.says(w.claim("c").Message, "may have been made")
			w.settle()
			if len(fates) > 0 || len(w.driver.volumes) > 0 || len(w.life.store.Claims()) > 0 || len(w.life.store.Volumes()) > 0 {
				t.Errorf("left: %v, %s", w.driver.volumes, w.tell())
			}
		})
	}
}

// TestRefused: a claim that is gone goes when the driver says that it makes no volume.
func TestRefused(t *testing.T) {
	w := newWorld(t)
	fates := []fate{
		{undone: true, err: &plugins.UncertainError{Err: errors.New("timeout")}},
		{undone: true, err: &plugins.RefusedError{Err: errors.New("too large")}},
	}
	w.driver.fails = func(string) (f fate) {
		f, fates = fates[0], fates[1:]
		return f
	}
	w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
	w.wait()
	w.removeClaim("c")
	w.settle()
	if len(fates) > 0 || len(w.life.store.Claims()) > 0 {
		t.Errorf("left: %s", w.tell())
	}
}

// TestOtherProvisioner: what one driver may have made is not asked of another, which would
// know nothing of it.
func TestOtherProvisioner(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"))
	w.driver.fails = func(string) fate {
		w.kill()
		return fate{err: errKilled}
	}
	w.add(newClaim("c", "1Gi", "fast"))
	w.settle()
	w.driver.fails = nil
	other := newClass("fast")
	other.Provisioner = otherDriver
	w.add(other)
	w.restart()
	w.settle()
	w.bound("c", "")
	w.says(w.claim("c").Message, "may have been made by "+driverName, otherDriver, "set it back")
	w.removeClaim("c")
	w.settle()
	if len(w.life.store.Claims()) != 1 {
		t.Errorf("it is forgotten: %s", w.tell())
	}
	w.add(newClass("fast"))
	w.settle()
	if len(w.driver.volumes) > 0 || len(w.life.store.Claims()) > 0 {
		t.Errorf("it is leaked: %v, %s", w.driver.volumes, w.tell())
	}
}

// TestUncertainEdit: more is asked for later, less at once.
func TestUncertainEdit(t *testing.T) {
	for size, asked := range map[string]string{"2Gi": "1Gi", "1Mi": "1Mi"} {
		w := newWorld(t)
		w.driver.fails = func(string) fate {
			return fate{undone: true, err: &plugins.UncertainError{Err: errors.New("timeout")}}
		}
		w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
		w.wait()
		w.driver.fails = nil
		w.add(newClaim("c", size, "fast"))
		w.settle()
		w.bound("c", "pvc-uid-c")
		if got := w.driver.asks[0].Claim.Spec.Resources.Requests.Storage(); got.Cmp(resource.MustParse(asked)) != 0 {
			t.Errorf("asked for %s", got)
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
	w.add(late, newVolume("v", "1Gi", "late"), newClaim("c", "1Gi", "late"), newClaim("d", "1Gi", "late"))
	w.settle()
	w.bound("c", "")
	w.says(w.claim("c").Message, "first pod")
	w.add(newPod("p", "d"))
	w.settle()
	w.bound("d", "v")
	w.add(newPod("p", "c", "d"))
	w.settle()
	w.bound("c", "pvc-uid-c")
}

func ephemeralPod(name, uid string) *corev1.Pod {
	pod := newPod(name)
	pod.UID = types.UID(uid)
	template := &corev1.PersistentVolumeClaimTemplate{Spec: newClaim("", "1Gi", "fast").Spec}
	pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: template}}}}
	return pod
}

// TestEphemeral: the claim is there as long as the pod, and is the pod's alone.
func TestEphemeral(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), ephemeralPod("p", "1"))
	w.settle()
	c, v, err := w.life.controller.Volume(named("p-scratch"))
	if err != nil || !metav1.IsControlledBy(c, w.objects.Pods[named("p")]) {
		t.Fatalf("%+v, %v", c, err)
	}
	w.use(v.Name, true)
	w.add(ephemeralPod("p", "2"))
	w.settle()
	w.bound("p-scratch", "")
	w.says(w.claim("p-scratch").Message, "earlier claim", "in use")
	w.use(v.Name, false)
	w.settle()
	if _, now, err := w.life.controller.Volume(named("p-scratch")); err != nil || now.Name == v.Name {
		t.Errorf("the new pod has %v, %v", now, err)
	}
	w.removePod("p")
	w.settle()
	if len(w.driver.volumes) > 0 {
		t.Errorf("left: %v", w.driver.volumes)
	}

	w.add(newClaim("p-scratch", "1Gi", "fast"), ephemeralPod("p", "3"))
	w.settle()
	w.bound("p-scratch", "pvc-uid-p-scratch")
	events := w.events.List()
	found := false
	for _, e := range events {
		found = found || e.Warning && e.Object == "pod default/p" && strings.Contains(e.Message, "rename")
	}
	if !found {
		t.Errorf("no word of the conflict: %+v", events)
	}
}

// TestOtherUID: who writes an uid into a manifest, as kubectl does, has not removed the
// claim, and keeps its volume.
func TestOtherUID(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
	w.settle()
	c := newClaim("c", "1Gi", "fast")
	c.UID = "other"
	w.add(c)
	w.settle()
	w.bound("c", "")
	w.says(w.claim("c").Message, "metadata.uid", "set it back")
	if w.driver.volumes["pvc-uid-c"] == nil {
		t.Fatal("its volume was deleted")
	}
	w.add(newClaim("c", "1Gi", "fast"))
	w.settle()
	w.bound("c", "pvc-uid-c")
	w.removeClaim("c")
	w.settle()
	w.add(c)
	w.settle()
	w.bound("c", "pvc-other")
}

// TestProtected: a claim stays while a pod of the manifests uses it, while the machine has
// its volume, and while not every manifest was read.
func TestProtected(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), newClaim("c", "1Gi", "fast"), newPod("p", "c"))
	w.settle()
	w.use("pvc-uid-c", true)
	w.removeClaim("c")
	w.settle()
	w.bound("c", "pvc-uid-c")
	w.says(w.claim("c").Message, "default/p", "remove the pod")
	w.removePod("p")
	w.settle()
	if w.claim("c").Phase != "Terminating" || len(w.driver.volumes) != 1 {
		t.Errorf("in use: %s", w.tell())
	}
	w.objects.Complete = false
	w.use("pvc-uid-c", false)
	w.restart()
	w.settle()
	if len(w.driver.volumes) != 1 {
		t.Errorf("not all was read: %s", w.tell())
	}
	// It is the same claim when it is back.
	w.objects.Complete = true
	w.add(newClaim("c", "1Gi", "fast"))
	w.settle()
	w.bound("c", "pvc-uid-c")
	w.removeClaim("c")
	w.settle()
	if len(w.driver.volumes) > 0 {
		t.Errorf("left: %s", w.tell())
	}
}

// TestBack: a claim that is back once its volume has begun to be deleted is another.
func TestBack(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
	w.settle()
	first := w.driver.volumes["pvc-uid-c"]
	w.driver.fails = func(call string) fate { return fate{undone: call == "Delete", err: errors.New("busy")} }
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
	w.says(w.claim("c").Message, "to be deleted")
	w.wait() // the call that fails
	w.driver.fails = nil
	w.settle()
	w.bound("c", "pvc-uid-c")
	if first.deletes != 1 || w.driver.volumes["pvc-uid-c"] == first {
		t.Errorf("deleted %d times", first.deletes)
	}
}

// TestRetain: the volume stays, is the claim's again when that is back, and another's when
// its manifest says so.
func TestRetain(t *testing.T) {
	w := newWorld(t)
	keep := newClass("keep")
	keep.ReclaimPolicy = new(corev1.PersistentVolumeReclaimRetain)
	w.add(keep, newClaim("c", "1Gi", "keep"))
	w.settle()
	for range 2 {
		w.removeClaim("c")
		w.settle()
		w.restart()
		w.settle()
		if v := w.volume("pvc-uid-c"); v.Phase != "Released" || len(w.driver.volumes) != 1 {
			t.Errorf("%+v", v)
		}
		w.add(newClaim("c", "1Gi", "keep"))
		w.settle()
		w.bound("c", "pvc-uid-c")
	}
	w.removeClaim("c")
	w.settle()
	other := newClaim("other", "1Gi", "keep")
	other.Spec.VolumeName = "pvc-uid-c"
	w.add(other)
	w.settle()
	w.bound("other", "")
	record, err := w.life.store.Volume("pvc-uid-c")
	if err != nil {
		t.Fatal(err)
	}
	given := record.DeepCopy()
	given.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "other"}
	w.add(given)
	w.settle()
	w.bound("other", "pvc-uid-c")
}

// TestStaticDelete: the manifest of a volume that is deleted does not make it free.
func TestStaticDelete(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &made{size: resource.MustParse("1Gi")}
	w.add(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	w.settle()
	w.bound("c", "v")
	w.removeClaim("c")
	w.settle()
	if len(w.driver.volumes) > 0 {
		t.Errorf("left: %s", w.tell())
	}
	w.add(newClaim("d", "1Gi", ""), newClaim("c", "1Gi", ""))
	w.settle()
	w.restart()
	w.settle()
	w.bound("c", "")
	w.bound("d", "")
	w.says(w.volume("v").Message, "remove its manifest")
	w.removeVolume()
	w.settle()
	if len(w.life.store.Volumes()) > 0 {
		t.Errorf("left: %s", w.tell())
	}
	w.add(newVolume("v", "1Gi", ""))
	w.settle()
	w.bound("c", "v")
}

// TestSpared: what is left of a volume whose manifest was made to retain it is left, also
// once the manifest is gone.
func TestSpared(t *testing.T) {
	for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle} {
		w := newWorld(t)
		w.driver.volumes["v"] = &made{retain: true}
		w.add(withPolicy(newVolume("v", "1Gi", ""), policy), newClaim("c", "1Gi", ""))
		w.settle()
		w.bound("c", "v")
		w.driver.fails = func(string) fate { // the manager does not come to it
			w.kill()
			return fate{undone: true, err: errKilled}
		}
		w.removeClaim("c")
		w.settle()
		w.driver.fails = nil
		w.add(newVolume("v", "1Gi", ""))
		w.restart()
		w.settle()
		w.says(w.volume("v").Message, "became Retain", "what is left of it is left")
		w.removeVolume()
		w.settle()
		if left := w.driver.volumes["v"]; left == nil || left.scrubs > 0 || len(w.life.store.Volumes()) > 0 {
			t.Errorf("%s: the driver has %+v, %s", policy, left, w.tell())
		}
	}
}

// TestTwin: a volume of two names is not deleted by one as long as a claim has it by the
// other.
func TestTwin(t *testing.T) {
	w := newWorld(t)
	twin := newVolume("twin", "1Gi", "b")
	twin.Spec.CSI.VolumeHandle = "v"
	w.driver.volumes["v"] = &made{}
	w.add(withPolicy(newVolume("v", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete), twin, newClaim("c", "1Gi", "a"), newClaim("d", "1Gi", "b"))
	w.settle()
	w.removeClaim("c")
	w.settle()
	w.restart()
	w.settle()
	w.says(w.volume("v").Message, "twin", "claim default/d")
	w.bound("d", "twin")
	if w.driver.volumes["v"] == nil {
		t.Error("a claimed volume is deleted")
	}
	w.removeClaim("d")
	w.settle()
	if w.driver.volumes["v"] != nil {
		t.Errorf("it is left: %s", w.tell())
	}
}

func TestRecycle(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &made{}
	w.add(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle), newClaim("c", "1Gi", ""))
	w.settle()
	w.add(newClaim("d", "1Gi", ""))
	w.settle()
	w.bound("d", "")
	w.removeClaim("c")
	w.settle()
	w.bound("d", "v")
	if w.driver.volumes["v"].scrubs != 1 {
		t.Errorf("scrubbed %d times", w.driver.volumes["v"].scrubs)
	}
}

// TestNoPlugin: a policy that the plugin cannot carry out is shown, and nothing is done.
func TestNoPlugin(t *testing.T) {
	w := newWorld(t)
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimRecycle)
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
	w.add(v, newClaim("c", "1Gi", ""))
	w.settle()
	w.bound("c", "v")
	w.removeClaim("c")
	w.settle()
	if v := w.volume("v"); v.Phase != "Failed" || v.Message == "" {
		t.Errorf("%+v", v)
	}
}

// TestLost: a volume whose manifest is gone is not its claim's until it is back, and
// nothing happens to it. Pods that have it are told which it was.
func TestLost(t *testing.T) {
	w := newWorld(t)
	w.driver.volumes["v"] = &made{}
	v := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	w.add(v, newClaim("c", "1Gi", ""))
	w.settle()
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
		t.Errorf("told of %v, %v", was, err)
	}
	w.add(v)
	w.settle()
	w.bound("c", "v")
	w.removeVolume()
	w.removeClaim("c")
	w.settle()
	if len(w.driver.volumes) != 1 || len(w.life.store.Volumes())+len(w.life.store.Claims()) > 0 {
		t.Errorf("%v, %s", w.driver.volumes, w.tell())
	}
}

// TestEdited: what a bound volume is made of does not change under its claim.
func TestEdited(t *testing.T) {
	w := newWorld(t)
	w.add(withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete), newClaim("c", "1Gi", ""))
	w.settle()
	other := withPolicy(newVolume("v", "1Gi", ""), corev1.PersistentVolumeReclaimDelete)
	other.Spec.CSI.VolumeHandle = "other"
	w.driver.volumes["other"] = &made{}
	moved := newClaim("c", "1Gi", "elsewhere")
	w.add(other, moved)
	w.settle()
	if _, v, err := w.life.controller.Volume(named("c")); err != nil || v.Spec.CSI.VolumeHandle != "v" {
		t.Errorf("%v, %v", v, err)
	}
	w.says(w.volume("v").Message, "change it back")
	w.says(w.claim("c").Message, "storageClassName", "change it back")
	w.removeClaim("c")
	w.settle()
	if w.driver.volumes["other"] == nil {
		t.Error("another volume was deleted")
	}
}

func TestExpand(t *testing.T) {
	for _, node := range []bool{false, true} {
		w := newWorld(t)
		w.driver.node = node
		w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
		w.settle()
		w.add(newClaim("c", "2Gi", "fast"))
		w.settle()
		_, v, err := w.life.controller.Volume(named("c"))
		if err != nil || v.Spec.Capacity.Storage().String() != "2Gi" || (v.Annotations[plugins.NodeExpandAnnotation] == "true") != node {
			t.Errorf("%v, %v", v, err)
		}
		if node {
			if c := w.claim("c"); c.Capacity != "1Gi" || c.Phase != "Bound" {
				t.Errorf("before the node: %+v", c)
			}
			w.restart()
			w.life.controller.NodeExpanded("pvc-uid-c", resource.MustParse("1Gi"))
			w.settle()
			if w.claim("c").Capacity != "1Gi" {
				t.Error("the node has less")
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
		w.add(newClaim("c", "1Gi", "fast"))
		w.settle()
		w.bound("c", "pvc-uid-c")
		w.says(w.claim("c").Message, "less than the 2Gi", "set it back")
	}
}

// TestNotExpanded: the claim keeps what it has, and says why it is not more.
func TestNotExpanded(t *testing.T) {
	w := newWorld(t)
	fixed := newClass("fixed")
	fixed.AllowVolumeExpansion = nil
	w.add(fixed, newClass("fast"), newVolume("v", "1Gi", ""), newClaim("a", "1Gi", "fixed"), newClaim("b", "1Gi", ""), newClaim("c", "1Gi", "fast"))
	w.settle()
	w.driver.fails = func(string) fate { return fate{undone: true, err: errors.New("no room")} }
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
	w.add(newClass("fast"), snapshot("a", "s"), snapshot("b", "x"), snapshot("c", "y"), snapshot("d", "z"), copied, odd)
	w.settle()
	w.bound("a", "pvc-uid-a")
	w.says(w.claim("b").Message, "spec.volumeSnapshotRef")
	w.says(w.claim("c").Message, "volumeSnapshotContentName")
	w.says(w.claim("d").Message, "in no manifest")
	w.says(w.claim("odd").Message, "Pod")
	w.says(w.claim("copy").Message, "default/original")
	if got := w.driver.asks[0].Source; got.SnapshotHandle != "handle" {
		t.Errorf("%+v", got)
	}
	w.add(newClaim("original", "1Gi", "fast"))
	w.settle()
	w.bound("copy", "pvc-uid-copy")
	last := w.driver.asks[len(w.driver.asks)-1]
	if last.Source.Volume == nil || last.Source.Volume.Name != "pvc-uid-original" {
		t.Errorf("%+v", last.Source)
	}
}

// TestSourceStays: what is being copied is not deleted.
func TestSourceStays(t *testing.T) {
	w := newWorld(t)
	w.add(newClass("fast"), newClaim("original", "1Gi", "fast"))
	w.settle()
	w.driver.fails = func(call string) fate {
		if call != "Provision" {
			return fate{}
		}
		return fate{undone: true, err: &plugins.UncertainError{Err: errors.New("still copying")}}
	}
	copied := newClaim("copy", "1Gi", "fast")
	copied.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "original"}
	w.add(copied)
	w.wait()
	w.removeClaim("original")
	w.wait()
	w.sync()
	if w.driver.volumes["pvc-uid-original"] == nil {
		t.Error("deleted")
	}
	w.says(w.claim("original").Message, "claim default/copy")
	w.driver.fails = nil
	w.settle()
	w.bound("copy", "pvc-uid-copy")
	if w.driver.volumes["pvc-uid-original"] != nil {
		t.Error("left")
	}
}

// TestUnreadable: nothing is done with what has a record that cannot be read.
func TestUnreadable(t *testing.T) {
	for file, word := range map[string]string{"persistentvolumes/pvc-uid-c.json": "pvc-uid-c.json", "persistentvolumeclaims/default_c.json": "default_c.json"} {
		for _, there := range []bool{true, false} {
			w := newWorld(t)
			w.add(newClass("fast"), newClaim("c", "1Gi", "fast"))
			w.settle()
			w.stop()
			if err := os.WriteFile(filepath.Join(w.dir, file), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			if !there {
				delete(w.objects.Claims, named("c"))
			}
			w.broken = true
			w.start()
			w.settle()
			w.bound("c", "")
			if len(w.driver.volumes) != 1 {
				t.Errorf("%s: deleted", file)
			}
			if there {
				w.says(w.claim("c").Message, word)
			}
			if b, err := os.ReadFile(filepath.Join(w.dir, file)); err != nil || string(b) != "{" {
				t.Errorf("%s: has %q, %v", file, b, err)
			}
		}
	}
}
