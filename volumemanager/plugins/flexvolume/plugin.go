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

// Name is that of all drivers together; pods' directories have those of each.
const Name = "kubernetes.io/flexvolume"

// Plugin is FlexVolume, a plugins.Family with a member for each driver.
type Plugin struct{ *drivers }

// drivers is what they have in common.
type drivers struct {
	host     plugins.Host
	servers  *mount.NFSUnmounter
	dir      string
	changed  func()
	callTime time.Duration // see callTime

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

// New makes the plugin for the drivers in a directory: a kubelet's --volume-plugin-dir,
// which has <vendor>~<driver>/<driver> for each. servers takes those NFS mounts away that a
// driver leaves to others. changed is called when what failed may go now: a driver is
// there, or has answered late; the first as long as Run runs.
func New(host plugins.Host, servers *mount.NFSUnmounter, dir string, changed func()) *Plugin {
	return &Plugin{&drivers{host: host, servers: servers, dir: dir, changed: changed, callTime: callTime, probes: map[string]*probe{}}}
}

// Name is kubernetes.io/flexvolume.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec has a flexVolume, of whatever driver.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// Of is the plugin of a spec's driver.
func (p *Plugin) Of(spec *plugins.Spec) plugins.VolumePlugin {
	return &driver{p.drivers, sourceOf(spec).Driver}
}

// Named is the plugin of a driver: <vendor>/<driver>.
func (p *Plugin) Named(name string) plugins.VolumePlugin {
	if checkDriver(name) != nil {
		return nil
	}
	return &driver{p.drivers, name}
}

// NewMounter is that of the spec's driver.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return p.Of(spec).NewMounter(spec, pod)
}

// NewUnmounter has no driver whose volume that could be.
func (p *Plugin) NewUnmounter(name string, _ types.UID) (plugins.Unmounter, error) {
	return nil, fmt.Errorf("volume %s: %s has drivers, and it is of one of them: ask that", name, Name)
}

// Remounts is false, as it is of all drivers.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// driver is the plugin of one driver.
type driver struct {
	*drivers
	name string
}

// Name is the driver's: <vendor>/<driver>.
func (d *driver) Name() string { return d.name }

// CanSupport tells whether a spec names the driver.
func (d *driver) CanSupport(spec *plugins.Spec) bool {
	s := sourceOf(spec)
	return s != nil && s.Driver == d.name
}

// AccessModes are those that a kubelet takes drivers for able of.
func (d *driver) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany}
}

// Remounts is false: no driver tells of changes.
func (d *driver) Remounts(*plugins.Spec) bool { return false }

// executable is <dir>/<vendor>~<driver>/<driver>.
func (d *driver) executable() string {
	return filepath.Join(d.dir, plugins.Escape(d.name), filepath.Base(d.name))
}

// driverPattern is a name, perhaps with a vendor before it. No name begins with what the
// kubelet's own plugins have for a vendor.
var (
	driverPattern = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*$`)
	ownPattern    = regexp.MustCompile(`^kubernetes\.io(/|$)`)
)

// maxDriver is the length of a directory's name (NAME_MAX, linux/limits.h) but for some.
const maxDriver = 240

func checkDriver(name string) error {
	if !driverPattern.MatchString(name) || ownPattern.MatchString(name) || len(name) > maxDriver {
		return plugins.Invalidf("flexVolume.driver %q: want <vendor>/<driver>, of letters, digits and . _ -", name)
	}
	return nil
}
