package nodeserver

import (
	"context"
	"errors"
	"strings"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// publishInline creates an inline volume and mounts it at its target. The kubelet does not
// stage inline volumes, and forgets one whose call failed with a final error. A failed call
// therefore removes what it created (Kubernetes, pkg/volume/util/types,
// IsOperationFinishedError).
func (s *Server) publishInline(ctx context.Context, r request, volumeContext map[string]string) error {
	in, err := volume.ParseInline(volumeContext)
	if err != nil {
		return err
	}
	at, err := mount.Inspect(r.target)
	if err != nil {
		return err
	}
	if in.Memory {
		err = s.publishMemory(ctx, r, in, at)
	} else {
		err = s.publishInPool(ctx, r, in, at)
	}
	if err == nil {
		crashpoint.Here(crashpoint.PublishDone)
	}
	return err
}

// publishInPool publishes an inline volume of a pool.
func (s *Server) publishInPool(ctx context.Context, r request, in volume.Inline, at mount.Info) error {
	if fsType := r.capability.FSType; in.FSType != "" && fsType != "" && fsType != in.FSType {
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s=%q: volume_capability.mount.fs_type is %q: give one of them", volume.AttrFSType, in.FSType, fsType)
	}
	if err := s.cleanUp(ctx, r.id); err != nil {
		return err
	}
	b, v, missing := s.inline(r.id)
	if missing == nil {
		return s.publishAgain(ctx, b, v, r, in)
	}
	err := s.publishNew(ctx, r, in, at, missing)
	if err != nil {
		s.cleaned.forget(r.id)
	}
	return err
}

// publishAgain mounts a volume that exists, unless it is mounted. The configuration of new
// volumes does not apply to it.
func (s *Server) publishAgain(ctx context.Context, b backend.Backend, v volume.Volume, r request, in volume.Inline) error {
	if in.Pool != "" && in.Pool != v.ID.Pool {
		return volume.Errorf(volume.ErrIncompatible, "volume_context.%s=%q: volume %s is in another pool: unpublish it first", volume.ParamPool, in.Pool, v.ID)
	}
	spec, err := s.inlineSpec(b, r, in)
	if err == nil {
		err = v.Satisfies(spec)
	}
	if err != nil {
		return err
	}
	return s.stageInline(ctx, b, v, r)
}

// publishNew creates and mounts a volume. If that fails it removes what it created.
func (s *Server) publishNew(ctx context.Context, r request, in volume.Inline, at mount.Info, missing error) error {
	switch {
	case errors.Is(missing, volume.ErrDamaged):
		return missing
	case at.IsMount:
		return errOtherMount(r)
	}
	err := s.createInline(ctx, r, in)
	if err != nil {
		err = errors.Join(err, s.undo(context.WithoutCancel(ctx), r, at))
	}
	return err
}

func errOtherMount(r request) error {
	return volume.Errorf(volume.ErrIncompatible, "target_path %q has something else than inline volume %s mounted: unmount it, or name another path", r.target, r.id)
}

// createInline creates a volume and mounts it.
func (s *Server) createInline(ctx context.Context, r request, in volume.Inline) error {
	b, spec, err := s.newInline(r, in)
	if err != nil {
		return err
	}
	v, err := b.Create(ctx, spec)
	if err != nil {
		return err
	}
	return s.stageInline(ctx, b, v, r)
}

// inlineSpec is the request for an inline volume.
func (s *Server) inlineSpec(b backend.Backend, r request, in volume.Inline) (volume.Spec, error) {
	p, err := s.backends.Kinds().Parse(in.Class(b.Name()))
	return in.Spec(r.id, r.target, r.capability, p), err
}

// newInline is the first backend that provides inline volumes, with the request to it.
func (s *Server) newInline(r request, in volume.Inline) (b backend.Backend, spec volume.Spec, err error) {
	for _, b = range s.backends.All() {
		provider, can := b.(backend.InlineProvider)
		if !can {
			continue
		}
		if err := b.Supports(r.capability); err != nil {
			return nil, spec, err
		}
		if spec, err = s.inlineSpec(b, r, in); err == nil {
			spec.Parameters.Pool, err = provider.InlinePool(in.Pool)
		}
		return b, spec, err
	}
	return nil, spec, volume.Errorf(volume.ErrInvalid, "no backend of this driver (%s) provides inline volumes", strings.Join(s.backends.Kinds().Names(), ", "))
}

// stageInline mounts a volume at its target, unless it is mounted there.
func (s *Server) stageInline(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	if err := s.backends.Supports(v, r.capability); err != nil {
		return err
	}
	if err := stageFilesystem(ctx, b, v, r); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageDone)
	return nil
}

// undo removes what a failed call has created; at is what was at the target before.
func (s *Server) undo(ctx context.Context, r request, at mount.Info) error {
	b, v, err := s.inline(r.id)
	if isMissing(err) {
		return nil
	}
	if err == nil {
		err = discard(ctx, b, v)
	}
	if err == nil && !at.Exists {
		err = mount.RemoveTarget(r.target)
	}
	return err
}

// isMissing reports whether err means that no inline volume was found. One may be in a pool
// that is not open.
func isMissing(err error) bool {
	return errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable)
}

// inline finds an inline volume by the kubelet's ID. Errors are those of
// backend.InlineProvider.
func (s *Server) inline(id string) (b backend.Backend, v volume.Volume, err error) {
	err = volume.Errorf(volume.ErrNotFound, "inline volume %.80q is not on this node", id)
	for _, candidate := range s.backends.All() {
		provider, can := candidate.(backend.InlineProvider)
		if !can {
			continue
		}
		found, missing := provider.Inline(id)
		if missing == nil {
			return candidate, found, nil
		}
		if !errors.Is(missing, volume.ErrNotFound) {
			b, v, err = candidate, found, missing
		}
	}
	return b, v, err
}

// unpublishInline unmounts a volume with an ID of the kubelet's from its target and, if it
// is an inline volume, removes it.
func (s *Server) unpublishInline(ctx context.Context, id, target string) error {
	unrecorded, err := s.unrecorded(id, target)
	if err != nil {
		return err
	}
	if unrecorded.source == nil {
		err = s.unpublishInPool(ctx, id, target)
	} else {
		err = s.unpublishAt(ctx, unrecorded, volume.Volume{}, target)
	}
	if err == nil {
		crashpoint.Here(crashpoint.UnpublishDone)
	}
	return err
}

// unpublishInPool unmounts and removes an inline volume of a pool. One whose record is
// damaged is kept: the pod must be able to go, and an administrator has to look at it.
func (s *Server) unpublishInPool(ctx context.Context, id, target string) error {
	if err := s.cleanUp(ctx, id); err != nil {
		return err
	}
	defer s.cleaned.forget(id)
	mounted, err := mount.IsMountPoint(target)
	if err != nil {
		return err
	}
	b, v, err := s.inline(id)
	damaged := errors.Is(err, volume.ErrDamaged)
	switch {
	case errors.Is(err, volume.ErrNotFound),
		errors.Is(err, volume.ErrUnavailable) && !mounted: // CleanUpInline removes it from the pool
		return s.unpublishAt(ctx, unrecorded{}, volume.Volume{}, target)
	case err != nil && !damaged:
		return err
	}
	if err := s.unpublishAt(ctx, b, v, target); err != nil {
		return err
	}
	if !damaged {
		return discard(ctx, b, v)
	}
	klog.FromContext(ctx).Error(err, "A damaged inline volume is kept: inspect it, and remove its folder")
	return detachUnmounted(ctx, b, v)
}
