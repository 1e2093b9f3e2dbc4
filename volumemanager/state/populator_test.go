package state_test

import (
	"errors"
	"fmt"
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

// emptyDirPlugin is a plugin for emptyDirs.
type emptyDirPlugin struct{ plugins.VolumePlugin }

func (emptyDirPlugin) Name() string { return "test/emptydir" }
func (emptyDirPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && spec.Volume.EmptyDir != nil
}

// csiPlugin is a plugin for CSI PersistentVolumes, as filesystems and raw devices.
type csiPlugin struct {
	plugins.DeviceMountableVolumePlugin
	block
}

// block has the methods of plugins.BlockVolumePlugin, without those of plugins.VolumePlugin, which csiPlugin
// already has.
type block interface {
	NewBlockVolumeMapper(*plugins.Spec, *corev1.Pod) (plugins.BlockVolumeMapper, error)
	NewBlockVolumeUnmapper(string, types.UID) (plugins.BlockVolumeUnmapper, error)
}

func (csiPlugin) Name() string { return "test/csi" }
func (csiPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.CSI != nil
}

func (csiPlugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadWriteOncePod}
}

func (csiPlugin) VolumeName(spec *plugins.Spec) (string, error) {
	return spec.PersistentVolume.Spec.CSI.VolumeHandle, nil
}

// nfsPlugin is a plugin that does not support ReadWriteOncePod.
type nfsPlugin struct{ plugins.VolumePlugin }

func (nfsPlugin) Name() string { return "test/nfs" }
func (nfsPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.NFS != nil
}

func (nfsPlugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
}

// hostPathPlugin is a plugin that does not support PersistentVolumes.
type hostPathPlugin struct{ plugins.VolumePlugin }

func (hostPathPlugin) Name() string { return "test/hostpath" }
func (hostPathPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.HostPath != nil
}

// claims holds the volumes of bound claims, keyed by the namespace and name of the claim. The claim
// web-own belongs to the pod with the UID u.
type claims map[string]*corev1.PersistentVolume

var errNotBound = errors.New("no volume matches")

func (c claims) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	pv := c[key.String()]
	if pv == nil {
		return nil, nil, fmt.Errorf("claim %s: %w", key, errNotBound)
	}
	claim := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes}}
	if key.Name == "web-own" {
		claim.OwnerReferences = []metav1.OwnerReference{{UID: "u", Controller: new(true)}}
	}
	return claim, pv, nil
}

// pv returns a CSI PersistentVolume.
func pv(name string, mode corev1.PersistentVolumeMode) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			VolumeMode:             &mode,
			Capacity:               corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "d", VolumeHandle: "h-" + name}},
		},
	}
}

// claimed returns a pod's volume with a claim.
func claimed(name, claim string, readOnly bool) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim, ReadOnly: readOnly}}}
}

// empty returns a pod's emptyDir.
func empty(name string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
}

// withOncePod sets the access mode ReadWriteOncePod.
func withOncePod(pv *corev1.PersistentVolume) *corev1.PersistentVolume {
	pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	return pv
}

// withSource returns a PersistentVolume with a source other than CSI.
func withSource(source corev1.PersistentVolumeSource, name string) *corev1.PersistentVolume {
	v := pv(name, corev1.PersistentVolumeFilesystem)
	v.Spec.PersistentVolumeSource = source
	return v
}

// populate returns the desired state of one pod. The claim disk is bound to a raw device, the other
// claims to filesystems.
func populate(spec corev1.PodSpec) *state.DesiredStateOfWorld {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u"}, Spec: spec}
	p := state.Populator{
		Registry: plugins.Registry{emptyDirPlugin{}, csiPlugin{}, nfsPlugin{}, hostPathPlugin{}},
		Paths:    plugins.Paths{Root: "/r"},
		Claims: claims{
			"default/fs":           pv("one", corev1.PersistentVolumeFilesystem),
			"default/web-own":      pv("two", corev1.PersistentVolumeFilesystem),
			"default/disk":         pv("three", corev1.PersistentVolumeBlock),
			"default/once-pod":     withOncePod(pv("five", corev1.PersistentVolumeFilesystem)),
			"default/once-pod-nfs": withOncePod(withSource(corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{}}, "six")),
			"default/host-path":    withSource(corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{}}, "seven"),
			"default/web-other":    pv("four", corev1.PersistentVolumeFilesystem),
		},
	}
	return p.Populate(&manifest.Objects{Complete: true, Pods: map[types.NamespacedName]*corev1.Pod{{Namespace: "default", Name: "web"}: pod}})
}

// TestPopulate: the desired volumes of a pod have their IDs, devices, subPaths and settings.
func TestPopulate(t *testing.T) {
	d := populate(corev1.PodSpec{
		SecurityContext: &corev1.PodSecurityContext{FSGroup: new(int64(7))},
		InitContainers: []corev1.Container{{
			Name:         "init",
			VolumeMounts: []corev1.VolumeMount{{Name: "x"}, {Name: "a", MountPath: "/a", SubPath: "sub/dir", ReadOnly: true}},
		}},
		Containers: []corev1.Container{{
			Name:          "main",
			Env:           []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "$(A)-$$"}, {Name: "P", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}},
			VolumeMounts:  []corev1.VolumeMount{{Name: "a", MountPath: "/b", SubPathExpr: "$(P)/$(B)$x"}},
			VolumeDevices: []corev1.VolumeDevice{{Name: "c"}},
		}},
		Volumes: []corev1.Volume{
			claimed("a", "fs", true),
			{Name: "own", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
			claimed("c", "disk", false),
			empty("x"),
			claimed("once-pod", "once-pod", false),
		},
	})
	want := []struct {
		id       state.ID
		device   string
		subPaths []state.SubPath
	}{
		{state.ID{Pod: "u", Plugin: "test/csi", Name: "one"}, "test/csi/h-one", []state.SubPath{
			{Container: "init", Index: 1, MountPath: "/a", SubPath: "sub/dir", ReadOnly: true, Path: "/r/pods/u/volume-subpaths/one/init/1"},
			{Container: "main", Index: 0, MountPath: "/b", SubPath: "web/1-$$x", Path: "/r/pods/u/volume-subpaths/one/main/0"},
		}},
		{state.ID{Pod: "u", Plugin: "test/csi", Name: "two"}, "test/csi/h-two", nil},
		{state.ID{Pod: "u", Plugin: "test/csi", Name: "three", Block: true}, "test/csi/h-three", nil},
		{state.ID{Pod: "u", Plugin: "test/emptydir", Name: "x"}, "", nil},
		{state.ID{Pod: "u", Plugin: "test/csi", Name: "five"}, "test/csi/h-five", nil},
	}
	for i, w := range want {
		v := d.Volumes[i]
		if v.Err != nil || v.ID != w.id || v.Device != w.device || fmt.Sprint(v.SubPaths) != fmt.Sprint(w.subPaths) || d.ByID[w.id] != v {
			t.Errorf("volume %s: got error %v, ID %v, device %s, subPaths %+v; want ID %v, device %s, subPaths %+v", v.Name, v.Err, v.ID, v.Device, v.SubPaths, w.id, w.device, w.subPaths)
		}
		if *v.Args.FSGroup != 7 || v.Args.FSGroupChangePolicy != corev1.FSGroupChangeAlways {
			t.Errorf("volume %s: got args %+v, want fsGroup 7 and policy Always", v.Name, v.Args)
		}
	}
	if !d.Volumes[0].Spec.ReadOnly || d.Volumes[1].Spec.ReadOnly || d.Volumes[0].Size.String() != "1Gi" || !d.Persistent["two"] || d.Persistent["x"] || d.Pods["u"].Unknown || d.Volumes[0].Exclusive || !d.Volumes[4].Exclusive {
		t.Errorf("got state %+v; want volume a read-only with 1Gi, only volume once-pod exclusive, PersistentVolume two in use", d)
	}
}

// TestVolumeErrors: an error of one volume does not affect others, and says what to do. The ID is set
// if the error does not prevent it.
func TestVolumeErrors(t *testing.T) {
	mounts := func(m ...corev1.VolumeMount) []corev1.Container {
		return []corev1.Container{{Name: "main", VolumeMounts: m}}
	}
	for name, c := range map[string]struct {
		containers []corev1.Container
		volumes    []corev1.Volume
		want       string // a part of the error of the last volume
		known      bool   // the ID of the last volume is set
	}{
		"no claim":                   {nil, []corev1.Volume{claimed("a", "other", false)}, "no volume matches", false},
		"claim of another owner":     {nil, []corev1.Volume{{Name: "other", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}, "does not belong to this pod", false},
		"no plugin":                  {nil, []corev1.Volume{{Name: "a"}}, "no volume plugin", false},
		"raw device in volumeMounts": {mounts(corev1.VolumeMount{Name: "a"}), []corev1.Volume{claimed("a", "disk", false)}, "use volumeDevices", true},
		"filesystem in volumeDevices": {
			[]corev1.Container{{Name: "main", VolumeDevices: []corev1.VolumeDevice{{Name: "a"}}}},
			[]corev1.Volume{claimed("a", "fs", false)},
			"use volumeMounts", true,
		},
		"ReadWriteOncePod is not supported": {nil, []corev1.Volume{claimed("a", "once-pod-nfs", false)}, "ReadWriteOncePod: the plugin test/nfs supports [ReadWriteOnce]", true},
		"PersistentVolume is not supported": {nil, []corev1.Volume{claimed("a", "host-path", false)}, "PersistentVolume seven: the plugin test/hostpath supports only inline volumes", true},
		"two volumes with one path":         {nil, []corev1.Volume{claimed("b", "fs", false), empty("one")}, "rename", true},
		"one claim with different readOnly": {nil, []corev1.Volume{claimed("b", "fs", false), claimed("a", "fs", true)}, "readOnly", true},
		"undefined variable":                {mounts(corev1.VolumeMount{Name: "a", SubPathExpr: "$(HOME)"}), []corev1.Volume{empty("a")}, "add it", true},
		"container name that is a path": {
			[]corev1.Container{{Name: "../x", VolumeMounts: []corev1.VolumeMount{{Name: "a", SubPath: "y"}}}},
			[]corev1.Volume{empty("a")},
			"container's name", true,
		},
		"volume name that is a path": {nil, []corev1.Volume{empty("..")}, "the volume's name", false},
	} {
		t.Run(name, func(t *testing.T) {
			d := populate(corev1.PodSpec{Containers: c.containers, Volumes: append(c.volumes, empty("fine"))})
			v, fine := d.Volumes[len(c.volumes)-1], d.Volumes[len(c.volumes)]
			if v.Err == nil || !strings.Contains(v.Err.Error(), c.want) || v.Known() != c.known || d.Pods["u"].Unknown == c.known {
				t.Errorf("got error %v, ID known %t; want error %q, ID known %t", v.Err, v.Known(), c.want, c.known)
			}
			if fine.Err != nil {
				t.Errorf("volume fine: got error %v, want none", fine.Err)
			}
		})
	}
}

// TestOneClaimTwice: two volumes of a pod with one claim are one mount, with the subPaths of both.
func TestOneClaimTwice(t *testing.T) {
	d := populate(corev1.PodSpec{
		Containers: []corev1.Container{{Name: "main", VolumeMounts: []corev1.VolumeMount{{Name: "a", SubPath: "x"}, {Name: "b", SubPath: "y"}}}},
		Volumes:    []corev1.Volume{claimed("a", "fs", false), claimed("b", "fs", false)},
	})
	a, b := d.Volumes[0], d.Volumes[1]
	if a.Err != nil || b.Err != nil || a.ID != b.ID || len(d.ByID[a.ID].SubPaths) != 2 {
		t.Errorf("got errors %v and %v, volume %+v; want one volume with both subPaths", a.Err, b.Err, d.ByID[a.ID])
	}
}

// TestDeletedPodsAreNotDesired: the volumes of a pod with a deletionTimestamp are not desired, and those of
// a completed pod are.
func TestDeletedPodsAreNotDesired(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", UID: "u", DeletionTimestamp: &metav1.Time{}}}
	ended := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "job", UID: "v"}, Status: corev1.PodStatus{Phase: corev1.PodSucceeded}}
	d := state.Populator{}.Populate(&manifest.Objects{Pods: map[types.NamespacedName]*corev1.Pod{{Name: "web"}: pod, {Name: "job"}: ended}})
	if d.Pods["u"] != nil || d.Pods["v"] == nil || d.Complete {
		t.Errorf("got pods %v, complete %t; want only the pod without a deletionTimestamp, incomplete", d.Pods, d.Complete)
	}
}

// TestCopiedTo: CopiedTo names the claim of the pod whose volume will be copied from the volume.
func TestCopiedTo(t *testing.T) {
	template := &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{DataSourceRef: &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "fs"}}}
	copied := corev1.Volume{Name: "copy", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: template}}}
	for _, c := range []struct{ claim, want string }{{"fs", "web-copy"}, {"web-own", ""}} {
		d := populate(corev1.PodSpec{Volumes: []corev1.Volume{claimed("data", c.claim, false), copied, empty("e")}})
		if got := d.Volumes[0].CopiedTo; got != c.want {
			t.Errorf("copy of claim %s: got %q, want %q", c.claim, got, c.want)
		}
	}
}
