package state

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// Claims knows which volumes claims are bound to.
type Claims interface {
	// Volume is what a claim is bound to. The error says why it is not bound, and what to
	// do about it.
	Volume(claim types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error)
}

// Populator finds out what the manifests want.
type Populator struct {
	Registry plugin.Registry
	Paths    plugin.Paths
	Claims   Claims
	// Node is the machine's name.
	Node string
}

// Populate makes a desired state. It fails for no pod because of another, nor for a
// volume because of another: each has an error of its own.
func (p Populator) Populate(objects *manifest.Objects) *DesiredStateOfWorld {
	d := &DesiredStateOfWorld{
		Complete:   objects.Complete,
		Pods:       map[types.UID]*Pod{},
		ByID:       map[ID]*PodVolume{},
		Devices:    map[string][]*PodVolume{},
		Persistent: map[string]bool{},
	}
	pods := slices.SortedFunc(maps.Values(objects.Pods), func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, pod := range pods {
		if pod.DeletionTimestamp == nil {
			p.add(d, pod, objects)
		}
	}
	return d
}

func (p Populator) add(d *DesiredStateOfWorld, pod *corev1.Pod, objects *manifest.Objects) {
	wanted := &Pod{Pod: pod}
	d.Pods[pod.UID] = wanted
	uses := usesOf(pod)
	names := map[string]*PodVolume{}
	for i := range pod.Spec.Volumes {
		v := &PodVolume{Pod: pod, Name: pod.Spec.Volumes[i].Name}
		v.Err = p.resolve(v, &pod.Spec.Volumes[i], uses[v.Name], objects)
		if v.Err == nil {
			v.Err = v.collides(names)
		}
		wanted.Volumes = append(wanted.Volumes, v)
		d.add(v)
		wanted.Unknown = wanted.Unknown || !v.Known()
	}
	wanted.findCopies(objects)
	d.Volumes = append(d.Volumes, wanted.Volumes...)
}

// findCopies finds the volumes of which others of the pod are to be copies. In Kubernetes
// none is attached before all claims of the pod are bound.
func (p *Pod) findCopies(objects *manifest.Objects) {
	copies := map[types.NamespacedName]string{}
	for i, v := range p.Volumes {
		if v.Spec == nil {
			copies[claim.CopyOf(p.Pod, &p.Spec.Volumes[i], objects)] = claim.Of(p.Pod, &p.Spec.Volumes[i]).Name
		}
	}
	delete(copies, types.NamespacedName{})
	for i, v := range p.Volumes {
		v.Copy = copies[claim.Of(p.Pod, &p.Spec.Volumes[i])]
	}
}

func (d *DesiredStateOfWorld) add(v *PodVolume) {
	if v.Spec != nil && v.Spec.PersistentVolume != nil {
		d.Persistent[v.Spec.Name()] = true
	}
	if !v.Known() {
		return
	}
	if have := d.ByID[v.ID]; have == nil || have.Err != nil {
		d.ByID[v.ID] = v
	}
	if v.Device != "" {
		d.Devices[v.Device] = append(d.Devices[v.Device], v)
	}
}

// collides refuses a volume that would be where another of the pod is. A claim may be
// there twice, if both ask for the same.
func (v *PodVolume) collides(names map[string]*PodVolume) error {
	before, taken := names[v.Spec.Name()]
	if !taken {
		names[v.Spec.Name()] = v
		return nil
	}
	if before.ID != v.ID || before.Spec.PersistentVolume == nil || v.Spec.PersistentVolume == nil {
		return plugin.Invalidf("volumes %q and %q of the pod would be in one place: rename one of them", before.Name, v.Name)
	}
	if before.Spec.ReadOnly != v.Spec.ReadOnly {
		return plugin.Invalidf("volumes %q and %q of the pod are one claim, with readOnly and without: ask for the same in both, and set readOnly in volumeMounts", before.Name, v.Name)
	}
	before.SubPaths = append(before.SubPaths, v.SubPaths...)
	return nil
}

// resolve finds out what a volume is, as far as it can.
func (p Populator) resolve(v *PodVolume, source *corev1.Volume, uses []use, objects *manifest.Objects) error {
	if err := segments(string(v.Pod.UID)); err != nil {
		return plugin.Invalidf("metadata.uid %q: %v", v.Pod.UID, err)
	}
	if err := p.specify(v, source); err != nil {
		return err
	}
	if err := segments(v.Spec.Name()); err != nil {
		return plugin.Invalidf("the volume's name %q: %v", v.Spec.Name(), err)
	}
	kind, err := p.Registry.ForSpec(v.Spec)
	if err != nil {
		return err
	}
	v.Plugin, v.Args = kind, argsOf(v.Pod)
	v.ID = ID{Pod: v.Pod.UID, Plugin: kind.Name(), Name: v.Spec.Name(), Block: v.Spec.Block()}
	if v.Device, err = deviceOf(kind, v.Spec); err != nil {
		return err
	}
	if err := v.checkPowers(); err != nil {
		return err
	}
	return p.use(v, uses, objects)
}

// checkPowers refuses what the plugin cannot make of a PersistentVolume. That no two pods
// have one is kept for those alone whose plugin says so.
func (v *PodVolume) checkPowers() error {
	if v.Spec.PersistentVolume == nil {
		return nil
	}
	persistent, can := v.Plugin.(plugin.PersistentVolumePlugin)
	if !can {
		return plugin.Invalidf("PersistentVolume %s: volumes of %s are pods' own: write it into the pod", v.Spec.Name(), v.Plugin.Name())
	}
	if modes := persistent.AccessModes(); v.Alone && !slices.Contains(modes, corev1.ReadWriteOncePod) {
		return plugin.Invalidf("accessModes ReadWriteOncePod: volumes of %s have %v alone: make the claim anew with one of those", v.Plugin.Name(), modes)
	}
	if _, can := v.Plugin.(plugin.BlockVolumePlugin); v.ID.Block && !can {
		return plugin.Invalidf("volumeMode Block: volumes of %s cannot be raw devices; make it Filesystem", v.Plugin.Name())
	}
	return nil
}

// argsOf are what a pod asks of all its volumes.
func argsOf(pod *corev1.Pod) plugin.MounterArgs {
	args := plugin.MounterArgs{FSGroupChangePolicy: corev1.FSGroupChangeAlways}
	security := pod.Spec.SecurityContext
	if security == nil {
		return args
	}
	args.FSGroup = security.FSGroup
	if security.FSGroupChangePolicy != nil {
		args.FSGroupChangePolicy = *security.FSGroupChangePolicy
	}
	return args
}

// specify finds the claim's volume, or takes the pod's own.
func (p Populator) specify(v *PodVolume, source *corev1.Volume) error {
	name := claim.Of(v.Pod, source)
	if name == (types.NamespacedName{}) {
		v.Spec = &plugin.Spec{Volume: source}
		return nil
	}
	pvc, pv, err := p.Claims.Volume(name)
	if err != nil {
		return err
	}
	if source.Ephemeral != nil && !metav1.IsControlledBy(pvc, v.Pod) {
		return plugin.Invalidf("volume %s: ephemeral: claim %s is not this pod's: remove its manifest, or rename pod or volume", v.Name, name)
	}
	v.Spec = &plugin.Spec{PersistentVolume: pv, ReadOnly: source.PersistentVolumeClaim != nil && source.PersistentVolumeClaim.ReadOnly}
	v.Size = pv.Spec.Capacity[corev1.ResourceStorage]
	v.Resized = pv.Annotations[plugin.NodeExpandAnnotation] == "true"
	v.Alone = slices.Contains(pvc.Spec.AccessModes, corev1.ReadWriteOncePod)
	return nil
}

// deviceOf is the name of the volume that is brought to the machine once for all pods, if
// it is one of those. A PersistentVolume is asked without its driver, which may not be
// there yet: what is on the machine must be known as this volume's nevertheless.
func deviceOf(kind plugin.VolumePlugin, spec *plugin.Spec) (string, error) {
	mountable, ok := kind.(plugin.DeviceMountableVolumePlugin)
	if !ok {
		return "", nil
	}
	if spec.PersistentVolume == nil {
		attach, mount, err := Needs(mountable, spec)
		if err != nil || !attach && !mount {
			return "", err
		}
	}
	name, err := mountable.VolumeName(spec)
	if err != nil {
		return "", err
	}
	return DeviceName(kind, name), nil
}

// DeviceName is unique: the plugin's name and the VolumeName.
func DeviceName(kind plugin.VolumePlugin, volumeName string) string {
	return kind.Name() + "/" + volumeName
}

// Needs tells whether a volume is to be attached, and mounted for all pods.
func Needs(kind plugin.DeviceMountableVolumePlugin, spec *plugin.Spec) (attach, mount bool, err error) {
	if attachable, ok := kind.(plugin.AttachableVolumePlugin); ok {
		if attach, err = attachable.NeedsAttach(spec); err != nil {
			return false, false, err
		}
	}
	mount, err = kind.NeedsDeviceMount(spec)
	return attach, mount, err
}

// segments refuses what is more than one part of a path.
func segments(name string) error {
	if wrong := content.IsPathSegmentName(name); name == "" || len(wrong) > 0 {
		return fmt.Errorf("it has to be a name, without slashes: %v", wrong)
	}
	return nil
}
