package plugins

import (
	"errors"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
)

// Registry has the plugins there are.
type Registry []VolumePlugin

// Family is a plugin that stands for others, one for each of its drivers, which come and
// go while the manager runs. A Registry gives those and never the family, which supports
// the specs of all of them.
type Family interface {
	VolumePlugin
	// Of is the plugin of a spec that the family supports.
	Of(spec *Spec) VolumePlugin
	// Named is the plugin of a name; nil if no driver of the family can have it.
	Named(name string) VolumePlugin
	// Members are those that have volumes on this machine, as the disk has it.
	Members() ([]VolumePlugin, error)
}

// ErrNoPlugin means: no plugin is for it.
var ErrNoPlugin = errors.New("no volume plugin")

// All are the plugins, with the members of families in their place. The error is of
// those that could not be found.
func (r Registry) All() (all []VolumePlugin, err error) {
	for _, p := range r {
		family, ok := p.(Family)
		if !ok {
			all = append(all, p)
			continue
		}
		members, failed := family.Members()
		all, err = append(all, members...), errors.Join(err, failed)
	}
	return all, err
}

// ForSpec finds the plugin of a spec. None, and two, are errors.
func (r Registry) ForSpec(spec *Spec) (VolumePlugin, error) {
	return r.one("volume "+spec.Name(), func(p VolumePlugin) VolumePlugin {
		family, ok := p.(Family)
		switch {
		case !p.CanSupport(spec):
			return nil
		case ok:
			return family.Of(spec)
		}
		return p
	})
}

// ByName finds a plugin by its name.
func (r Registry) ByName(name string) (VolumePlugin, error) {
	return r.one("plugin "+name, func(p VolumePlugin) VolumePlugin {
		family, ok := p.(Family)
		switch {
		case ok:
			return family.Named(name)
		case p.Name() == name:
			return p
		}
		return nil
	})
}

// ForClass finds the plugin that provisions a StorageClass's volumes.
func (r Registry) ForClass(class *storagev1.StorageClass) (ProvisionableVolumePlugin, error) {
	found, err := r.one("provisioner "+class.Provisioner, func(p VolumePlugin) VolumePlugin {
		if provisioner, ok := p.(ProvisionableVolumePlugin); ok && provisioner.Provisions(class) {
			return p
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return found.(ProvisionableVolumePlugin), nil
}

// one is the only plugin that pick makes of those there are.
func (r Registry) one(what string, pick func(VolumePlugin) VolumePlugin) (found VolumePlugin, err error) {
	for _, p := range r {
		p = pick(p)
		if p == nil {
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
