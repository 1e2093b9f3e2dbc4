package nodeserver

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// publishInline makes an inline volume and mounts it at its target. The kubelet stages
// none, and knows of one that failed only if it may be there all the same: so what a
// failed call has made is removed (Kubernetes, pkg/volume/util/types,
// IsOperationFinishedError).
func (s *Server) publishInline(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	r, err := inlineRequest(req)
	if err != nil {
		return err
	}
	in, err := volume.ParseInline(req.GetVolumeContext())
	if err != nil {
		return err
	}
	at, err := mount.Inspect(r.target)
	if err != nil {
		return err
	}
	if in.Memory {
		err = s.publishMemory(r, in, at)
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
	if err := s.settle(ctx, r.id); err != nil {
		return err
	}
	b, v, missing := s.inline(r.id)
	if missing == nil {
		return publishAgain(ctx, b, v, r, in)
	}
	err := s.publishNew(ctx, r, in, at, missing)
	if err != nil {
		s.settled.forget(r.id)
	}
	return err
}

// publishAgain mounts a volume that is there, unless it is mounted. Where new ones may be
// does not matter to it.
func publishAgain(ctx context.Context, b backend.Backend, v volume.Volume, r request, in volume.Inline) error {
	if in.Pool != "" && in.Pool != v.ID.Pool {
		return volume.Errorf(volume.ErrIncompatible, "volume_context.%s=%q: volume %s is in another: unpublish it first", volume.ParamPool, in.Pool, v.ID)
	}
	if err := v.Satisfies(in.Spec(r.id, r.target, r.capability)); err != nil {
		return err
	}
	return stageInline(ctx, b, v, r)
}

func (s *Server) publishNew(ctx context.Context, r request, in volume.Inline, at mount.Info, missing error) error {
	switch {
	case errors.Is(missing, volume.ErrDamaged):
		return missing
	case at.IsMount:
		return errOtherMount(r)
	}
	err := s.makeInline(ctx, r, in)
	if err != nil {
		err = errors.Join(err, s.undo(context.WithoutCancel(ctx), r, at))
	}
	return err
}

func errOtherMount(r request) error {
	return volume.Errorf(volume.ErrIncompatible, "target_path %q has something else than inline volume %s mounted: unmount it, or name another path", r.target, r.id)
}

// makeInline makes a volume and mounts it.
func (s *Server) makeInline(ctx context.Context, r request, in volume.Inline) error {
	b, spec, err := s.inlineSpec(r, in)
	if err != nil {
		return err
	}
	v, err := b.Create(ctx, spec)
	if err != nil {
		return err
	}
	return stageInline(ctx, b, v, r)
}

// inlineSpec is what a backend is asked for.
func (s *Server) inlineSpec(r request, in volume.Inline) (backend.Backend, volume.Spec, error) {
	spec := in.Spec(r.id, r.target, r.capability)
	b, err := s.backends.ByName(spec.Parameters.Backend)
	if err != nil {
		return nil, spec, err
	}
	provider, can := b.(backend.InlineProvider)
	if !can {
		return nil, spec, volume.Errorf(volume.ErrInvalid, "backend %s makes no inline volumes", b.Name())
	}
	if err := b.Supports(r.capability); err != nil {
		return nil, spec, err
	}
	spec.Parameters.Pool, err = provider.InlinePool(in.Pool)
	return b, spec, err
}

// stageInline mounts a volume at its target, unless it is mounted there.
func stageInline(ctx context.Context, b backend.Backend, v volume.Volume, r request) error {
	if err := v.Supports(r.capability); err != nil {
		return err
	}
	if err := stageFilesystem(ctx, b, v, r); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageDone)
	return nil
}

// undo removes what a call that failed has made; at is what was at the target before.
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

// isMissing tells that an inline volume is not there, for all that can be seen.
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

// find looks up a volume that is not static.
func (s *Server) find(ctx context.Context, id string) (backend.Backend, volume.Volume, error) {
	if volume.InlineID(id) {
		return s.inline(id)
	}
	return s.backends.Volume(ctx, id)
}

// isStatic tells whether an ID is of a volume that has no record here. A static one may
// have an ID like that of an inline volume.
func (s *Server) isStatic(id string) bool {
	if volume.InlineID(id) {
		_, _, err := s.inline(id)
		return isMissing(err)
	}
	return foreign(id)
}

// unpublishInline unmounts a volume with an ID of the kubelet's from its target and, if
// it is an inline volume, removes it. What is mounted there tells which it is: a static
// volume is an NFS mount.
func (s *Server) unpublishInline(ctx context.Context, id, target string) error {
	e, err := mount.OnPath(target)
	if err != nil {
		return err
	}
	if e != nil && mount.IsNFS(e) {
		return unpublishStatic(ctx, target)
	}
	if mount.IsMemory(e, memoryName(id)) {
		return unpublishMemory(ctx, target)
	}
	if err := s.settle(ctx, id); err != nil {
		return err
	}
	defer s.settled.forget(id)
	b, v, err := s.inline(id)
	damaged := errors.Is(err, volume.ErrDamaged)
	switch {
	case errors.Is(err, volume.ErrNotFound),
		errors.Is(err, volume.ErrUnavailable) && e == nil: // what a closed pool has of it Settle removes
		return unpublishStatic(ctx, target)
	case err != nil && !damaged:
		return err
	}
	if _, err := s.unpublishAt(ctx, b, v, target); err != nil {
		return err
	}
	if err := takeDown(ctx, b, v); err != nil {
		return err
	}
	if damaged { // for ever, and pods have to be able to go
		klog.FromContext(ctx).Error(err, "What is left of an inline volume is kept: look at it, and remove its folder")
		return nil
	}
	if err := b.Delete(ctx, v.ID); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnpublishDone)
	return nil
}

// discard removes an inline volume. ErrPrecondition while it is mounted anywhere.
func discard(ctx context.Context, b backend.Backend, v volume.Volume) error {
	if err := takeDown(ctx, b, v); err != nil {
		return err
	}
	return b.Delete(ctx, v.ID)
}

// takeDown frees the device of a volume. ErrPrecondition while it is mounted anywhere.
func takeDown(ctx context.Context, b backend.Backend, v volume.Volume) error {
	at, err := mountpoints(ctx, b, v)
	if err != nil {
		return err
	}
	if len(at) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is still mounted at %s: unpublish it there first", v.ID, at[0])
	}
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnstageGone)
	return nil
}

// mountpoints are where a volume is mounted.
func mountpoints(ctx context.Context, b backend.Backend, v volume.Volume) ([]string, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return nil, err
	}
	mounts, err := mount.Of(source)
	var at []string
	for _, m := range mounts {
		at = append(at, m.Mountpoint)
	}
	return at, err
}

// settled holds the state of inline volumes in this process. What it does not know may be
// from a process before it.
type settled struct {
	mu  sync.Mutex
	ids map[string]*settling
}

// settling is the state of one inline volume.
type settling struct {
	lock chan struct{} // has room for one holder, who may change the rest
	done bool
}

// acquire locks the state of one volume, which the caller releases. Other volumes are not
// affected: the holder may wait for a disk that does not answer.
func (s *settled) acquire(ctx context.Context, id string) (*settling, error) {
	s.mu.Lock()
	v := s.ids[id]
	if v == nil {
		v = &settling{lock: make(chan struct{}, 1)}
		s.ids[id] = v
	}
	s.mu.Unlock()
	select {
	case v.lock <- struct{}{}: // free: also for a call whose time is over
		return v, nil
	default:
	}
	select {
	case v.lock <- struct{}{}:
		return v, nil
	case <-ctx.Done():
		return nil, volume.Errorf(volume.ErrPending, "inline volume %.80q: removing what an earlier driver process left of it is still under way: %w", id, ctx.Err())
	}
}

func (v *settling) release() { <-v.lock }

func (s *settled) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, id)
}

// settle removes what a process before this one left of an inline volume, once. A mounted
// volume belongs to a pod and stays. Otherwise the node was restarted, or the call that
// made the volume was cut off.
func (s *Server) settle(ctx context.Context, id string) error {
	v, err := s.settled.acquire(ctx, id)
	if err != nil {
		return err
	}
	return s.settleAcquired(ctx, id, v)
}

func (s *Server) settleAcquired(ctx context.Context, id string, state *settling) error {
	defer state.release()
	if state.done {
		return nil
	}
	b, v, err := s.inline(id)
	switch {
	case err == nil:
		err = discardForgotten(ctx, b, v)
	case isMissing(err), errors.Is(err, volume.ErrDamaged): // a call for it says what is wrong
		err = nil
	}
	state.done = err == nil
	return err
}

func discardForgotten(ctx context.Context, b backend.Backend, v volume.Volume) error {
	at, err := mountpoints(ctx, b, v)
	if err != nil || len(at) > 0 {
		return err
	}
	return discard(ctx, b, v)
}

// Settle settles all inline volumes that processes before this one left, each on its own:
// one whose disk does not answer delays no other. It returns when all are settled, or
// after wait. An error says what must be tried again: a volume is still in use or being
// removed, or a pool that may contain more is not open.
func (s *Server) Settle(ctx context.Context, wait time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var errs []error
	var results []<-chan error
	for _, provider := range backend.As[backend.InlineProvider](s.backends) {
		ids, err := provider.Inlines()
		errs = append(errs, err)
		for _, id := range ids {
			results = append(results, s.settleBehind(ctx, waiting, id))
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

// settleBehind settles a volume in a goroutine, unless it cannot be locked while waiting.
func (s *Server) settleBehind(ctx, waiting context.Context, id string) <-chan error {
	result := make(chan error, 1)
	go func() {
		v, err := s.settled.acquire(waiting, id)
		if err == nil {
			err = s.settleAcquired(ctx, id, v)
		}
		result <- err
	}()
	return result
}
