package nodeserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeStageVolume implements csi.NodeServer: it mounts the volume at its staging path, once on this
// node. For a raw volume it attaches the device.
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
	secrets := volume.NewSecrets(req.GetSecrets())
	if v.Block {
		var source mount.Source
		if source, err = attach(ctx, b, v, secrets); err == nil {
			err = source.Close()
		}
	} else {
		err = stageFilesystem(ctx, b, v, r, secrets)
	}
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.StageDone)
	return &csi.NodeStageVolumeResponse{}, nil
}

// stageFilesystem attaches a volume and mounts its filesystem at the staging path, unless it is mounted there.
func stageFilesystem(ctx context.Context, b backend.Backend, v volume.Volume, r request, secrets volume.Secrets) error {
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
	source, err := attach(ctx, b, v, secrets)
	if err != nil {
		return err
	}
	err = explainMount(v, r, mountAt(ctx, source, r))
	return errors.Join(err, source.Close())
}

// attach attaches a volume and creates its filesystem if it has none.
func attach(ctx context.Context, b backend.Backend, v volume.Volume, secrets volume.Secrets) (_ mount.Source, err error) {
	ctx, span := trace.Start(ctx, "attach")
	defer span.End(&err)
	return b.Attach(ctx, v, secrets)
}

// mountAt mounts a source at the staging path.
func mountAt(ctx context.Context, source mount.Source, r request) (err error) {
	ctx, span := trace.Start(ctx, "mount")
	defer span.End(&err)
	return source.Mount(ctx, r.staging, r.options)
}

// explainMount wraps an error of mounting in the matching error of package volume.
func explainMount(v volume.Volume, r request, err error) error {
	switch {
	case errors.Is(err, mount.ErrBadOption):
		return backend.ExplainMountFlags(r.capability.MountFlags, err)
	case errors.Is(err, mount.ErrDamaged):
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; check its image with the tools of %s", v.ID, err, v.FSType)
	}
	return backend.ExplainMount(err)
}

// checkStaged returns nil if the mount at the staging path is the one that the request describes, and no
// other node has owned the volume since.
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
		return volume.Errorf(volume.ErrIncompatible, "%s %q is a mount of something other than volume %s: unmount it, or use another path", r.field, r.staging, v.ID)
	}
	same, err := mount.HasAttributes(source, r.staging, r.options)
	if err != nil {
		return err
	}
	if !same {
		return volume.Errorf(volume.ErrIncompatible, "volume %s is staged at %q with other mount flags than %q, readonly %t: unstage it first", v.ID, r.staging, r.capability.MountFlags, r.readOnly)
	}
	if err := checkContext(volume.ErrIncompatible, r, source, r.staging); err != nil {
		return err
	}
	if verifier, ok := b.(backend.OwnershipVerifier); ok {
		return verifier.VerifyOwnership(ctx, v)
	}
	return nil
}

// NodeUnstageVolume implements csi.NodeServer. It unmounts the volume from its staging path and detaches
// its device. It fails while the volume is mounted elsewhere on this node, or a process uses it.
func (s *Server) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	staging := req.GetStagingTargetPath()
	if err := requireIDAndAbsolute(req.GetVolumeId(), stagingField, staging); err != nil {
		return nil, err
	}
	b, v, err := s.forTeardown(ctx, req.GetVolumeId(), staging)
	if err != nil {
		return nil, err
	}
	defer s.holdTrim(ctx, v.ID)()
	release, err := s.holdIOLimits(ctx, b, v) // the kernel may free the device at the unmount
	if err != nil {
		return nil, err
	}
	defer release()
	if err := s.unstageAt(ctx, b, v, staging); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnstageMount)
	if err := detach(ctx, b, v); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.UnstageGone)
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// holdTrim calls HoldTrim, because a trim keeps the device of a volume in use.
func (s *Server) holdTrim(ctx context.Context, id volume.ID) (release func()) {
	if s.HoldTrim == nil {
		return func() {}
	}
	return s.HoldTrim(ctx, id)
}

// detach detaches a volume that is not mounted.
func detach(ctx context.Context, b backend.Backend, v volume.Volume) (err error) {
	ctx, span := trace.Start(ctx, "detach")
	defer span.End(&err)
	return b.Detach(ctx, v)
}

// unstageAt unmounts the volume from its staging path, if it is mounted there.
func (s *Server) unstageAt(ctx context.Context, b backend.Backend, v volume.Volume, staging string) error {
	source, err := mountedSource(ctx, b, v, stagingField, staging)
	if err != nil || source == nil {
		return err
	}
	return explainUnmount(stagingField, staging, s.unmount(ctx, source, staging))
}

// unmount unmounts a source from its staging path, and writes what is not on the disk yet.
func (s *Server) unmount(ctx context.Context, source mount.Source, staging string) (err error) {
	ctx, span := trace.Start(ctx, "unmount")
	defer span.End(&err)
	return source.UnmountLast(ctx, staging, s.Abandon)
}

// Release unstages a volume that is being deleted, if the kubelet did not unstage it. The volume has no
// attachment and may be mounted only at its staging path, so no pod uses it. A kubelet that dies
// between unpublishing and unstaging leaves such a volume, because after its restart it searches
// only the directories of its pods.
//
// Release reports whether it released the volume. It returns ErrInUse if the volume is mounted at another
// path. It returns ErrPrecondition if a process uses the volume's device; Release may then have unmounted
// the volume already, which is safe because no publication exists.
func (s *Server) Release(ctx context.Context, id volume.ID, stagingPath string) (bool, error) {
	b, v, err := s.forTeardown(ctx, id.String(), stagingPath)
	if err != nil {
		return false, err
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return false, err
	}
	mounts, err := mount.Of(source)
	if err != nil {
		return false, err
	}
	for _, m := range mounts {
		if m.Mountpoint != stagingPath {
			return false, volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", id, m.Mountpoint)
		}
	}
	defer s.holdTrim(ctx, v.ID)()
	release, err := s.holdIOLimits(ctx, b, v)
	if err != nil {
		return false, err
	}
	defer release()
	for range mounts { // several mounts may be stacked
		if err := s.unstageAt(ctx, b, v, stagingPath); err != nil {
			return false, err
		}
	}
	if err := detach(ctx, b, v); err != nil {
		return false, fmt.Errorf("unstaging a volume that is being deleted and that the kubelet did not unstage: %w", err)
	}
	klog.FromContext(ctx).Info("Unstaged a volume that is being deleted and that the kubelet did not unstage", "source", source.String(), "mounts", len(mounts))
	return true, nil
}

// NodeExpandVolume implements csi.NodeServer: it resizes the device and the filesystem
// after ControllerExpandVolume. The volume_id identifies the volume; the volume_path must only exist.
func (s *Server) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := requireIDAndPath(id, path); err != nil {
		return nil, err
	}
	b, v, err := s.find(ctx, id)
	if err != nil {
		return nil, err
	}
	if _, err := inspectVolumePath(id, path); err != nil {
		return nil, err
	}
	r := translate.Range(req.GetCapacityRange())
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Required > v.Capacity {
		return nil, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: volume %s has %s; call ControllerExpandVolume first", r.Required, v.ID, volume.ExactSize(v.Capacity))
	}
	if err := grow(ctx, b, v, volume.NewSecrets(req.GetSecrets())); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.GrowDone)
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
}

// grow makes the device of a staged volume as large as its storage, and its filesystem as
// large as the device.
func grow(ctx context.Context, b backend.Backend, v volume.Volume, secrets volume.Secrets) error {
	expander, ok := b.(backend.Expander)
	if !ok {
		return volume.Errorf(volume.ErrInvalid, "volume %s: its backend cannot expand volumes", v.ID)
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return err
	}
	if !ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is not staged on this node: call NodeStageVolume, which also grows the volume", v.ID)
	}
	if err := expander.ResizeDevice(ctx, v, secrets); err != nil {
		return err
	}
	err = source.Grow()
	if errors.Is(err, mount.ErrCannotGrow) {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w", v.ID, err)
	}
	return err
}

// requireIDAndPath refuses a request without volume_id or volume_path.
func requireIDAndPath(id, path string) error {
	return cmp.Or(translate.Required("volume_id", id), translate.Required("volume_path", path))
}

// inspectVolumePath inspects the volume_path of a request, which must exist (ErrNotFound; CSI
// specification, NodeGetVolumeStats).
func inspectVolumePath(id, path string) (at mount.Info, err error) {
	if filepath.IsAbs(path) {
		at, err = mount.Inspect(path)
	}
	if err == nil && !at.Exists {
		err = volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not at that path", path, id)
	}
	return at, explainStale(err)
}
