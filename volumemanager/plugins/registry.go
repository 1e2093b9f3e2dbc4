package plugins

import (
	"errors"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
)

// Registry holds the plugins.
type Registry []VolumePlugin

// Family is a plugin with one member for each of its drivers (FlexVolume drivers), which are installed
// and removed while the manager runs. It supports the specs of all members. A Registry returns members,
// never the family.
type Family interface {
	VolumePlugin
	// Of returns the member for a spec that the family supports.
	Of(spec *Spec) VolumePlugin
	// Named returns the member with a name; nil if no driver of the family can have the name.
	Named(name string) VolumePlugin
	// Members returns the members that have volumes on this node according to their records.
	Members() ([]VolumePlugin, error)
}

// ErrNoPlugin means that no plugin supports an object.
var ErrNoPlugin = errors.New("no volume plugin")

// All returns the plugins. In place of each family, it returns the family's members. After an error,
// members of a family may be missing.
func (r Registry) All() (all []VolumePlugin, err error) {
	for _, p := range r {
		family, ok := p.(Family)
		if !ok {
			all = append(all, p)
			continue
		}
		members, membersErr := family.Members()
		all, err = append(all, members...), errors.Join(err, membersErr)
	}
	return all, err
}

// ForSpec returns the plugin of a spec. It returns an error if no plugin or several plugins support
// the spec.
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

// ByName returns the plugin or the member with a name.
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

// ForClass returns the plugin that provisions the volumes of a StorageClass.
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

// one returns the only result of pick that is not nil. The errors contain the object that needs the plugin.
func (r Registry) one(object string, pick func(VolumePlugin) VolumePlugin) (found VolumePlugin, err error) {
	for _, p := range r {
		p = pick(p)
		if p == nil {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%s belongs to two plugins, %s and %s: use only one of them", object, found.Name(), p.Name())
		}
		found = p
	}
	if found == nil {
		return nil, fmt.Errorf("%s: %w supports it", object, ErrNoPlugin)
	}
	return found, nil
}
