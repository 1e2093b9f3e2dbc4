package nodeserver

import (
	"context"
	"errors"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// memoryName is what the mount table calls an inline volume in memory: all that there
// is to know it by.
func memoryName(id string) string { return "trivet:" + id }

// publishMemory mounts an inline volume in memory. There is nothing of it but the mount.
func (s *Server) publishMemory(r request, in volume.Inline, at mount.Info) error {
	if err := checkMemory(r); err != nil {
		return err
	}
	if at.IsMount {
		return checkPublishedMemory(r, in)
	}
	if err := s.allowsMemory(in); err != nil {
		return err
	}
	made, err := prepareDir(r.field, r.target, at)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.PublishTarget)
	err = mountMemory(r, in)
	if err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(r.target))
	}
	return err
}

// allowsMemory refuses what the configuration does not allow a new volume.
func (s *Server) allowsMemory(in volume.Inline) error {
	switch {
	case s.InlineMemory == 0:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: this node has no inline volumes in memory: set ephemeralMemory in the driver's configuration", volume.AttrMedium)
	case in.Size > s.InlineMemory:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: a volume in memory has at most %s here, asked for are %s: ask for less, or raise ephemeralMemory in the driver's configuration", volume.AttrSize, volume.FormatSize(s.InlineMemory), volume.FormatSize(in.Size))
	}
	return nil
}

func checkMemory(r request) error {
	switch {
	case r.capability.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: a volume in memory has none: leave it empty", r.capability.FSType)
	case r.capability.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume in memory is on one node: use a SINGLE_NODE mode", r.capability.Mode)
	}
	return nil
}

func mountMemory(r request, in volume.Inline) (err error) {
	fs, err := mount.Memory(memoryName(r.id), mount.MemoryFor(in.Size), r.options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	crashpoint.Here(crashpoint.StageMounted)
	return fs.MoveTo(r.target)
}

// checkPublishedMemory tells whether what is mounted at the target is what is asked for.
func checkPublishedMemory(r request, in volume.Inline) error {
	e, err := mount.OnPath(r.target)
	if err != nil {
		return err
	}
	if !mount.IsMemory(e, memoryName(r.id)) {
		return errOtherMount(r)
	}
	same, err := mount.IsMemoryAs(r.target, in.Size, r.options)
	if err == nil && !same {
		err = volume.Errorf(volume.ErrIncompatible, "volume %s is published at %q otherwise than asked for (%d bytes, readonly %t): unpublish it first", r.id, r.target, in.Size, r.readOnly)
	}
	return err
}

// unpublishMemory unmounts a volume in memory, and so removes it.
func unpublishMemory(ctx context.Context, target string) error {
	if err := unmount(ctx, targetField, target, func() (bool, error) { return true, nil }); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnpublishGone)
	if err := removeTarget(target); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnpublishDone)
	return nil
}
