package nodeserver

import (
	"context"
	"errors"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// memoryName is what the mount table calls an inline volume in memory. Nothing else
// identifies it.
func memoryName(id string) string { return "trivet:" + id }

// publishMemory mounts an inline volume in memory. It consists of the mount alone.
func (s *Server) publishMemory(ctx context.Context, r request, in volume.Inline, at mount.Info) error {
	if err := checkMemory(r); err != nil {
		return err
	}
	source := &mount.MemorySource{Name: memoryName(r.id), Size: in.Size}
	if at.IsMount {
		return checkPublishedMemory(r, source)
	}
	if err := s.allowsMemory(in); err != nil {
		return err
	}
	made, err := prepareDir(r.field, r.target, at)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.PublishTarget)
	err = source.Mount(ctx, r.target, r.options)
	if err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(r.target))
	}
	return err
}

// allowsMemory refuses a new volume that the configuration does not allow.
func (s *Server) allowsMemory(in volume.Inline) error {
	switch {
	case s.InlineMemory == 0:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: this node has no inline volumes in memory: set ephemeralMemory in the driver's configuration", volume.AttrMedium)
	case in.Size > s.InlineMemory:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: a volume in memory has at most %s here, requested are %s: request less, or raise ephemeralMemory in the driver's configuration", volume.AttrSize, volume.FormatSize(s.InlineMemory), volume.FormatSize(in.Size))
	}
	return nil
}

func checkMemory(r request) error {
	switch {
	case r.capability.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: a volume in memory has no such type: leave it empty", r.capability.FSType)
	case r.capability.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume in memory is on one node: use a SINGLE_NODE mode", r.capability.Mode)
	}
	return nil
}

// checkPublishedMemory returns nil if the target has the mount that the request asks for.
func checkPublishedMemory(r request, source *mount.MemorySource) error {
	ok, err := source.Owns(r.target)
	if err == nil && !ok {
		err = errOtherMount(r)
	}
	if err != nil {
		return err
	}
	same, err := source.Shows(r.target)
	if err != nil {
		return err
	}
	if same {
		same, err = mount.HasAttributes(source, r.target, r.options)
	}
	if err == nil && !same {
		err = volume.Errorf(volume.ErrIncompatible, "volume %s is published at %q otherwise than asked for (%d bytes, readonly %t): unpublish it first", r.id, r.target, source.Size, r.readOnly)
	}
	return err
}
