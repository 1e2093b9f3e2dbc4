package backend

import (
	"cmp"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// CheckCapability refuses a capability that no volume of the kind can have (ErrInvalid).
func (k Kind) CheckCapability(c volume.Capability) error {
	modes := "a SINGLE_NODE mode (ReadWriteOnce, ReadWriteOncePod)"
	for _, mode := range k.SharedModes {
		modes += " or " + string(mode)
	}
	switch {
	case c.Mode.MultiNode() && !slices.Contains(k.SharedModes, c.Mode):
		return volume.Errorf(volume.ErrInvalid, "access mode %s: volumes of backend %s do not support it: use %s, or a backend that shares", c.Mode, k.Name, modes)
	case k.Directories && c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, volumes of backend %s are directories: use volumeMode Filesystem, or a backend with devices", k.Name)
	case k.Directories && c.FSType != "" && !slices.Contains(k.FSTypes, c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty, or use a backend with devices", c.FSType, k.Name)
	case !k.Directories && c.FSType != "" && !volume.ValidFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: want one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	return nil
}

// Supports refuses a capability that a volume cannot have (ErrPrecondition, ErrInvalid for a
// mount flag). A capability without a filesystem requests the volume's own.
func (k Kind) Supports(v volume.Volume, c volume.Capability) error {
	if k.Directories || v.Block == c.Block { // the switch below reports different modes
		if err := k.checkFlags(c.MountFlags, k.flagLists(v.FSType)); err != nil {
			return err
		}
	}
	if c.Mode.MultiNode() && !v.ID.Shared() {
		return volume.Errorf(volume.ErrPrecondition, "access mode %s: volume %s is in a pool of one node, use a SINGLE_NODE mode", c.Mode, v.ID)
	}
	if err := k.CheckCapability(c); err != nil {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %v", v.ID, err)
	}
	switch {
	case k.Directories:
		return nil
	case v.Block != c.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for block %t, volume %s was created with block %t", c.Block, v.ID, v.Block)
	case c.FSType != "" && c.FSType != v.FSType:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for filesystem %q, volume %s was created with %s", c.FSType, v.ID, v.FSType)
	}
	return nil
}

func (k Kind) checkFlags(flags, lists []string) error {
	err := volume.CheckMountFlags(flags, lists...)
	if err == nil && k.CheckMountFlags != nil {
		err = k.CheckMountFlags(flags)
	}
	return err
}

// flagLists are the lists of volume.MountFlags with the flags of a volume.
func (k Kind) flagLists(fsType string) []string {
	if k.Directories {
		return k.MountFlags
	}
	return []string{fsType}
}

// CheckCapabilities refuses (ErrInvalid) capabilities and mount flags that the requested volume
// cannot have. A volume with a source has the source's filesystem if none is requested: then the
// flags of every filesystem are allowed, and staging checks them against the actual one.
func (ks Kinds) CheckCapabilities(spec volume.Spec) error {
	k, err := ks.Named(spec.Parameters.Backend)
	if err != nil {
		return err
	}
	lists := k.flagLists(spec.FSType())
	if !k.Directories && spec.Source != nil && !spec.AsksFSType() {
		lists = volume.FSTypes
	}
	for _, c := range spec.Capabilities {
		if err := cmp.Or(k.CheckCapability(c), k.checkFlags(c.MountFlags, lists)); err != nil {
			return err
		}
	}
	return nil
}
