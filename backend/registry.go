package backend

import (
	"context"
	"slices"

	"github.com/trivet-csi/trivet/volume"
)

// Registry finds the backend for a request.
type Registry struct {
	kinds    Kinds
	backends []Backend // one of each kind, in their order
	recorded bool      // static volumes are not found
}

// Recorded is the registry without static volumes: for who may mount none.
func (r *Registry) Recorded() *Registry {
	return &Registry{kinds: r.kinds, backends: r.backends, recorded: true}
}

// Kinds are the kinds of the backends.
func (r *Registry) Kinds() Kinds { return r.kinds }

// All are the registered backends.
func (r *Registry) All() []Backend { return r.backends }

// ByName finds the backend that a StorageClass names; ErrInvalid if there is
// none.
func (r *Registry) ByName(name string) (Backend, error) {
	if i := slices.IndexFunc(r.backends, func(b Backend) bool { return b.Name() == name }); i >= 0 {
		return r.backends[i], nil
	}
	_, err := r.kinds.Named(name)
	return nil, err
}

// Supports is Kind.Supports for a volume of any backend.
func (r *Registry) Supports(v volume.Volume, c volume.Capability) error {
	k, err := r.kinds.Named(v.ID.Backend)
	if err != nil {
		return err
	}
	return k.Supports(v, c)
}

// ByID parses a volume ID and finds its backend. ErrNotFound if the ID is not
// this driver's; ErrUnavailable if it is, of a backend that this version or
// configuration does not have: the volume may well exist.
func (r *Registry) ByID(text string) (Backend, volume.ID, error) {
	id, err := volume.ParseID(text)
	if err != nil {
		return nil, volume.ID{}, err
	}
	b, err := r.ByName(id.Backend)
	if err != nil {
		return nil, volume.ID{}, volume.Errorf(volume.ErrUnavailable, "volume %s: this driver does not serve its backend %q: run the version that made it", id, id.Backend)
	}
	return b, id, nil
}

// Volume looks a volume up by its ID.
func (r *Registry) Volume(ctx context.Context, text string) (Backend, volume.Volume, error) {
	b, id, err := r.ByID(text)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := b.Get(ctx, id)
	return b, v, err
}

// Described looks a volume up by its ID or, if that is none of this driver's, by the
// context that a static PersistentVolume brings: then it has no record, and is
// static.
func (r *Registry) Described(ctx context.Context, text string, volumeContext map[string]string) (b Backend, v volume.Volume, static bool, err error) {
	b, v, err = r.Volume(ctx, text)
	if err == nil {
		return b, v, false, nil
	}
	if _, foreign := volume.ParseID(text); foreign == nil || r.recorded {
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

// As returns the backends that have an optional power.
func As[T any](r *Registry) []T {
	var with []T
	for _, b := range r.backends {
		if t, ok := b.(T); ok {
			with = append(with, t)
		}
	}
	return with
}
