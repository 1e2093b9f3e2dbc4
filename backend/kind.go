package backend

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Kind describes one kind of volume to code that is independent of the kind.
type Kind struct {
	// Name is the kind's name in StorageClasses, volume IDs and metrics.
	Name string
	// Doc is a phrase that describes the volumes, for docs/reference/parameters.md.
	Doc string
	// Media are the kinds of pools that can contain the kind's volumes. If they include exports,
	// the kind has the parameters server and share.
	Media []pool.Kind
	// PoolSection returns a pointer to an empty section of a pool's configuration, to decode
	// into. It is set only if Media is a single kind of pool that only this kind of volume uses.
	PoolSection func() pool.Section
	// Section returns a pointer to an empty section of a volume's record, to decode into; nil
	// if the kind has none.
	Section func() volume.Section
	// Directories means that the volumes are directories. Otherwise each volume has a device.
	Directories bool
	// FSTypes are the values of fsType that a request for a directory may have.
	FSTypes []string
	// MountFlags are the keys of volume.MountFlags whose flags the directories accept. A volume
	// that has a device accepts the flags of its filesystem.
	MountFlags []string
	// CheckMountFlags refuses flags of those lists that the directories do not support
	// (ErrInvalid). It may be nil.
	CheckMountFlags func(flags []string) error
	// SharedModes are the MULTI_NODE access modes that volumes in an export support.
	SharedModes []volume.AccessMode
	// Parameters are the StorageClass parameters of the kind, without those that Takes adds.
	Parameters []Parameter
	// Check refuses parameters that contradict each other (ErrInvalid). It may be nil.
	Check func(volume.Parameters) error
	// Examine reports for trivet doctor whether this node meets the requirements of the kind.
	// It may be nil. A kind with a PoolSection is examined only if such a pool is configured.
	Examine func() []Finding
	// New creates the backend. It does not fail: a pool that cannot be used is reported as the
	// state of that pool.
	New func(*pool.Set) Backend
}

// Finding is a result of Kind.Examine.
type Finding struct {
	// Name is the examined requirement, Found its state.
	Name, Found string
	// Advice says how to fix the state; empty if nothing is wrong.
	Advice string
	// Unusable means that the kind's volumes cannot be used on this node.
	Unusable bool
}

// OnlyOnExports reports whether only exports can contain the kind's volumes.
func (k Kind) OnlyOnExports() bool {
	return len(k.Media) > 0 && !slices.ContainsFunc(k.Media, func(m pool.Kind) bool { return m != pool.KindExport })
}

// OnExports reports whether exports can contain the kind's volumes.
func (k Kind) OnExports() bool { return k.Uses(string(pool.KindExport)) }

// Uses reports whether pools of a kind (pool.Kind) can contain the kind's volumes.
func (k Kind) Uses(poolKind string) bool { return slices.Contains(k.Media, pool.Kind(poolKind)) }

// Takes returns all documented StorageClass parameters of the kind.
func (k Kind) Takes() []Parameter {
	all := commonParameters
	if k.OnExports() {
		all = slices.Concat(all, exportParameters)
	}
	if !k.OnlyOnExports() {
		all = slices.Concat(all, []Parameter{nodeLoss})
	}
	all = slices.Concat(all, k.Parameters)
	if !k.Directories {
		all = slices.Concat(all, ioLimits)
	}
	return all
}

// parameter finds a parameter that the kind accepts, whether or not it is documented.
func (k Kind) parameter(key string) (Parameter, bool) {
	all := append(k.Takes(), namespaceParameter)
	i := slices.IndexFunc(all, func(p Parameter) bool { return p.Key == key })
	if i < 0 {
		return Parameter{}, false
	}
	return all[i], true
}

// Kinds are the kinds that a program serves, in the order in which they are listed. The first is
// the default for a StorageClass without a backend.
type Kinds []Kind

// PoolSection returns an empty configuration section for a kind of pool; nil if it has none.
func (ks Kinds) PoolSection(kind pool.Kind) pool.Section {
	for _, k := range ks {
		if k.PoolSection != nil && k.Media[0] == kind {
			return k.PoolSection()
		}
	}
	return nil
}

// Registry creates the backend of each kind.
func (ks Kinds) Registry(pools *pool.Set) *Registry {
	r := &Registry{kinds: ks}
	for _, k := range ks {
		r.backends = append(r.backends, k.New(pools))
	}
	return r
}

// Forms returns the formats of the kinds' records.
func (ks Kinds) Forms() volume.Forms {
	var forms volume.Forms
	for _, k := range ks {
		forms = append(forms, volume.Form{
			Name: k.Name, Directory: k.Directories, Section: k.Section,
			OnNodes: slices.Contains(k.Media, pool.KindDirectory), OnExports: k.OnExports(),
		})
	}
	return forms
}

// Names returns the names of the kinds.
func (ks Kinds) Names() []string {
	var names []string
	for _, k := range ks {
		names = append(names, k.Name)
	}
	return names
}

// Named returns the kind with the name of a StorageClass parameter (ErrInvalid if there is none).
func (ks Kinds) Named(name string) (Kind, error) {
	i := slices.IndexFunc(ks, func(k Kind) bool { return k.Name == name })
	if i >= 0 {
		return ks[i], nil
	}
	return Kind{}, volume.Errorf(volume.ErrInvalid, "parameter %s=%.80q: the backends of this driver are %s%s",
		volume.ParamBackend, name, strings.Join(ks.Names(), ", "), didYouMean(name, ks.Names()))
}

// OnNodes returns the kinds whose volumes can be in pools of a node.
func (ks Kinds) OnNodes() Kinds { return slices.DeleteFunc(slices.Clone(ks), Kind.OnlyOnExports) }

// Needed returns the kinds without those that have pools of their own, of which none is configured.
func (ks Kinds) Needed(pools []pool.Config) Kinds {
	return slices.DeleteFunc(slices.Clone(ks), func(k Kind) bool {
		return k.PoolSection != nil && !slices.ContainsFunc(pools, func(c pool.Config) bool { return c.Kind() == k.Media[0] })
	})
}

// For returns the first kind whose volumes can be in a pool with this configuration.
func (ks Kinds) For(c pool.Config) (Kind, bool) {
	i := slices.IndexFunc(ks, func(k Kind) bool { return slices.Contains(k.Media, c.Kind()) })
	if i < 0 {
		return Kind{}, false
	}
	return ks[i], true
}

// Shared reports whether volumes with these parameters are on an export. It does not know the pools of
// the configuration: use it for parameters whose pool is not in the configuration.
func (ks Kinds) Shared(p volume.Parameters) bool {
	k, err := ks.Named(p.Backend)
	return volume.IsDirectPool(p.Pool) || err == nil && k.OnlyOnExports()
}

// didYouMean is the end of an error about an unknown word; empty if no known word is similar.
func didYouMean(word string, known []string) string {
	if nearest, near := volume.Nearest(word, known); near {
		return "; did you mean " + nearest + "?"
	}
	return ""
}

// CheckCapability refuses a capability that no volume of the kind can have (ErrInvalid).
func (k Kind) CheckCapability(c volume.Capability) error {
	modes := "a SINGLE_NODE mode (ReadWriteOnce, ReadWriteOncePod)"
	for _, mode := range k.SharedModes {
		modes += " or " + string(mode)
	}
	switch {
	case c.Mode.MultiNode() && !slices.Contains(k.SharedModes, c.Mode):
		return volume.Errorf(volume.ErrInvalid, "access mode %s: volumes of backend %s do not support it: use %s, or for ReadWriteMany a backend that supports it", c.Mode, k.Name, modes)
	case k.Directories && c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability requests a raw device, but volumes of backend %s are directories: use volumeMode Filesystem, or a backend with devices", k.Name)
	case k.Directories && c.FSType != "" && !slices.Contains(k.FSTypes, c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty, or use a backend with devices", c.FSType, k.Name)
	case !k.Directories && c.FSType != "" && !volume.ValidFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: expected one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	return nil
}

// Supports refuses a capability that a volume cannot have (ErrPrecondition, ErrInvalid for a
// mount flag). A capability without a filesystem type matches every filesystem type.
func (k Kind) Supports(v volume.Volume, c volume.Capability) error {
	if k.Directories || v.Block == c.Block { // the switch below reports different volume modes
		if err := k.checkFlags(c.MountFlags, k.flagLists(v.FSType)); err != nil {
			return err
		}
	}
	if c.Mode.MultiNode() && !v.ID.Shared() {
		return volume.Errorf(volume.ErrPrecondition, "access mode %s: volume %s is in a pool of one node: use a SINGLE_NODE mode", c.Mode, v.ID)
	}
	if err := k.CheckCapability(c); err != nil {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %v", v.ID, err)
	}
	switch {
	case k.Directories:
		return nil
	case v.Block != c.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability requests block %t, but volume %s was created with block %t", c.Block, v.ID, v.Block)
	case c.FSType != "" && c.FSType != v.FSType:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability requests filesystem %q, but volume %s was created with %s", c.FSType, v.ID, v.FSType)
	}
	return nil
}

// checkFlags refuses mount flags that are not in the given lists (keys of volume.MountFlags), or that
// CheckMountFlags refuses (ErrInvalid).
func (k Kind) checkFlags(flags, lists []string) error {
	err := volume.CheckMountFlags(flags, lists...)
	if err == nil && k.CheckMountFlags != nil {
		err = k.CheckMountFlags(flags)
	}
	return err
}

// flagLists returns the keys of volume.MountFlags whose flags a volume accepts.
func (k Kind) flagLists(fsType string) []string {
	if k.Directories {
		return k.MountFlags
	}
	return []string{fsType}
}

// CheckCapabilities refuses (ErrInvalid) capabilities and mount flags that the requested volume
// cannot have. If no filesystem is requested, a volume with a source has the filesystem of the source,
// which is not known yet. In this case the flags of every filesystem are allowed, and staging checks
// them against the actual filesystem.
func (ks Kinds) CheckCapabilities(spec volume.Spec) error {
	k, err := ks.Named(spec.Parameters.Backend)
	if err != nil {
		return err
	}
	lists := k.flagLists(spec.FSType())
	if !k.Directories && spec.Source != nil && !spec.NamesFSType() {
		lists = volume.FSTypes
	}
	for _, c := range spec.Capabilities {
		if err := cmp.Or(k.CheckCapability(c), k.checkFlags(c.MountFlags, lists)); err != nil {
			return err
		}
	}
	return nil
}

// Registry finds the backend of a volume or a request.
type Registry struct {
	kinds         Kinds
	backends      []Backend // one for each kind, in the order of kinds
	withoutStatic bool      // Described finds no static volumes
}

// WithoutStatic returns a registry that finds no static volumes, for callers that must not mount them.
func (r *Registry) WithoutStatic() *Registry {
	return &Registry{kinds: r.kinds, backends: r.backends, withoutStatic: true}
}

// Kinds returns the kinds of the backends.
func (r *Registry) Kinds() Kinds { return r.kinds }

// All returns the registered backends.
func (r *Registry) All() []Backend { return r.backends }

// ByName returns the backend with a name (ErrInvalid if there is none).
func (r *Registry) ByName(name string) (Backend, error) {
	if i := slices.IndexFunc(r.backends, func(b Backend) bool { return b.Name() == name }); i >= 0 {
		return r.backends[i], nil
	}
	_, err := r.kinds.Named(name)
	return nil, err
}

// CheckCapability refuses a capability that no volume of a backend can have (Kind.CheckCapability).
func (r *Registry) CheckCapability(b Backend, c volume.Capability) error {
	return r.kinds[slices.Index(r.backends, b)].CheckCapability(c)
}

// Supports refuses a capability that a volume cannot have (Kind.Supports).
func (r *Registry) Supports(v volume.Volume, c volume.Capability) error {
	k, err := r.kinds.Named(v.ID.Backend)
	if err != nil {
		return err
	}
	return k.Supports(v, c)
}

// ByID parses a volume ID and finds its backend. It returns ErrNotFound if the ID is not from this
// driver. It returns ErrUnavailable if this version of the driver does not have the backend, because
// the volume may exist.
func (r *Registry) ByID(text string) (Backend, volume.ID, error) {
	id, err := volume.ParseID(text)
	if err != nil {
		return nil, volume.ID{}, err
	}
	b, err := r.ByName(id.Backend)
	if err != nil {
		return nil, volume.ID{}, volume.Errorf(volume.ErrUnavailable, "volume %s: this driver does not serve its backend %q: run the version that created it", id, id.Backend)
	}
	return b, id, nil
}

// Volume looks up a volume by its ID.
func (r *Registry) Volume(ctx context.Context, text string) (Backend, volume.Volume, error) {
	b, id, err := r.ByID(text)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := b.Get(ctx, id)
	return b, v, err
}

// Described looks up a volume by its ID. If the ID is not from this driver, Described reads the volume
// from volumeContext, the volume attributes of a static PersistentVolume; static is true for such a
// volume, which has no record.
func (r *Registry) Described(ctx context.Context, text string, volumeContext map[string]string) (b Backend, v volume.Volume, static bool, err error) {
	b, v, err = r.Volume(ctx, text)
	if err == nil {
		return b, v, false, nil
	}
	if _, invalid := volume.ParseID(text); invalid == nil || r.withoutStatic {
		return b, v, false, err
	}
	for _, b := range r.backends {
		provider, ok := b.(StaticProvider)
		if !ok {
			continue
		}
		if v, ok, err := provider.StaticVolume(text, volumeContext); ok || err != nil {
			return b, v, true, err
		}
	}
	return b, v, false, err
}

// As returns the backends that implement the optional interface T.
func As[T any](r *Registry) []T {
	var with []T
	for _, b := range r.backends {
		if t, ok := b.(T); ok {
			with = append(with, t)
		}
	}
	return with
}

// Thaw thaws the filesystems that stayed frozen because a process was killed during a snapshot. ready
// waits until the pools are open; if it returns an error, Thaw does nothing.
func (r *Registry) Thaw(ctx context.Context, ready func(context.Context) error) {
	if ready(ctx) != nil {
		return
	}
	for _, b := range As[Thawer](r) {
		if err := b.Thaw(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Thawing the filesystems that a killed process left frozen failed")
		}
	}
}
