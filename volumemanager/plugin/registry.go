package plugin

import (
	"errors"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
)

// Registry has the plugins there are.
type Registry []VolumePlugin

// ErrNoPlugin means: no plugin is for it.
var ErrNoPlugin = errors.New("no volume plugin")

// ForSpec finds the plugin of a spec. None, and two, are errors.
func (r Registry) ForSpec(spec *Spec) (VolumePlugin, error) {
	return r.one("volume "+spec.Name(), func(p VolumePlugin) bool { return p.CanSupport(spec) })
}

// ByName finds a plugin by its name.
func (r Registry) ByName(name string) (VolumePlugin, error) {
	return r.one("plugin "+name, func(p VolumePlugin) bool { return p.Name() == name })
}

// ForClass finds the plugin that provisions a StorageClass's volumes.
func (r Registry) ForClass(class *storagev1.StorageClass) (ProvisionableVolumePlugin, error) {
	found, err := r.one("provisioner "+class.Provisioner, func(p VolumePlugin) bool {
		provisioner, ok := p.(ProvisionableVolumePlugin)
		return ok && provisioner.Provisions(class)
	})
	if err != nil {
		return nil, err
	}
	return found.(ProvisionableVolumePlugin), nil
}

func (r Registry) one(what string, matches func(VolumePlugin) bool) (found VolumePlugin, err error) {
	for _, p := range r {
		if !matches(p) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%s is of two plugins, %s and %s: give it one source", what, found.Name(), p.Name())
		}
		found = p
	}
	if found == nil {
		return nil, fmt.Errorf("%s: %w is for it", what, ErrNoPlugin)
	}
	return found, nil
}
