package nodeserver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeStageVolume implements csi.NodeServer: the volume's one mount on this
// node, or for a raw volume its device.
func (s *Server) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	r, err := newRequest(req.GetVolumeId(), stagingField, req.GetStagingTargetPath(), req.GetVolumeCapability(), false)
	if err != nil {
		return nil, err
	}
	b, v, _, err := s.backends.Described(ctx, r.id, req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	if err := s.backends.Supports(v, r.capability); err != nil {
		return nil, err
	}
	if v.Block {
		var source mount.Source
		if source, err = b.Attach(ctx, v); err == nil {
			err = source.Close()
		}
	} else {
		err = stageFilesystem(ctx, b, v, r)
	}
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.StageDone)
	return &csi.NodeStageVolumeResponse{}, nil
}

func stageFilesystem(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	at, err := mount.Inspect(r.staging)
	if err != nil {
		return err
	}
	if at.IsMount {
		return checkStaged(ctx, b, v, r)
	}
	if _, err := prepareDir(r.field, r.staging, at); err != nil {
		return err
	}
	source, err := b.Attach(ctx, v)
	if err != nil {
		return err
	}
	err = explainMount(v, r, source.Mount(ctx, r.staging, r.options))
	return errors.Join(err, source.Close())
}

// explainMount adds the error of package volume to an error of mounting.
func explainMount(v volume.Volume, r request, err error) error {
	switch {
	case errors.Is(err, mount.ErrBadOption):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", r.capability.MountFlags, err)
	case errors.Is(err, mount.ErrDamaged):
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; check its image with the tools of %s", v.ID, err, v.FSType)
	}
	return backend.ExplainMount(err)
}

// checkStaged returns nil if the staging path has the mount that the request asks for.
func checkStaged(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return err
	}
	if ok {
		ok, err = source.Shows(r.staging)
	}
	if err != nil {
		return err
	}
	if !ok {
		return volume.Errorf(volume.ErrIncompatible, "%s %q has something else than volume %s mounted: unmount it, or name another path", r.field, r.staging, v.ID)
	}
	same, err := mount.HasAttributes(source, r.staging, r.options)
	if err != nil {
		return err
	}
	if !same {
		return volume.Errorf(volume.ErrIncompatible, "volume %s is staged at %q with other mount flags than %q, readonly %t: unstage it first", v.ID, r.staging, r.capability.MountFlags, r.readOnly)
	}
	return verifyOwnership(ctx, b, v)
}

// NodeUnstageVolume implements csi.NodeServer. It succeeds when nothing on this node uses
// the volume any more.
func (s *Server) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	staging := req.GetStagingTargetPath()
	if err := absolute(stagingField, staging); err != nil {
		return nil, err
	}
	b, v, err := s.forTeardown(ctx, req.GetVolumeId(), staging)
	if err != nil {
		return nil, err
	}
	if err := s.unstageAt(ctx, b, v, staging); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnstageMount)
	if err := b.Detach(ctx, v); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnstageGone)
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// unstageAt unmounts the volume from its staging path, if it is mounted there.
func (s *Server) unstageAt(ctx context.Context, b backend.Backend, v volume.Volume, staging string) error {
	source, err := mountedSource(ctx, b, v, stagingField, staging)
	if err != nil || source == nil {
		return err
	}
	return explainUnmount(stagingField, staging, source.UnmountLast(ctx, staging, s.Abandon))
}
