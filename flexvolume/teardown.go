package flexvolume

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// outage is how long a server may be silent before what is mounted from it is unmounted by
// force, and loses what the server has not received.
const outage = 2 * time.Minute

// sweepTime limits sweep: a kubelet waits for the answer to init before it uses other plugins.
const sweepTime = 10 * time.Second

// release undoes mount, and what killed calls have left that had the same lock.
func (s *session) release(ctx context.Context, t target) error {
	all, err := targets(ctx, s.state)
	if err != nil {
		return err
	}
	err = s.takeDown(ctx, t, all)
	for _, other := range all {
		if other.lock() == s.lockName && other.Path != t.Path {
			s.clear(ctx, other, all)
		}
	}
	return err
}

// clear takes down a volume that was to be mounted at a directory where nothing is mounted.
// If that fails, the next call repeats it.
func (s *session) clear(ctx context.Context, t target, all []target) {
	at, err := mount.OnPath(t.Path)
	if err == nil && at == nil {
		err = s.takeDown(ctx, t, all)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to clear what a killed call left", "volume", t.Volume, "path", t.Path)
	}
}

// takeDown unmounts a volume from one directory, and unstages it if it is mounted at none of
// the others on record, also if the directory cannot be removed. The record is removed last:
// what a killed call leaves is found by it.
func (s *session) takeDown(ctx context.Context, t target, all []target) error {
	used, err := usedElsewhere(t, all)
	if err != nil {
		return err
	}
	forced := false
	if !used {
		if forced, err = s.giveUp(ctx, t); err != nil {
			return err
		}
	}
	_, kept := s.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: t.Volume, TargetPath: t.Path})
	if at, err := mount.OnPath(t.Path); at != nil || err != nil {
		return errors.Join(kept, err)
	}
	if !used {
		if err := s.unstage(ctx, t.Volume, forced); err != nil {
			return err
		}
	}
	return errors.Join(kept, s.forget(t))
}

func (s *session) unstage(ctx context.Context, id string, force bool) error {
	staging := s.staging(id)
	if force {
		if err := forceUnmount(ctx, staging); err != nil {
			return err
		}
	}
	_, err := s.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	if err != nil {
		return err
	}
	return mount.RemoveTarget(staging)
}

// usedElsewhere tells whether a volume is mounted at another directory than t's.
func usedElsewhere(t target, all []target) (bool, error) {
	for _, other := range all {
		if other.Volume != t.Volume || other.Path == t.Path {
			continue
		}
		if at, err := mount.OnPath(other.Path); at != nil || err != nil {
			return true, err
		}
	}
	return false, nil
}

// giveUp fails while the server of a directory is silent, and after the outage tells that
// the directory has to be unmounted by force. It precedes all other steps: a kubelet knows a
// volume by the directory at which it was mounted, and makes no further call without it. The
// time is on record here, because no driver need run all the while.
func (s *session) giveUp(ctx context.Context, t target) (force bool, err error) {
	at, err := mount.OnPath(s.staging(t.Volume))
	if err != nil {
		return false, err
	}
	silent := t.Pool == "" && at != nil && mount.IsNFS(at) && !mount.Answers(ctx, at)
	took, err := s.silentFor(t, silent)
	if err != nil || !silent {
		return false, err
	}
	if left := outage - took; left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "the server of %s does not answer, and may not have received all that was written: the volume stays mounted, and is unmounted by force in %v", at.Source, left)
	}
	return true, free(ctx, t.Path)
}

// silentFor is how long a target's server has been silent according to its record.
func (s *session) silentFor(t target, silent bool) (time.Duration, error) {
	now, err := sinceBoot()
	if err != nil || silent == (t.Silent != 0) {
		return time.Duration(now-t.Silent) * time.Second, err
	}
	t.Silent = 0
	if silent {
		t.Silent = now
	}
	return 0, s.record(t)
}

// sinceBoot is the uptime in seconds. No mount is older, and setting the clock does not
// change it.
func sinceBoot() (int64, error) {
	var i syscall.Sysinfo_t
	err := syscall.Sysinfo(&i)
	return int64(i.Uptime), os.NewSyscallError("sysinfo", err) //nolint:unconvert // 32 bits on some machines
}

// abandon gives up a silent server.
func abandon() (force bool, err error) { return true, nil }

// free unmounts a target of a silent server. A program that was killed while it waits for
// the server keeps the target busy until its I/O fails.
func free(ctx context.Context, path string) error {
	n, err := mount.NFSAt(path)
	if err != nil || n == nil {
		return err
	}
	err = n.Unmount(ctx, path, abandon)
	if errors.Is(err, syscall.EBUSY) {
		return nil // NodeUnpublishVolume says who uses it
	}
	return err
}

// forceUnmount unmounts a staged directory of a silent server.
func forceUnmount(ctx context.Context, staging string) error {
	n, err := mount.NFSAt(staging)
	if err != nil || n == nil {
		return err
	}
	return n.UnmountLast(ctx, staging, abandon)
}

// sweep takes down what killed calls have left, unless another call is at work there, or no
// driver serves the pool: it is left to the next call for that pool.
func (e *Executable) sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	state, err := e.openState()
	if err != nil {
		return err
	}
	defer state.Close()
	all, err := targets(ctx, state)
	for _, t := range all {
		if at, failed := mount.OnPath(t.Path); failed == nil && at == nil && e.served(ctx, t.Pool) {
			err = errors.Join(err, e.sweepOne(ctx, t))
		}
	}
	return err
}

func (e *Executable) sweepOne(ctx context.Context, t target) error {
	s, err := e.begin(ctx, t, t.Pool, 0)
	if errors.Is(err, syscall.EWOULDBLOCK) { // that call does it
		return nil
	}
	if err != nil {
		return err
	}
	defer s.end()
	all, err := targets(ctx, s.state)
	if err == nil && slices.Contains(all, t) {
		s.clear(ctx, t, all)
	}
	return err
}
