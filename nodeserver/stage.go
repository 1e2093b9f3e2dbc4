package nodeserver

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeStageVolume implements csi.NodeServer: the volume's one mount on this
// node, or for a raw volume its device.
func (s *Server) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	r, err := stageRequest(req)
	if err != nil {
		return nil, err
	}
	b, v, _, err := s.backends.Described(ctx, r.id, req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	if err := v.Supports(r.capability); err != nil {
		return nil, err
	}
	if v.Block {
		err = stageBlock(ctx, b, v)
	} else {
		err = stageFilesystem(ctx, b, v, r)
	}
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.StageDone)
	return &csi.NodeStageVolumeResponse{}, nil
}

func stageBlock(ctx context.Context, b backend.Backend, v volume.Volume) error {
	source, err := b.Attach(ctx, v)
	if err != nil || source.Hold == nil {
		return err
	}
	return source.Hold.Close()
}

func stageFilesystem(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	at, err := mount.Inspect(r.staging)
	if err != nil {
		return err
	}
	if at.IsMount {
		return checkStaged(ctx, b, v, r, at)
	}
	if _, err := prepareDir(r.field, r.staging, at); err != nil {
		return err
	}
	source, err := b.Attach(ctx, v)
	if err != nil {
		return err
	}
	if source.NFS != nil {
		return mountRemote(ctx, source, r)
	}
	defer source.Hold.Close()
	if source.Directory != nil {
		return bindDirectory(source.Directory, r)
	}
	return mountSource(source, v, r)
}

// bindDirectory shows a directory of this node at the staging path. It has no
// filesystem of its own whose options it could have.
func bindDirectory(d *mount.Directory, r request) error {
	if len(r.options.Data) > 0 {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %s is an option of a filesystem, and the volume is a directory of one: remove it from mountOptions",
			r.capability.MountFlags, strings.Join(r.options.Data, ","))
	}
	crashpoint.Here(crashpoint.StageMounted)
	return d.Bind(r.staging, r.options)
}

// mountSource mounts a source out of sight, grows its filesystem if the device
// is larger, and shows it at the staging path once all that was written to it
// is durable. Whatever fails, closing what is open undoes the rest.
func mountSource(source mount.Source, v volume.Volume, r request) (err error) {
	settled := make(chan error, 1)
	if source.Settle == nil {
		settled <- nil
	} else {
		go func() { settled <- source.Settle() }()
	}
	fs, err := mount.Filesystem(source.Device, v.FSType, r.options)
	if err != nil {
		return errors.Join(mountFailed(v, r, err), <-settled)
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	crashpoint.Here(crashpoint.StageMounted)
	// What was just formatted has the size of its device, a copy that of its source.
	if (source.Settle == nil || v.Source != nil) && !r.options.IsReadOnly() {
		err = growDetached(fs, source.Device, v.FSType)
	}
	if err = errors.Join(err, <-settled); err != nil {
		return err
	}
	return fs.MoveTo(r.staging)
}

func growDetached(fs *mount.Detached, device, fsType string) error {
	root, err := fs.OpenRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	d, err := os.Open(device)
	if err != nil {
		return err
	}
	defer d.Close()
	return blockdev.GrowFilesystem(root, d, fsType)
}

// mountFailed explains a mount that the kernel refused.
func mountFailed(v volume.Volume, r request, err error) error {
	switch {
	case errors.Is(err, mount.ErrBadOption):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove what %s does not know from mountOptions", r.capability.MountFlags, err, v.FSType)
	case errors.Is(err, syscall.EUCLEAN), errors.Is(err, syscall.EIO), errors.Is(err, syscall.EINVAL):
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; check its image with the tools of %s", v.ID, err, v.FSType)
	case errors.Is(err, syscall.ENODEV):
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w: this kernel has no %s", v.ID, err, v.FSType)
	}
	return err
}

// checkStaged tells whether what is mounted at the staging path is what is
// asked for.
func checkStaged(ctx context.Context, b backend.Backend, v volume.Volume, r request, at mount.Info) error {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return err
	}
	if ok {
		ok, err = shows(r.staging, at, source)
	}
	if err != nil {
		return err
	}
	if !ok {
		return volume.Errorf(volume.ErrIncompatible, "%s %q has something else than volume %s mounted: unmount it, or name another path", r.field, r.staging, v.ID)
	}
	st, err := mount.Statfs(r.staging)
	if err != nil {
		return err
	}
	asked, err := stageOptions(source, r)
	if err != nil {
		return err
	}
	if !asked.MatchAttr(st.Flags) {
		return volume.Errorf(volume.ErrIncompatible, "volume %s is staged at %q with other mount flags than %q, readonly %t: unstage it first", v.ID, r.staging, r.capability.MountFlags, r.readOnly)
	}
	return keeps(ctx, b, v)
}

// stageOptions are those of the request, and the attributes that every mount of its
// pool has.
func stageOptions(source mount.Source, r request) (mount.Options, error) {
	options := r.options
	switch {
	case source.Directory != nil:
		below, err := source.Directory.Flags()
		return options.With(below), err
	case source.NFS != nil:
		all, err := mount.ParseFlags(source.NFS.Options)
		options.Attr |= all.Attr
		return options, err
	}
	return options, nil
}

// keeps makes sure that no other node has had a volume since it was staged here.
func keeps(ctx context.Context, b backend.Backend, v volume.Volume) error {
	k, ok := b.(backend.Keeper)
	if !ok {
		return nil
	}
	return k.Keeps(ctx, v)
}

// NodeUnstageVolume implements csi.NodeServer. It succeeds when nothing on this
// node has the volume any more.
func (s *Server) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	staging := req.GetStagingTargetPath()
	if err := absolute("staging_target_path", staging); err != nil {
		return nil, err
	}
	if foreign(req.GetVolumeId()) {
		return &csi.NodeUnstageVolumeResponse{}, s.unstageStatic(ctx, staging)
	}
	b, v, err := s.forTeardown(ctx, req.GetVolumeId())
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
	at, broken, err := inspectMount(v.ID, staging)
	if err != nil || !at.IsMount {
		return err
	}
	mine := func() (bool, error) {
		if broken {
			return mountedFrom(ctx, b, v, staging)
		}
		source, ok, err := b.Present(ctx, v)
		if err != nil || !ok {
			return false, err
		}
		return has(staging, at, source)
	}
	if v.ID.Shared() {
		return s.unstageShared(ctx, b, v, staging, mine)
	}
	return unmount(ctx, "staging_target_path", staging, mine)
}
