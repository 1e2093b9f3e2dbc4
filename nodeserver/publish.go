package nodeserver

import (
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodePublishVolume implements csi.NodeServer: a bind mount of the staged filesystem, or of
// the device node, at the path of the pod.
func (s *Server) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	r, err := publishRequest(req)
	if err != nil {
		return nil, err
	}
	if volume.IsInline(req.GetVolumeContext()) {
		return &csi.NodePublishVolumeResponse{}, s.publishInline(ctx, r, req.GetVolumeContext())
	}
	b, v, _, err := s.backends.Described(ctx, r.id, req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	if err := s.backends.Supports(v, r.capability); err != nil {
		return nil, err
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errNotStaged(v, r)
	}
	if err := verifyOwnership(ctx, b, v); err != nil {
		return nil, err
	}
	if v.Block {
		err = publishBlock(ctx, b, v, r, source)
	} else {
		err = publishFilesystem(v, r, source)
	}
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.PublishDone)
	return &csi.NodePublishVolumeResponse{}, nil
}

func errNotStaged(v volume.Volume, r request) error {
	return volume.Errorf(volume.ErrPrecondition, "volume %s is not staged at staging_target_path %q: call NodeStageVolume first", v.ID, r.staging)
}

func publishFilesystem(v volume.Volume, r request, source mount.Source) error {
	staged, err := mount.Inspect(r.staging)
	if err != nil {
		return err
	}
	ok, err := source.Shows(r.staging)
	if err != nil {
		return err
	}
	if !ok {
		return errNotStaged(v, r)
	}
	at, err := mount.Inspect(r.target)
	if err != nil {
		return err
	}
	if at.IsMount {
		return checkPublished(v, r, staged, at)
	}
	if err := onePath(v, r, staged, source); err != nil {
		return err
	}
	made, err := prepareDir("target_path", r.target, at)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.PublishTarget)
	return bind(r.staging, r, made)
}

// bind mounts the source at the target. If that fails it removes a target that was created
// for it.
func bind(from string, r request, made bool) error {
	err := mount.Bind(from, r.target, r.options)
	if err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(r.target))
	}
	return err
}

// checkPublished returns nil if the target has the mount that the request asks for: of the
// staged filesystem, with the flags of the staging mount and of the request.
func checkPublished(v volume.Volume, r request, staged, at mount.Info) error {
	if at.Dev != staged.Dev || at.Ino != staged.Ino {
		return volume.Errorf(volume.ErrIncompatible, "target_path %q has something else than volume %s mounted: unmount it, or name another path", r.target, v.ID)
	}
	below, err := mount.Statfs(r.staging)
	if err != nil {
		return err
	}
	st, err := mount.Statfs(r.target)
	if err != nil {
		return err
	}
	if !r.options.With(below.Flags).MatchAttr(st.Flags) {
		return volume.Errorf(volume.ErrIncompatible, "volume %s is published at %q otherwise than asked for (readonly %t, mount_flags %q): unpublish it first", v.ID, r.target, r.readOnly, r.capability.MountFlags)
	}
	return nil
}

// onePath refuses to publish a volume at a second path if its access mode allows only one
// (CSI specification, NodePublishVolume). For other modes the mount table is not read.
// staged is the staging mount, if the source has one.
func onePath(v volume.Volume, r request, staged mount.Info, source mount.Source) error {
	if !r.capability.Mode.OnePath() {
		return nil
	}
	elsewhere, err := mount.Elsewhere(source, staged.MountID)
	if err != nil || len(elsewhere) == 0 {
		return err
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is published at %q, and access mode %s allows one path: unpublish it there first, or use SINGLE_NODE_MULTI_WRITER", v.ID, elsewhere[0], r.capability.Mode)
}

func publishBlock(ctx context.Context, b backend.Backend, v volume.Volume, r request, source mount.Source) error {
	device, ok := source.(mount.BlockDevice)
	if !ok {
		return volume.Errorf(volume.ErrInvalid, "volume %s has no device: mount it", v.ID)
	}
	provider, ok := b.(backend.BlockProvider)
	if r.readOnly && !ok {
		return volume.Errorf(volume.ErrInvalid, "readonly: backend %s has no read-only raw devices", b.Name())
	}
	at, err := mount.Inspect(r.target)
	if err != nil {
		return err
	}
	if !at.IsMount { // the mode is checked before a device is made
		if err := onePathBlock(ctx, provider, v, r, device); err != nil {
			return err
		}
	}
	if r.readOnly {
		if device, err = provider.ReadOnlyDevice(ctx, v); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.PublishReadOnly)
	}
	err = publishNode(v, r, at, device)
	if err != nil && r.readOnly {
		err = errors.Join(err, provider.ReleaseReadOnly(ctx, v))
	}
	return err
}

// onePathBlock is onePath for a raw volume, which may be published by its own device or by
// its read-only device.
func onePathBlock(ctx context.Context, p backend.BlockProvider, v volume.Volume, r request, device mount.BlockDevice) error {
	if err := onePath(v, r, mount.Info{}, device); err != nil || p == nil || !r.capability.Mode.OnePath() {
		return err
	}
	readOnly, ok, err := p.PresentReadOnly(ctx, v)
	if err != nil || !ok {
		return err
	}
	return onePath(v, r, mount.Info{}, readOnly)
}

func publishNode(v volume.Volume, r request, at mount.Info, device mount.BlockDevice) error {
	if at.IsMount {
		ok, err := at.IsBlock(), error(nil)
		if ok {
			ok, err = device.Shows(r.target)
		}
		if err == nil && !ok {
			err = volume.Errorf(volume.ErrIncompatible, "target_path %q has something else mounted than volume %s with readonly %t: unpublish it first, or name another path", r.target, v.ID, r.readOnly)
		}
		return err
	}
	made, err := prepareFile("target_path", r.target, at)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.PublishTarget)
	return bind(device.Node(), r, made)
}

// NodeUnpublishVolume implements csi.NodeServer. It removes the target with rmdir or unlink,
// and nothing stronger.
func (s *Server) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	target := req.GetTargetPath()
	if err := absolute(targetField, target); err != nil {
		return nil, err
	}
	if volume.InlineID(req.GetVolumeId()) {
		return &csi.NodeUnpublishVolumeResponse{}, s.unpublishInline(ctx, req.GetVolumeId(), target)
	}
	b, v, err := s.forTeardown(ctx, req.GetVolumeId(), target)
	if err != nil {
		return nil, err
	}
	if err := s.unpublishAt(ctx, b, v, target); err != nil {
		return nil, err
	}
	if err := releaseReadOnly(ctx, b, v); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnpublishDone)
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// unpublishAt unmounts the volume from a target, if it is mounted there, and removes the
// target.
func (s *Server) unpublishAt(ctx context.Context, b backend.Backend, v volume.Volume, target string) error {
	source, err := mountedSource(ctx, b, v, targetField, target)
	if err != nil {
		return err
	}
	if source != nil {
		if err := explainUnmount(targetField, target, source.Unmount(ctx, target, s.Abandon)); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.UnpublishGone)
	}
	if err := removeTarget(target); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnpublishTarget)
	return nil
}

// releaseReadOnly frees the read-only device of a raw volume if this was its last target. A
// call that was interrupted may have left the device without a mount. A volume whose record
// cannot be read may be a raw one.
func releaseReadOnly(ctx context.Context, b backend.Backend, v volume.Volume) error {
	provider, ok := b.(backend.BlockProvider)
	if !ok || !v.Block && v.Version != 0 {
		return nil
	}
	return provider.ReleaseReadOnly(ctx, v)
}

// removeTarget removes the target that publish created, and nothing that has content.
func removeTarget(target string) error {
	info, err := os.Lstat(target)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {
		return volume.Errorf(volume.ErrPrecondition, "target_path %q is not what was published, and not empty: it is left alone; remove it", target)
	}
	err = mount.RemoveTarget(target)
	if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrPrecondition, "target_path: %w: it is left alone; remove what is in it", err)
	}
	return err
}
