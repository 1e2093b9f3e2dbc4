package csi

import (
	"regexp"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the plugin's, as the kubelet has it.
const Name = "kubernetes.io/csi"

// Options is what the plugin is told of its host.
type Options struct {
	// Registry is the directory where registrars put their sockets.
	Registry string
	// Changed, if there is one, is called when a driver has come, or has come back: calls
	// that failed for want of it may be tried again. It must not wait.
	Changed func()
}

// Plugin is the volume plugin for all CSI drivers. It knows none before Run.
type Plugin struct {
	host     plugins.Host
	registry string
	changed  func()
	looks

	// recording is held while a record is written; to write, while a directory goes that has
	// none that can be read.
	recording sync.RWMutex
	// records has those there are, by their directories, once they were scanned.
	records  sync.Map
	scanning sync.Mutex
	scanned  bool

	mu sync.Mutex
	// drivers has those that are registered, by name.
	drivers map[string]*driver
	// listings has a registrar for each socket, by path.
	listings map[string]*listing
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

// New makes the plugin.
func New(host plugins.Host, o Options) *Plugin {
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Plugin{host: host, registry: o.Registry, changed: o.Changed, drivers: map[string]*driver{}, listings: map[string]*listing{}}
}

// Name is kubernetes.io/csi.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec has a csi source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	if pv := spec.PersistentVolume; pv != nil {
		return pv.Spec.CSI != nil
	}
	return spec.Volume != nil && spec.Volume.CSI != nil
}

// AccessModes are all there are: which of them a volume can have is its driver's matter.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod}
}

// Remounts tells whether the driver's CSIDriver object asks for requiresRepublish.
func (p *Plugin) Remounts(spec *plugins.Spec) bool {
	republish := p.object(driverOf(spec)).RequiresRepublish
	return republish != nil && *republish
}

// NewMounter checks the fields that paths and calls are made of.
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

// AttachLimit is what the driver said to NodeGetInfo; 0 also while it is not registered.
func (p *Plugin) AttachLimit(spec *plugins.Spec) (limit int64, driver string) {
	name := driverOf(spec)
	d, err := p.driver(name)
	if err != nil {
		return 0, name
	}
	return d.ability().limit, name
}

// object is the specification in the driver's CSIDriver object; empty if there is none.
func (p *Plugin) object(driver string) storagev1.CSIDriverSpec {
	if o := p.host.CSIDriver(driver); o != nil {
		return o.Spec
	}
	return storagev1.CSIDriverSpec{}
}

func driverOf(spec *plugins.Spec) string {
	if pv := spec.PersistentVolume; pv != nil {
		return pv.Spec.CSI.Driver
	}
	return spec.Volume.CSI.Driver
}

// driverName is csi-spec, GetPluginInfo: domain name notation. It becomes a directory.
var driverName = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9.]{0,61}[A-Za-z0-9])?$`)

// validDriver tells whether a name can be a driver's: volumeDevices is a directory beside
// theirs.
func validDriver(name string) bool { return driverName.MatchString(name) && name != devicesDir }
