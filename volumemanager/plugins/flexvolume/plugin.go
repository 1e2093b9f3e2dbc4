package flexvolume

import (
	"fmt"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the name of the plugin family. A pod's directories have the names of the drivers instead.
const Name = "kubernetes.io/flexvolume"

// Plugin is a plugins.Family with a member for each FlexVolume driver.
type Plugin struct{ *drivers }

// drivers is the state that all drivers share.
type drivers struct {
	host         plugins.Host
	nfsUnmounter *mount.NFSUnmounter
	dir          string
	changed      func()
	callTime     time.Duration // the constant callTime except in tests

	mu     sync.Mutex
	probes map[string]*probe // by driver
}

var (
	_ plugins.Family                     = (*Plugin)(nil)
	_ plugins.PersistentVolumePlugin     = (*driver)(nil)
	_ plugins.AttachableVolumePlugin     = (*driver)(nil)
	_ plugins.ExpandableVolumePlugin     = (*driver)(nil)
	_ plugins.NodeExpandableVolumePlugin = (*driver)(nil)
)

// New creates the plugin for the drivers in a directory: a kubelet's --volume-plugin-dir, which
// contains <vendor>~<driver>/<driver> for each. nfsUnmounter unmounts NFS mounts of drivers without the
// call unmount. changed is called when calls that failed before may now succeed: after Run has seen that
// a driver was installed, or after a driver has answered init late.
func New(host plugins.Host, nfsUnmounter *mount.NFSUnmounter, dir string, changed func()) *Plugin {
	return &Plugin{&drivers{host: host, nfsUnmounter: nfsUnmounter, dir: dir, changed: changed, callTime: callTime, probes: map[string]*probe{}}}
}

// Name returns kubernetes.io/flexvolume.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec has a flexVolume, of any driver.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// Of returns the plugin of a spec's driver.
func (p *Plugin) Of(spec *plugins.Spec) plugins.VolumePlugin {
	return &driver{p.drivers, sourceOf(spec).Driver}
}

// Named returns the plugin of the driver <vendor>/<driver>; nil if the name is invalid.
func (p *Plugin) Named(name string) plugins.VolumePlugin {
	if checkDriver(name) != nil {
		return nil
	}
	return &driver{p.drivers, name}
}

// NewMounter returns the Mounter of the spec's driver.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return p.Of(spec).NewMounter(spec, pod)
}

// NewUnmounter returns an error, because a volume belongs to a driver, not to the family.
func (p *Plugin) NewUnmounter(name string, _ types.UID) (plugins.Unmounter, error) {
	return nil, fmt.Errorf("volume %s: it belongs to a driver of %s: use the plugin of the driver", name, Name)
}

// Remounts returns false, as the plugins of all drivers do.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// driver is the plugin of one driver.
type driver struct {
	*drivers
	name string
}

// Name returns <vendor>/<driver>.
func (d *driver) Name() string { return d.name }

// CanSupport reports whether a spec names the driver.
func (d *driver) CanSupport(spec *plugins.Spec) bool {
	s := sourceOf(spec)
	return s != nil && s.Driver == d.name
}

// AccessModes returns the modes that a kubelet assumes for drivers.
func (d *driver) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany}
}

// Remounts returns false, because drivers do not report changes.
func (d *driver) Remounts(*plugins.Spec) bool { return false }

// executable returns <dir>/<vendor>~<driver>/<driver>.
func (d *driver) executable() string {
	return filepath.Join(d.dir, plugins.Escape(d.name), filepath.Base(d.name))
}

// driverPattern matches a driver's name with an optional vendor. ownPattern matches the names of the
// kubelet's own plugins, which no driver may have.
var (
	driverPattern = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*$`)
	ownPattern    = regexp.MustCompile(`^kubernetes\.io(/|$)`)
)

// maxDriver is the maximum length of a driver's name in bytes. It is below the maximum length of a
// directory name (NAME_MAX, linux/limits.h).
const maxDriver = 240

func checkDriver(name string) error {
	if !driverPattern.MatchString(name) || ownPattern.MatchString(name) || len(name) > maxDriver {
		return plugins.Invalidf("flexVolume.driver %q: want <vendor>/<driver>, of letters, digits and . _ -", name)
	}
	return nil
}
