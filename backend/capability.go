package backend

import (
	"slices"

	"github.com/trivet-csi/trivet/volume"
)

// Supports tells why a volume cannot be used as c asks (ErrPrecondition, ErrInvalid for a
// mount flag), or nil. A capability without a filesystem asks for the volume's own.
func (k Kind) Supports(v volume.Volume, c volume.Capability) error {
	if k.Directories || v.Block == c.Block { // the modes differ otherwise, which is reported below
		if err := volume.CheckMountFlags(c.MountFlags, k.flagLists(v.FSType)...); err != nil {
			return err
		}
	}
	modes := "a SINGLE_NODE mode"
	for _, mode := range k.SharedModes {
		modes += " or " + string(mode)
	}
	switch {
	case c.Mode.MultiNode() && !v.ID.Shared():
		return volume.Errorf(volume.ErrPrecondition, "access mode %s: volume %s is in a pool of one node, use a SINGLE_NODE mode", c.Mode, v.ID)
	case c.Mode.MultiNode() && !slices.Contains(k.SharedModes, c.Mode):
		return volume.Errorf(volume.ErrPrecondition, "access mode %s: volume %s is of backend %s: use %s", c.Mode, v.ID, k.Name, modes)
	case k.Directories && c.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for a raw device, volume %s is a directory: use volumeMode Filesystem", v.ID)
	case k.Directories && c.FSType != "" && !slices.Contains(k.FSTypes, c.FSType):
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for filesystem %q, volume %s is a directory and has none of its own: leave fsType empty", c.FSType, v.ID)
	case k.Directories:
		return nil
	case v.Block != c.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for block %t, volume %s was made with block %t", c.Block, v.ID, v.Block)
	case c.FSType != "" && c.FSType != v.FSType:
		return volume.Errorf(volume.ErrPrecondition, "volume_capability asks for filesystem %q, volume %s was made with %s", c.FSType, v.ID, v.FSType)
	}
	return nil
}

// flagLists are the lists of volume.MountFlags with the flags of a volume.
func (k Kind) flagLists(fsType string) []string {
	if k.Directories {
		return k.MountFlags
	}
	return []string{fsType}
}

// CheckMountFlags refuses (ErrInvalid) mount flags that the requested volume cannot have. A
// volume with a source has the source's filesystem if none is requested: then the flags of
// every filesystem are allowed, and staging checks them against the actual one.
func (ks Kinds) CheckMountFlags(spec volume.Spec) error {
	k, err := ks.Named(spec.Parameters.Backend)
	if err != nil {
		return err
	}
	lists := k.flagLists(spec.FSType())
	if !k.Directories && spec.Source != nil && !spec.AsksFSType() {
		lists = volume.FSTypes
	}
	for _, c := range spec.Capabilities {
		if err := volume.CheckMountFlags(c.MountFlags, lists...); err != nil {
			return err
		}
	}
	return nil
}
