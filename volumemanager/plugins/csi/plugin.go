package csi

import (
	"regexp"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the kubelet's name of the plugin.
const Name = "kubernetes.io/csi"

// Options configures the plugin.
type Options struct {
	// Registry is the directory of the registrars' sockets.
	Registry string
	// Changed is called when a driver is registered or reconnects, because calls that failed before
	// may now succeed. It must not block, and may be nil.
	Changed func()
}

// Plugin is the volume plugin for all CSI drivers. Drivers are registered while Run runs.
type Plugin struct {
	host     plugins.Host
	registry string
	changed  func()
	mountTable

	// recording is read-locked while a record is written, and write-locked while a directory
	// without a readable record is removed.
	recording sync.RWMutex
	// records holds the records by directory. It is complete once scanned is true. scanning is held while
	// the records of earlier processes are read.
	records  sync.Map
	scanning sync.Mutex
	scanned  bool

	mu sync.Mutex
	// drivers holds the registered drivers by name.
	drivers map[string]*driver
	// registrars holds the sockets in the registry by path.
	registrars map[string]*registrarSocket
}

var (
	_ plugins.PersistentVolumePlugin     = (*Plugin)(nil)
	_ plugins.AttachableVolumePlugin     = (*Plugin)(nil)
	_ plugins.PodVolumeNamer             = (*Plugin)(nil)
	_ plugins.BlockVolumePlugin          = (*Plugin)(nil)
	_ plugins.AttachLimiter              = (*Plugin)(nil)
	_ plugins.ProvisionableVolumePlugin  = (*Plugin)(nil)
	_ plugins.DeletableVolumePlugin      = (*Plugin)(nil)
	_ plugins.ExpandableVolumePlugin     = (*Plugin)(nil)
	_ plugins.NodeExpandableVolumePlugin = (*Plugin)(nil)
)

// New creates the plugin.
func New(host plugins.Host, o Options) *Plugin {
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Plugin{host: host, registry: o.Registry, changed: o.Changed, drivers: map[string]*driver{}, registrars: map[string]*registrarSocket{}}
}

// Name returns kubernetes.io/csi.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec has a csi source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	if pv := spec.PersistentVolume; pv != nil {
		return pv.Spec.CSI != nil
	}
	return spec.Volume != nil && spec.Volume.CSI != nil
}

// AccessModes returns all access modes, because the driver decides which of them a volume can have.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod}
}

// Remounts reports whether the driver's CSIDriver object sets requiresRepublish.
func (p *Plugin) Remounts(spec *plugins.Spec) bool {
	republish := p.object(driverOf(spec)).RequiresRepublish
	return republish != nil && *republish
}

// NewMounter validates the fields that are used in paths and in calls.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	v, err := newVolume(spec, pod)
	if err != nil {
		return nil, err
	}
	if v.block {
		return nil, plugins.Invalidf("volume %s: volumeMode Block has no filesystem to mount: use volumeDevices in the container", v.name)
	}
	return &mounter{p, v, pod}, nil
}

// AttachLimit returns the limit from NodeGetInfo; 0 if the driver is not registered.
func (p *Plugin) AttachLimit(spec *plugins.Spec) (limit int64, driver string) {
	name := driverOf(spec)
	d, err := p.driver(name)
	if err != nil {
		return 0, name
	}
	return d.info().limit, name
}

// object returns the spec of the driver's CSIDriver object; empty if there is none.
func (p *Plugin) object(driver string) storagev1.CSIDriverSpec {
	if o := p.host.CSIDriver(driver); o != nil {
		return o.Spec
	}
	return storagev1.CSIDriverSpec{}
}

// driverOf returns the name of a spec's driver.
func driverOf(spec *plugins.Spec) string {
	if pv := spec.PersistentVolume; pv != nil {
		return pv.Spec.CSI.Driver
	}
	return spec.Volume.CSI.Driver
}

// driverName matches domain name notation (csi-spec, GetPluginInfo). The name is also the name of a
// directory.
var driverName = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9.]{0,61}[A-Za-z0-9])?$`)

// validDriver reports whether a driver can have a name. The name volumeDevices is reserved,
// because its directory is next to those of the drivers.
func validDriver(name string) bool { return driverName.MatchString(name) && name != devicesDir }
