package nodeserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/volume"
)

// NodePublishVolume implements csi.NodeServer: it bind-mounts the staged filesystem, or the device node,
// at the target path of a pod.
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
	if verifier, ok := b.(backend.OwnershipVerifier); ok { // another node may have owned the volume since it was staged
		if err := verifier.VerifyOwnership(ctx, v); err != nil {
			return nil, err
		}
	}
	err = s.publishLimited(ctx, b, v, r, func() error {
		if v.Block {
			return s.publishBlock(ctx, b, v, r, source)
		}
		return publishFilesystem(v, r, source)
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.PublishDone)
	return &csi.NodePublishVolumeResponse{}, nil
}

// errNotStaged returns the error for a volume that is not mounted at the staging path of a request.
func errNotStaged(v volume.Volume, r request) error {
	return volume.Errorf(volume.ErrPrecondition, "volume %s is not staged at staging_target_path %q: call NodeStageVolume first", v.ID, r.staging)
}

// publishFilesystem bind-mounts the staged filesystem of a volume at the target, unless it is mounted there.
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
		return cmp.Or(checkPublished(v, r, staged, at), checkContext(volume.ErrIncompatible, r, source, r.target))
	}
	if err := cmp.Or(checkContext(volume.ErrPrecondition, r, source, r.staging), checkOnePath(v, r, staged, source)); err != nil {
		return err
	}
	return mountTarget(r, at, prepareDir, func() error { return mount.Bind(r.staging, r.target, r.options) })
}

// mountTarget calls prepare to create the target if it is missing, and then mountAt to mount at the
// target. If mountAt fails, a target that prepare created is removed.
func mountTarget(r request, at mount.Info, prepare func(field, path string, at mount.Info) (made bool, err error), mountAt func() error) error {
	made, err := prepare(targetField, r.target, at)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.PublishTarget)
	if err = mountAt(); err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(r.target))
	}
	return err
}

// checkPublished returns nil if the mount at the target shows the staged filesystem and has the flags of
// the staging mount and of the request.
func checkPublished(v volume.Volume, r request, staged, at mount.Info) error {
	if at.Dev != staged.Dev || at.Ino != staged.Ino {
		return volume.Errorf(volume.ErrIncompatible, "target_path %q is a mount of something other than volume %s: unmount it, or use another path", r.target, v.ID)
	}
	stagedStat, err := mount.Statfs(r.staging)
	if err != nil {
		return err
	}
	st, err := mount.Statfs(r.target)
	if err != nil {
		return err
	}
	if !r.options.With(stagedStat.Flags).MatchAttr(st.Flags) {
		return volume.Errorf(volume.ErrIncompatible, "volume %s is published at %q, but not as requested (readonly %t, mount_flags %q): unpublish it first", v.ID, r.target, r.readOnly, r.capability.MountFlags)
	}
	return nil
}

// checkOnePath refuses to publish a volume at a second path if its access mode allows only one
// (CSI specification, NodePublishVolume). For other modes the mount table is not read.
// staged is the staging mount, if the source has one.
func checkOnePath(v volume.Volume, r request, staged mount.Info, source mount.Source) error {
	if !r.capability.Mode.OnePath() {
		return nil
	}
	elsewhere, err := mount.Elsewhere(source, staged.MountID)
	if err != nil || len(elsewhere) == 0 {
		return err
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is published at %q, and access mode %s allows one path: unpublish it there first, or use SINGLE_NODE_MULTI_WRITER", v.ID, elsewhere[0], r.capability.Mode)
}

// publishBlock bind-mounts the device node of a raw volume at the target, unless it is mounted there. A read-only
// request gets the node of a read-only device.
func (s *Server) publishBlock(ctx context.Context, b backend.Backend, v volume.Volume, r request, source mount.Source) error {
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
	if !at.IsMount { // check the access mode before creating a read-only device
		if err := checkOnePathBlock(ctx, provider, v, r, device); err != nil {
			return err
		}
	}
	if r.readOnly {
		if device, err = provider.ReadOnlyDevice(ctx, v); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.PublishReadOnly)
	}
	err = publishDevice(v, r, at, device)
	if err != nil && r.readOnly {
		err = errors.Join(err, s.releaseReadOnly(ctx, b, v))
	}
	return err
}

// checkOnePathBlock refuses to publish a raw volume at a second path, as checkOnePath does for a
// filesystem. The first path may show the volume's own device or its read-only device.
func checkOnePathBlock(ctx context.Context, p backend.BlockProvider, v volume.Volume, r request, device mount.BlockDevice) error {
	if err := checkOnePath(v, r, mount.Info{}, device); err != nil || p == nil || !r.capability.Mode.OnePath() {
		return err
	}
	readOnly, ok, err := p.PresentReadOnly(ctx, v)
	if err != nil || !ok {
		return err
	}
	return checkOnePath(v, r, mount.Info{}, readOnly)
}

// publishDevice bind-mounts the node of a device at the target, or checks the mount that is there.
func publishDevice(v volume.Volume, r request, at mount.Info, device mount.BlockDevice) error {
	if at.IsMount {
		ok, err := at.IsBlock(), error(nil)
		if ok {
			ok, err = device.Shows(r.target)
		}
		if err == nil && !ok {
			err = volume.Errorf(volume.ErrIncompatible, "target_path %q is a mount of something other than volume %s with readonly %t: unpublish it first, or use another path", r.target, v.ID, r.readOnly)
		}
		return err
	}
	return mountTarget(r, at, prepareFile, func() error { return mount.Bind(device.Node(), r.target, r.options) })
}

// NodeUnpublishVolume implements csi.NodeServer. It removes the target only with rmdir or unlink.
func (s *Server) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	target := req.GetTargetPath()
	if err := requireIDAndAbsolute(req.GetVolumeId(), targetField, target); err != nil {
		return nil, err
	}
	if volume.InlineID(req.GetVolumeId()) {
		return &csi.NodeUnpublishVolumeResponse{}, s.unpublishInline(ctx, req.GetVolumeId(), target)
	}
	b, v, err := s.forTeardown(ctx, req.GetVolumeId(), target)
	if err != nil {
		return nil, err
	}
	if err := s.unpublish(ctx, b, v, target); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnpublishDone)
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// unpublish removes a publication of the volume, the limits of the I/O of its pod, and a read-only device that no other target
// needs.
func (s *Server) unpublish(ctx context.Context, b backend.Backend, v volume.Volume, target string) error {
	if err := s.unpublishAt(ctx, b, v, target); err != nil {
		return err
	}
	return s.releaseReadOnly(ctx, b, v)
}

// releaseReadOnly removes the limits of pods that do not use the volume any more, and its read-only device if no target needs it.
func (s *Server) releaseReadOnly(ctx context.Context, b backend.Backend, v volume.Volume) error {
	release, err := s.holdIOLimits(ctx, b, v)
	if err != nil {
		return err
	}
	defer release()
	// Free the read-only device of a raw volume if this was its last target. An interrupted call may
	// have left the device without a mount. A volume without a readable record may be a raw volume.
	if provider, ok := b.(backend.BlockProvider); ok && (v.Block || v.Version == 0) {
		return provider.ReleaseReadOnly(ctx, v)
	}
	return nil
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

// removeTarget removes an empty target directory or file, which publish may have created. It refuses a
// target that has content.
func removeTarget(target string) error {
	info, err := os.Lstat(target)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {
		return volume.Errorf(volume.ErrPrecondition, "target_path %q is not an empty file or directory, and no volume is published there: it stays; remove it", target)
	}
	err = mount.RemoveTarget(target)
	if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrPrecondition, "target_path: %w: it stays; remove its content", err)
	}
	return err
}

// prepareDir creates a directory to mount on, unless it exists. It refuses a directory that is not empty,
// because the mount would hide its content. made reports whether it created the directory.
func prepareDir(field, path string, at mount.Info) (made bool, err error) {
	if !at.Exists {
		if err := os.Mkdir(path, 0o750); err != nil {
			return false, unusablePath(field, err)
		}
		return true, nil
	}
	if !at.IsDir() {
		return false, volume.Errorf(volume.ErrPrecondition, "%s %q is not a directory: remove it", field, path)
	}
	dir, err := sys.OpenFile(path, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	_, err = dir.Readdirnames(1)
	switch {
	case errors.Is(err, io.EOF):
		return false, nil
	case err == nil:
		err = volume.Errorf(volume.ErrPrecondition, "%s %q is not empty, and a mount there would hide its content: empty it", field, path)
	}
	return false, err
}

// prepareFile creates a file to bind-mount a device node on, unless it exists. It refuses a file that is
// not empty. made reports whether it created the file.
func prepareFile(field, path string, at mount.Info) (made bool, err error) {
	if at.Exists {
		info, err := os.Lstat(path)
		if err == nil && (!info.Mode().IsRegular() || info.Size() > 0) {
			err = volume.Errorf(volume.ErrPrecondition, "%s %q is not an empty file, and a device there would hide it: remove it", field, path)
		}
		return false, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o640)
	if err != nil {
		return false, unusablePath(field, err)
	}
	return true, f.Close()
}

// unusablePath adds the name of the field, and where possible the remedy, to an error of creating a path.
func unusablePath(field string, err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EROFS) {
		return volume.Errorf(volume.ErrPrecondition, "%s: %w: its parent must be a writable directory", field, err)
	}
	return fmt.Errorf("%s: %w", field, err)
}

// mountedSource returns the source of a volume that is mounted at path, or nil if nothing is mounted
// there. A mount of something else is ErrPrecondition, because it must not be unmounted.
func mountedSource(ctx context.Context, b backend.Backend, v volume.Volume, field, path string) (mount.Source, error) {
	mounted, err := mount.IsMountPoint(path)
	if err != nil || !mounted {
		return nil, err
	}
	source, err := owner(ctx, b, v, path)
	if err == nil && source == nil {
		err = errForeignMount(field, path)
	}
	return source, err
}

// owner returns the source of the mount at path if that mount belongs to the volume, otherwise nil. The
// source is the volume itself or, for a raw volume, its read-only device.
func owner(ctx context.Context, b backend.Backend, v volume.Volume, path string) (mount.Source, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return nil, err
	}
	if ok, err := source.Owns(path); ok || err != nil {
		return source, err
	}
	provider, ok := b.(backend.BlockProvider)
	if !ok {
		return nil, nil
	}
	device, ok, err := provider.PresentReadOnly(ctx, v)
	if err == nil && ok {
		ok, err = device.Owns(path)
	}
	if err != nil || !ok {
		return nil, err
	}
	return device, nil
}

// errForeignMount returns the error for a mount that does not belong to the volume.
func errForeignMount(field, path string) error {
	e, err := mount.OnPath(path)
	if err != nil || e == nil {
		return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it stays mounted", field, path)
	}
	return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it stays mounted; its source is %s: if the volume's pool was at that location before, configure that location again until the pool's volumes are unstaged", field, path, e.Source)
}

// explainUnmount wraps an error of unmounting a volume in the matching error of package volume.
func explainUnmount(field, path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EBUSY):
		return volume.Errorf(volume.ErrPrecondition, "%s %q: %w: some process uses it (fuser -m)", field, path, err)
	case errors.Is(err, mount.ErrMountedElsewhere):
		return volume.Errorf(volume.ErrPrecondition, "%s %q: the volume is still published: %w: unpublish it there first", field, path, err)
	case errors.Is(err, mount.ErrNotWritten), errors.Is(err, mount.ErrUnmounting):
		return volume.Errorf(volume.ErrUnavailable, "%s %q: %w", field, path, err)
	}
	return err
}
