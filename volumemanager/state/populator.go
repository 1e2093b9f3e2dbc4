package state

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/environment"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Claims returns the volumes of bound claims.
type Claims interface {
	// Volume returns a claim and its volume. The error says why the claim is not bound, and what to
	// do.
	Volume(claim types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error)
}

// Populator computes the desired state from the manifests.
type Populator struct {
	Registry plugins.Registry
	Paths    plugins.Paths
	Claims   Claims
	// Node is the name of the machine.
	Node string
}

// Populate returns the desired state. Each volume has its own error; an error of one pod or volume
// does not affect others.
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
			p.addPod(d, pod, objects)
		}
	}
	return d
}

// addPod adds a pod and its volumes to d.
func (p Populator) addPod(d *DesiredStateOfWorld, pod *corev1.Pod, objects *manifest.Objects) {
	desired := &Pod{Pod: pod}
	d.Pods[pod.UID] = desired
	uses := usesOf(pod)
	names := map[string]*PodVolume{}
	for i := range pod.Spec.Volumes {
		v := &PodVolume{Pod: pod, Name: pod.Spec.Volumes[i].Name}
		v.Err = p.resolve(v, &pod.Spec.Volumes[i], uses[v.Name], objects)
		if v.Err == nil {
			v.Err = v.addTo(names)
		}
		desired.Volumes = append(desired.Volumes, v)
		d.index(v)
		desired.Unknown = desired.Unknown || !v.Known()
	}
	desired.findCopies(objects)
	d.Volumes = append(d.Volumes, desired.Volumes...)
}

// findCopies sets CopiedTo of the volumes from which volumes of unbound claims of the pod are copied.
// As in Kubernetes, such a volume is not attached before all claims of the pod are bound.
func (p *Pod) findCopies(objects *manifest.Objects) {
	copies := map[types.NamespacedName]string{}
	for i, v := range p.Volumes {
		if v.Spec == nil {
			copies[claim.CopyOf(p.Pod, &p.Spec.Volumes[i], objects)] = claim.Of(p.Pod, &p.Spec.Volumes[i]).Name
		}
	}
	delete(copies, types.NamespacedName{})
	for i, v := range p.Volumes {
		v.CopiedTo = copies[claim.Of(p.Pod, &p.Spec.Volumes[i])]
	}
}

// index adds a volume to the maps of d, as far as its fields are known.
func (d *DesiredStateOfWorld) index(v *PodVolume) {
	if v.Spec != nil && v.Spec.PersistentVolume != nil {
		d.Persistent[v.Spec.Name()] = true
	}
	if !v.Known() {
		return
	}
	if other := d.ByID[v.ID]; other == nil || other.Err != nil {
		d.ByID[v.ID] = v
	}
	if v.Device != "" {
		d.Devices[v.Device] = append(d.Devices[v.Device], v)
	}
}

// addTo adds a volume to names, the pod's volumes by the names of their Specs. Two volumes with the
// same name would have the same path, which is an error, unless both use the same claim with the same
// readOnly. In that case addTo adds the subPaths of v to the volume in names.
func (v *PodVolume) addTo(names map[string]*PodVolume) error {
	other, taken := names[v.Spec.Name()]
	if !taken {
		names[v.Spec.Name()] = v
		return nil
	}
	if other.ID != v.ID || other.Spec.PersistentVolume == nil || v.Spec.PersistentVolume == nil {
		return plugins.Invalidf("volumes %q and %q of the pod would have the same path: rename one of them", other.Name, v.Name)
	}
	if other.Spec.ReadOnly != v.Spec.ReadOnly {
		return plugins.Invalidf("volumes %q and %q of the pod use the same claim, one with readOnly and one without: use the same value in both, and set readOnly in volumeMounts", other.Name, v.Name)
	}
	other.SubPaths = append(other.SubPaths, v.SubPaths...)
	return nil
}

// resolve sets the fields of a volume, as far as they are known.
func (p Populator) resolve(v *PodVolume, source *corev1.Volume, uses []use, objects *manifest.Objects) error {
	if err := checkSegment(string(v.Pod.UID)); err != nil {
		return plugins.Invalidf("metadata.uid %q: %v", v.Pod.UID, err)
	}
	if err := p.specify(v, source); err != nil {
		return err
	}
	if err := checkSegment(v.Spec.Name()); err != nil {
		return plugins.Invalidf("the volume's name %q: %v", v.Spec.Name(), err)
	}
	plugin, err := p.Registry.ForSpec(v.Spec)
	if err != nil {
		return err
	}
	v.Plugin, v.Args = plugin, argsOf(v.Pod)
	v.ID = ID{Pod: v.Pod.UID, Plugin: plugin.Name(), Name: v.Spec.Name(), Block: v.Spec.Block()}
	if v.Device, err = deviceOf(plugin, v.Spec); err != nil {
		return err
	}
	if err := v.checkSupport(); err != nil {
		return err
	}
	return p.resolveUses(v, uses, objects)
}

// checkSupport returns an error if the volume is a PersistentVolume and the plugin does not support
// PersistentVolumes, the access mode ReadWriteOncePod of the claim, or the volumeMode.
func (v *PodVolume) checkSupport() error {
	if v.Spec.PersistentVolume == nil {
		return nil
	}
	persistent, can := v.Plugin.(plugins.PersistentVolumePlugin)
	if !can {
		return plugins.Invalidf("PersistentVolume %s: the plugin %s supports only inline volumes: move the volume into the pod's spec", v.Spec.Name(), v.Plugin.Name())
	}
	if modes := persistent.AccessModes(); v.Exclusive && !slices.Contains(modes, corev1.ReadWriteOncePod) {
		return plugins.Invalidf("accessModes ReadWriteOncePod: the plugin %s supports %v: create the claim with one of those", v.Plugin.Name(), modes)
	}
	if _, can := v.Plugin.(plugins.BlockVolumePlugin); v.ID.Block && !can {
		return plugins.Invalidf("volumeMode Block: the plugin %s does not support raw devices: use volumeMode Filesystem", v.Plugin.Name())
	}
	return nil
}

// argsOf returns the settings of a pod that apply to all its volumes.
func argsOf(pod *corev1.Pod) plugins.MounterArgs {
	args := plugins.MounterArgs{FSGroupChangePolicy: corev1.FSGroupChangeAlways}
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

// specify sets the Spec of v, and the fields that depend on its claim.
func (p Populator) specify(v *PodVolume, source *corev1.Volume) error {
	key := claim.Of(v.Pod, source)
	if key == (types.NamespacedName{}) {
		v.Spec = &plugins.Spec{Volume: source}
		return nil
	}
	pvc, pv, err := p.Claims.Volume(key)
	if err != nil {
		return err
	}
	if source.Ephemeral != nil && !metav1.IsControlledBy(pvc, v.Pod) {
		return plugins.Invalidf("volume %s: ephemeral: claim %s does not belong to this pod: remove the claim's manifest, or rename the pod or the volume", v.Name, key)
	}
	v.Spec = &plugins.Spec{PersistentVolume: pv, ReadOnly: source.PersistentVolumeClaim != nil && source.PersistentVolumeClaim.ReadOnly}
	v.Size = pv.Spec.Capacity[corev1.ResourceStorage]
	v.NeedsNodeExpand = pv.Annotations[plugins.NodeExpandAnnotation] == "true"
	v.Exclusive = slices.Contains(pvc.Spec.AccessModes, corev1.ReadWriteOncePod)
	return nil
}

// deviceOf returns the name of a volume's DeviceVolume, or "". For a PersistentVolume it does not call
// Needs, because Needs fails while the driver does not run, and a device that is set up must be
// identified even then.
func deviceOf(plugin plugins.VolumePlugin, spec *plugins.Spec) (string, error) {
	mountable, ok := plugin.(plugins.DeviceMountableVolumePlugin)
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
	return DeviceName(plugin, name), nil
}

// DeviceName returns the unique name of a DeviceVolume: the plugin's name and the volume name.
func DeviceName(plugin plugins.VolumePlugin, volumeName string) string {
	return plugin.Name() + "/" + volumeName
}

// Needs reports whether a volume must be attached, and whether it must be mounted once for all pods of
// the machine (DeviceMounter).
func Needs(plugin plugins.DeviceMountableVolumePlugin, spec *plugins.Spec) (attach, mount bool, err error) {
	if attachable, ok := plugin.(plugins.AttachableVolumePlugin); ok {
		if attach, err = attachable.NeedsAttach(spec); err != nil {
			return false, false, err
		}
	}
	mount, err = plugin.NeedsDeviceMount(spec)
	return attach, mount, err
}

// checkSegment returns an error if name is not a single path component.
func checkSegment(name string) error {
	if wrong := content.IsPathSegmentName(name); name == "" || len(wrong) > 0 {
		return fmt.Errorf("it must be a file name without slashes: %v", wrong)
	}
	return nil
}

// use is a volumeMount of a container, or a volumeDevice if mount is nil.
type use struct {
	container *corev1.Container
	index     int
	mount     *corev1.VolumeMount
}

// usesOf returns the uses of a pod's volumes, keyed by the volumes' names.
func usesOf(pod *corev1.Pod) map[string][]use {
	uses := map[string][]use{}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			c := &containers[i]
			for j := range c.VolumeMounts {
				m := &c.VolumeMounts[j]
				uses[m.Name] = append(uses[m.Name], use{c, j, m})
			}
			for j, d := range c.VolumeDevices {
				uses[d.Name] = append(uses[d.Name], use{container: c, index: j})
			}
		}
	}
	return uses
}

// resolveUses checks how the containers use a volume, and resolves its subPaths.
func (p Populator) resolveUses(v *PodVolume, uses []use, objects *manifest.Objects) error {
	for _, u := range uses {
		switch {
		case v.ID.Block && u.mount != nil:
			return plugins.Invalidf("volumeMounts of container %q contain volume %q, which is a raw device (volumeMode Block): use volumeDevices", u.container.Name, v.Name)
		case !v.ID.Block && u.mount == nil:
			return plugins.Invalidf("volumeDevices of container %q contain volume %q, which is a filesystem: use volumeMounts, or a claim with volumeMode Block", u.container.Name, v.Name)
		}
		if u.mount == nil {
			continue
		}
		if err := p.addSubPath(v, u, objects); err != nil {
			return err
		}
	}
	return nil
}

// addSubPath adds the subPath of a volumeMount to v, if the volumeMount has one.
func (p Populator) addSubPath(v *PodVolume, u use, objects *manifest.Objects) error {
	sub := u.mount.SubPath
	if expression := u.mount.SubPathExpr; expression != "" {
		machine := environment.Machine{Objects: objects, Node: p.Node, Dir: p.Paths.Root}
		variables, err := machine.Variables(v.Pod, u.container)
		if err != nil {
			return fmt.Errorf("container %q, %w", u.container.Name, err)
		}
		if sub, err = variables.Expand(expression); err != nil {
			return fmt.Errorf("container %q, subPathExpr %q: %w", u.container.Name, expression, err)
		}
	}
	if sub == "" {
		return nil
	}
	if err := checkSegment(u.container.Name); err != nil {
		return plugins.Invalidf("the container's name %q: %v", u.container.Name, err)
	}
	v.SubPaths = append(v.SubPaths, SubPath{
		Container: u.container.Name,
		Index:     u.index,
		MountPath: u.mount.MountPath,
		SubPath:   sub,
		ReadOnly:  u.mount.ReadOnly,
		Path:      filepath.Join(p.Paths.PodSubPaths(v.Pod.UID, v.Spec.Name()), u.container.Name, strconv.Itoa(u.index)),
	})
	return nil
}
