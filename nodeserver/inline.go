package nodeserver

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// publishInline creates an inline volume and mounts it at its target: the kubelet does not stage inline
// volumes. If the call fails, it removes what it created, because after a final error the kubelet does
// not unpublish the volume (Kubernetes, pkg/volume/util/types, IsOperationFinishedError).
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
	if err := s.cleanUp(ctx, ctx, r.id); err != nil {
		return err
	}
	b, v, err := s.inline(r.id)
	switch {
	case err == nil:
		return s.publishExisting(ctx, b, v, r, in)
	case errors.Is(err, volume.ErrDamaged):
	case at.IsMount:
		err = errOtherMount(r)
	default:
		err = s.publishNew(ctx, r, in, at)
	}
	if err != nil {
		s.cleaned.forget(r.id) // the next call removes what this call has left
	}
	return err
}

// publishExisting mounts an inline volume that exists, unless it is mounted. The limits that the
// configuration sets for new volumes do not apply.
func (s *Server) publishExisting(ctx context.Context, b backend.Backend, v volume.Volume, r request, in volume.Inline) error {
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

// publishNew creates and mounts an inline volume. If that fails, it removes what it created.
func (s *Server) publishNew(ctx context.Context, r request, in volume.Inline, at mount.Info) error {
	b, spec, err := s.newInline(r, in)
	var v volume.Volume
	if err == nil {
		v, err = b.Create(ctx, spec)
	}
	if err == nil {
		err = s.stageInline(ctx, b, v, r)
	}
	if err != nil {
		err = errors.Join(err, s.undo(context.WithoutCancel(ctx), r, at))
	}
	return err
}

// errOtherMount returns the error for a target where something other than the inline volume is mounted.
func errOtherMount(r request) error {
	return volume.Errorf(volume.ErrIncompatible, "target_path %q is a mount of something other than inline volume %s: unmount it, or use another path", r.target, r.id)
}

// inlineSpec returns the specification of an inline volume.
func (s *Server) inlineSpec(b backend.Backend, r request, in volume.Inline) (volume.Spec, error) {
	p, err := s.backends.Kinds().Parse(in.Class(b.Name()))
	return in.Spec(r.id, r.target, r.capability, p), err
}

// newInline returns the backend of a new inline volume, and the specification of the volume.
func (s *Server) newInline(r request, in volume.Inline) (b backend.Backend, spec volume.Spec, err error) {
	b, pool, err := s.inlineBackend(in.Pool)
	if err == nil {
		err = s.backends.CheckCapability(b, r.capability)
	}
	if err == nil {
		spec, err = s.inlineSpec(b, r, in)
	}
	spec.Parameters.Pool = pool
	return b, spec, err
}

// inlineBackend returns the first backend that provides inline volumes in the named pool, or if name is empty in any
// pool, and the name of the pool. If there is none, it returns the error of the first backend with inline volumes.
func (s *Server) inlineBackend(name string) (b backend.Backend, pool string, err error) {
	for _, b := range s.backends.All() {
		provider, can := b.(backend.InlineProvider)
		if !can {
			continue
		}
		pool, poolErr := provider.InlinePool(name)
		if poolErr == nil {
			return b, pool, nil
		}
		err = cmp.Or(err, poolErr)
	}
	if err == nil {
		err = volume.Errorf(volume.ErrInvalid, "no backend of this driver (%s) provides inline volumes", strings.Join(s.backends.Kinds().Names(), ", "))
	}
	return nil, "", err
}

// stageInline mounts a volume at its target, unless it is mounted there.
func (s *Server) stageInline(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	if err := s.backends.Supports(v, r.capability); err != nil {
		return err
	}
	if err := stageFilesystem(ctx, b, v, r, volume.Secrets{}); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageDone)
	return nil
}

// undo removes what a failed call has created. at describes the target as it was before the call.
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

// isMissing reports whether err means that no inline volume was found. The volume may still be
// in a pool that is not open.
func isMissing(err error) bool {
	return errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable)
}

// inline finds an inline volume by the ID that the kubelet generated. Errors are those of
// backend.InlineProvider.
func (s *Server) inline(id string) (b backend.Backend, v volume.Volume, err error) {
	err = volume.Errorf(volume.ErrNotFound, "inline volume %.80q is not on this node", id)
	for _, candidate := range s.backends.All() {
		provider, can := candidate.(backend.InlineProvider)
		if !can {
			continue
		}
		found, findErr := provider.Inline(id)
		if findErr == nil {
			return candidate, found, nil
		}
		if !errors.Is(findErr, volume.ErrNotFound) {
			b, v, err = candidate, found, findErr
		}
	}
	return b, v, err
}

// unpublishInline unmounts a volume whose ID has the format of an inline volume's ID. It removes
// the volume if it is an inline volume: the ID of a static volume may have the same format.
func (s *Server) unpublishInline(ctx context.Context, id, target string) error {
	b, err := s.findUnrecorded(id, target)
	if err != nil {
		return err
	}
	if b.source == nil {
		err = s.unpublishInPool(ctx, id, target)
	} else {
		err = s.unpublishAt(ctx, b, volume.Volume{}, target)
	}
	if err == nil {
		crashpoint.Here(crashpoint.UnpublishDone)
	}
	return err
}

// unpublishInPool unmounts and removes an inline volume of a pool. A volume whose record is
// damaged is kept for inspection, but the call succeeds, so that the pod terminates.
func (s *Server) unpublishInPool(ctx context.Context, id, target string) error {
	if err := s.cleanUp(ctx, ctx, id); err != nil {
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
		errors.Is(err, volume.ErrUnavailable) && !mounted: // CleanUpInline removes the volume when the pool is open
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

// discard detaches and deletes an inline volume. It returns ErrPrecondition while the volume is mounted anywhere.
func discard(ctx context.Context, b backend.Backend, v volume.Volume) error {
	if err := detachUnmounted(ctx, b, v); err != nil {
		return err
	}
	return b.Delete(ctx, v.ID)
}

// detachUnmounted detaches a volume. It returns ErrPrecondition while the volume is mounted anywhere.
func detachUnmounted(ctx context.Context, b backend.Backend, v volume.Volume) error {
	at, err := volumeMounts(ctx, b, v)
	if err != nil {
		return err
	}
	if len(at) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is still mounted at %s: unpublish it there first", v.ID, at[0].Mountpoint)
	}
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnstageGone)
	return nil
}

// volumeMounts returns the mounts of a volume on this node.
func volumeMounts(ctx context.Context, b backend.Backend, v volume.Volume) ([]*mount.Entry, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return nil, err
	}
	return mount.Of(source)
}

// cleanups records which inline volumes this process has cleaned up. Any other inline volume may be left
// over from an earlier process.
type cleanups struct {
	mu      sync.Mutex
	ids     map[string]*cleanup
	running sync.WaitGroup
}

// cleanup is the state of the clean-up of one inline volume.
type cleanup struct {
	lock // of done
	done bool
}

// acquire locks and returns the state of one volume. The caller must release it. Each volume has its own
// lock, because a call that holds a lock may wait for a disk that does not answer.
func (c *cleanups) acquire(ctx context.Context, id string) (*cleanup, error) {
	c.mu.Lock()
	v := c.ids[id]
	if v == nil {
		v = &cleanup{lock: newLock()}
		c.ids[id] = v
	}
	c.mu.Unlock()
	if err := v.acquire(ctx); err != nil {
		return nil, volume.Errorf(volume.ErrPending, "inline volume %.80q: removing what an earlier driver process left of it is still under way: %w", id, err)
	}
	return v, nil
}

// forget makes the next cleanUp of a volume examine the volume again.
func (c *cleanups) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ids, id)
}

// cleanUp removes an inline volume that an earlier process left and that is not mounted, such as after an
// interrupted call or a restart of the node. A mounted volume belongs to a pod and stays. cleanUp does
// nothing if this process has cleaned up the volume before. The context waiting limits the wait for
// other calls for the volume.
func (s *Server) cleanUp(ctx, waiting context.Context, id string) error {
	state, err := s.cleaned.acquire(waiting, id)
	if err != nil {
		return err
	}
	defer state.release()
	if state.done {
		return nil
	}
	b, v, err := s.inline(id)
	switch {
	case err == nil:
		var mounts []*mount.Entry
		if mounts, err = volumeMounts(ctx, b, v); err == nil && len(mounts) == 0 {
			err = discard(ctx, b, v)
		}
	case isMissing(err), errors.Is(err, volume.ErrDamaged): // a call for the volume reports the error
		err = nil
	}
	state.done = err == nil
	return err
}

// CleanUpInline removes the inline volumes that earlier processes left, each in its own goroutine, so
// that a volume whose disk does not answer does not delay the others. It returns when all are removed,
// or after wait. An error means that a volume is still in use or being removed, or that a pool that may
// contain inline volumes is not open; the caller must then call CleanUpInline again.
func (s *Server) CleanUpInline(ctx context.Context, wait time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var errs []error
	var results []<-chan error
	for _, provider := range backend.As[backend.InlineProvider](s.backends) {
		ids, err := provider.Inlines()
		errs = append(errs, err)
		for _, id := range ids {
			result := make(chan error, 1)
			results = append(results, result)
			s.cleaned.running.Go(func() { result <- s.cleanUp(ctx, waiting, id) })
		}
	}
	for _, result := range results {
		select {
		case err := <-result:
			errs = append(errs, err)
		case <-waiting.Done():
			return errors.Join(append(errs, waiting.Err())...)
		}
	}
	return errors.Join(errs...)
}

// Wait waits for the goroutines that CleanUpInline started. Close the pools only afterwards.
func (s *Server) Wait() { s.cleaned.running.Wait() }

// memoryName returns the mount source (proc_pid_mountinfo(5)) of an inline volume in memory, which
// identifies the volume.
func memoryName(id string) string { return "trivet:" + id }

// publishMemory mounts an inline volume in memory. The volume consists only of this mount.
func (s *Server) publishMemory(ctx context.Context, r request, in volume.Inline, at mount.Info) error {
	if err := checkMemory(r); err != nil {
		return err
	}
	source := &mount.MemorySource{Name: memoryName(r.id), Size: in.Size}
	if at.IsMount {
		return checkPublishedMemory(r, source)
	}
	if err := s.checkMemoryLimit(in); err != nil {
		return err
	}
	return mountTarget(r, at, prepareDir, func() error { return source.Mount(ctx, r.target, r.options) })
}

// checkMemoryLimit refuses a new volume in memory that the configuration does not allow (ErrInvalid).
func (s *Server) checkMemoryLimit(in volume.Inline) error {
	switch {
	case s.InlineMemory == 0:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: this node has no inline volumes in memory: set ephemeralMemory in the driver's configuration", volume.AttrMedium)
	case in.Size > s.InlineMemory:
		return volume.Errorf(volume.ErrInvalid, "volume_context.%s: a volume in memory has at most %s on this node, but the pod requests %s: request less, or raise ephemeralMemory in the driver's configuration", volume.AttrSize, volume.FormatSize(s.InlineMemory), volume.FormatSize(in.Size))
	}
	return nil
}

// checkMemory refuses a request that no volume in memory can satisfy (ErrInvalid).
func checkMemory(r request) error {
	switch {
	case r.capability.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: a volume in memory has no filesystem type: leave it empty", r.capability.FSType)
	case r.capability.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume in memory is on one node: use a SINGLE_NODE mode", r.capability.Mode)
	}
	return nil
}

// checkPublishedMemory returns nil if the mount at the target is the one that the request describes.
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
		err = volume.Errorf(volume.ErrIncompatible, "volume %s is published at %q, but not as requested (%d bytes, readonly %t): unpublish it first", r.id, r.target, source.Size, r.readOnly)
	}
	return err
}
