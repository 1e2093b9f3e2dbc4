package backend

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// Registry finds the backend of a volume or a request.
type Registry struct {
	kinds         Kinds
	backends      []Backend // one of each kind, in their order
	withoutStatic bool      // static volumes are not found
}

// WithoutStatic returns a registry that finds no static volumes. Callers that must not mount static
// volumes use it.
func (r *Registry) WithoutStatic() *Registry {
	return &Registry{kinds: r.kinds, backends: r.backends, withoutStatic: true}
}

// Kinds are the kinds of the backends.
func (r *Registry) Kinds() Kinds { return r.kinds }

// All are the registered backends.
func (r *Registry) All() []Backend { return r.backends }

// ByName returns the backend with a name (ErrInvalid).
func (r *Registry) ByName(name string) (Backend, error) {
	if i := slices.IndexFunc(r.backends, func(b Backend) bool { return b.Name() == name }); i >= 0 {
		return r.backends[i], nil
	}
	_, err := r.kinds.Named(name)
	return nil, err
}

// CheckCapability calls Kind.CheckCapability of the kind of a backend.
func (r *Registry) CheckCapability(b Backend, c volume.Capability) error {
	return r.kinds[slices.Index(r.backends, b)].CheckCapability(c)
}

// Supports calls Kind.Supports of the volume's kind.
func (r *Registry) Supports(v volume.Volume, c volume.Capability) error {
	k, err := r.kinds.Named(v.ID.Backend)
	if err != nil {
		return err
	}
	return k.Supports(v, c)
}

// ByID parses a volume ID and finds its backend. It returns ErrNotFound if this driver did not
// create the ID. It returns ErrUnavailable if this version or configuration does not have the
// backend, because the volume may exist.
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

// Described looks up a volume by its ID. If this driver did not create the ID, Described reads the
// volume from volumeContext, the volume attributes of a static PersistentVolume. Such a volume has
// no record, and static is true.
func (r *Registry) Described(ctx context.Context, text string, volumeContext map[string]string) (b Backend, v volume.Volume, static bool, err error) {
	b, v, err = r.Volume(ctx, text)
	if err == nil {
		return b, v, false, nil
	}
	if _, foreign := volume.ParseID(text); foreign == nil || r.withoutStatic {
		return b, v, false, err
	}
	for _, b := range r.backends {
		provider, can := b.(StaticProvider)
		if !can {
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

// Thaw thaws the filesystems that a process left frozen when it was killed during a snapshot. It
// waits until ready returns nil: then the pools are open.
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
