package nodeserver

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// cgroupTimeout limits the wait for the cgroup of a pod, and cgroupInterval is the time between two attempts. The kubelet
	// creates the cgroup of a pod and publishes its volumes at the same time, and starts the containers after both.
	cgroupTimeout  = 10 * time.Second
	cgroupInterval = 20 * time.Millisecond
	// undoTimeout limits the time to unpublish a volume if the I/O of the pod cannot be limited.
	undoTimeout = 10 * time.Second
)

// CheckIOLimits returns ErrInvalid if the I/O of pods cannot be limited on this node, and ErrUnavailable if that cannot be
// determined.
func (s *Server) CheckIOLimits() error {
	err := s.Cgroups.Check()
	switch {
	case errors.Is(err, cgroup.ErrUnsupported):
		return volume.Errorf(volume.ErrInvalid, "the I/O of the volume cannot be limited: %w; or use a class without limits", err)
	case err != nil:
		return volume.Errorf(volume.ErrUnavailable, "checking whether the I/O of pods can be limited: %w", err)
	}
	return nil
}

// ApplyIOLimits makes the limits in the record of a volume effective for the pods that use the volume on this node.
func (s *Server) ApplyIOLimits(ctx context.Context, id volume.ID) error {
	done, err := s.lockAndLimit(ctx, id)
	return errors.Join(err, done.err())
}

// RestoreIOLimits does the same as ApplyIOLimits for all volumes in pools of this node that have limits. An earlier call may have
// been interrupted, or the cgroup of a pod created again. A volume is omitted while another call sets its limits.
func (s *Server) RestoreIOLimits(ctx context.Context) error {
	var errs []error
	for _, limiter := range backend.As[backend.IOLimiter](s.backends) {
		ids, err := limiter.IOLimited()
		errs = append(errs, err)
		for _, id := range ids {
			if err := s.restoreIOLimits(ctx, id); !errors.Is(err, volume.ErrNotFound) { // ErrNotFound: deleted meanwhile
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// restoreIOLimits is RestoreIOLimits for one volume.
func (s *Server) restoreIOLimits(ctx context.Context, id volume.ID) error {
	release, ok := s.limiting.tryAcquire(id)
	if !ok {
		return nil
	}
	defer release()
	done, err := s.limitRecorded(ctx, id)
	return errors.Join(err, done.err())
}

// publishLimited publishes a volume at a target path by publish, and limits the I/O of the pod. After an error the volume is not
// published: a kubelet calls NodeUnpublishVolume only after errors that are not final. If the volume stays published at the target
// path, the error is ErrUnavailable, which is not final.
func (s *Server) publishLimited(ctx context.Context, b backend.Backend, v volume.Volume, r request, publish func() error) error {
	if !v.IOLimits.Limited() {
		return publish()
	}
	published, err := mount.IsMountPoint(r.target)
	if err != nil {
		return err
	}
	pod, err := s.limitablePod(v, r.target)
	if err == nil {
		if err := publish(); err != nil {
			return err
		}
		err = s.limitPublished(ctx, v, pod)
		if err != nil && !published {
			return s.undoPublish(ctx, b, v, r.target, err)
		}
	}
	if err != nil && published {
		return volume.Errorf(volume.ErrUnavailable, "%w; the volume stays published at %s", err, r.target)
	}
	return err
}

// undoPublish unpublishes a volume after the error cause, and returns cause.
func (s *Server) undoPublish(ctx context.Context, b backend.Backend, v volume.Volume, target string, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout) // ctx may have ended
	defer cancel()
	if err := s.unpublish(ctx, b, v, target); err != nil {
		return volume.Errorf(volume.ErrUnavailable, "%w; the volume may stay published at %s: %w", cause, target, err)
	}
	return cause
}

// limitablePod returns the UID of the pod of a target path (ErrPrecondition if its I/O cannot be limited).
func (s *Server) limitablePod(v volume.Volume, target string) (uid string, err error) {
	uid, ok := podAt(target)
	if !ok {
		return "", volume.Errorf(volume.ErrPrecondition, "volume %s limits the I/O of pods, but target_path %q is not that of a pod of a kubelet: remove the limits of the volume, or publish it in a pod", v.ID, target)
	}
	_, err = s.Cgroups.Pods()
	return uid, explainLimit(v.ID, err)
}

// explainLimit adds the volume and a remedy to an error of limiting I/O.
func explainLimit(id volume.ID, err error) error {
	if errors.Is(err, cgroup.ErrUnsupported) {
		return volume.Errorf(volume.ErrPrecondition, "volume %s limits the I/O of pods: %w; or remove the limits of the volume", id, err)
	}
	return err
}

// limitPublished limits the I/O of the pod in which a volume was published. Errors of other pods are logged.
func (s *Server) limitPublished(ctx context.Context, v volume.Volume, pod string) error {
	if err := s.awaitCgroup(ctx, v, pod); err != nil {
		return err
	}
	done, err := s.lockAndLimit(ctx, v.ID)
	switch {
	case err != nil:
		return err
	case done.failed[pod] != nil:
		return done.failed[pod]
	case !done.limited[pod]:
		return volume.Errorf(volume.ErrUnavailable, "volume %s limits the I/O of pods, but the cgroup of pod %s or the volume's device was removed meanwhile: publish the volume again", v.ID, pod)
	}
	if err := done.err(); err != nil {
		klog.FromContext(ctx).Error(err, "Limiting the I/O of other pods failed; retrying", "volume", v.ID)
	}
	return nil
}

// awaitCgroup waits until a pod has a cgroup.
func (s *Server) awaitCgroup(ctx context.Context, v volume.Volume, pod string) error {
	ctx, cancel := context.WithTimeout(ctx, cgroupTimeout)
	defer cancel()
	tick := time.NewTicker(cgroupInterval)
	defer tick.Stop()
	for {
		pods, err := s.Cgroups.Pods()
		if _, ok := pods[pod]; ok || err != nil {
			return explainLimit(v.ID, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return volume.Errorf(volume.ErrUnavailable, "volume %s limits the I/O of pods, but pod %s has no cgroup below %s after waiting up to %s: check that the kubelet runs with --cgroups-per-qos, or remove the limits of the volume", v.ID, pod, s.Cgroups, cgroupTimeout)
		}
	}
}

// holdIOLimits removes the limits of pods that do not use the volume any more, because the number of a device is used again for
// other volumes. Until release is called, no limits are written for the volume, so that its device can be detached. An error of
// removing limits is logged, so that the pod can end: its cgroup ends with it.
func (s *Server) holdIOLimits(ctx context.Context, b backend.Backend, v volume.Volume) (release func(), err error) {
	if _, ok := b.(backend.IOLimiter); !ok || v.IOLimits == nil && v.Version != 0 {
		return func() {}, nil
	}
	release, err = s.lockIOLimits(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	done, err := s.limit(ctx, b, v)
	if err = errors.Join(err, done.err()); err != nil {
		klog.FromContext(ctx).Error(err, "Removing the I/O limits of pods that do not use the volume failed", "volume", v.ID)
	}
	return release, nil
}

// lockIOLimits locks the limits of a volume until release is called.
func (s *Server) lockIOLimits(ctx context.Context, id volume.ID) (release func(), err error) {
	release, err = s.limiting.acquire(ctx, id)
	if err != nil {
		return nil, volume.Errorf(volume.ErrPending, "volume %s: setting the limits of its I/O is still under way: %w", id, err)
	}
	return release, nil
}

// limitedPods is the result of limiting the I/O of pods on the devices of a volume, by the UIDs of the pods. A pod that uses no
// device is only in failed.
type limitedPods struct {
	limited map[string]bool
	failed  map[string]error
}

// err returns the errors of all pods.
func (l limitedPods) err() error { return errors.Join(slices.Collect(maps.Values(l.failed))...) }

// lockAndLimit is ApplyIOLimits, and returns the result for each pod.
func (s *Server) lockAndLimit(ctx context.Context, id volume.ID) (limitedPods, error) {
	release, err := s.lockIOLimits(ctx, id)
	if err != nil {
		return limitedPods{}, err
	}
	defer release()
	return s.limitRecorded(ctx, id)
}

// limitRecorded is limit for the limits in the record of a volume. The caller holds the lock before the record is read, so that
// limits that are changed meanwhile are not replaced by old ones.
func (s *Server) limitRecorded(ctx context.Context, id volume.ID) (limitedPods, error) {
	b, v, err := s.backends.Volume(ctx, id.String())
	if err != nil || v.IOLimits == nil {
		return limitedPods{}, err
	}
	return s.limit(ctx, b, v)
}

// limit limits the I/O of the pods that use a volume, and removes the limits of all others. Without limits in v, the limits of
// the pods that use the volume stay. The caller holds the volume's lock.
func (s *Server) limit(ctx context.Context, b backend.Backend, v volume.Volume) (done limitedPods, err error) {
	devices, err := devicesOf(ctx, b, v)
	if err != nil || len(devices) == 0 {
		return done, err
	}
	pods, err := s.Cgroups.Pods()
	if errors.Is(err, cgroup.ErrUnsupported) && !v.IOLimits.Limited() {
		return done, nil // no pod has limits
	}
	if err != nil {
		return done, explainLimit(v.ID, err)
	}
	using := map[uint64]map[string]bool{} // the UIDs of the pods, by the numbers of the devices
	for number, d := range devices {
		if using[number], err = podsUsing(d); err != nil {
			return done, err
		}
	}
	// A device that was detached meanwhile may be that of another volume now.
	current, err := devicesOf(ctx, b, v)
	if err != nil {
		return done, err
	}
	done = limitedPods{map[string]bool{}, map[string]error{}}
	for number := range current {
		if devices[number] != nil {
			done.limitDevice(number, v, pods, using[number])
		}
	}
	return done, nil
}

// limitDevice is limit for the device with a number, which some pods use.
func (l limitedPods) limitDevice(number uint64, v volume.Volume, pods map[string]cgroup.Pod, using map[string]bool) {
	for uid, pod := range pods {
		var err error
		switch {
		case !using[uid]:
			err = pod.Limit(number, cgroup.Limits{})
			if errors.Is(err, cgroup.ErrUnsupported) { // the pod has no limits
				err = nil
			}
		case v.IOLimits == nil:
			continue
		default:
			err = pod.Limit(number, cgroup.Limits{
				ReadBytes: v.IOLimits.ReadBytes, WriteBytes: v.IOLimits.WriteBytes, ReadIOPS: v.IOLimits.ReadIOPS, WriteIOPS: v.IOLimits.WriteIOPS,
			})
			if errors.Is(err, cgroup.ErrUnsupported) && !v.IOLimits.Limited() { // as above
				err = nil
			}
			l.limited[uid] = err == nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // ErrNotExist: the pod has ended
			l.failed[uid] = errors.Join(l.failed[uid], explainLimit(v.ID, err))
		}
	}
}

// devicesOf returns the device of a volume and the read-only device of a raw volume, if they exist, by the numbers that io.max
// contains. A volume without a readable record may be a raw volume.
func devicesOf(ctx context.Context, b backend.Backend, v volume.Volume) (map[uint64]mount.BlockDevice, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	var found []mount.BlockDevice
	if d, isDevice := source.(mount.BlockDevice); ok && isDevice {
		found = append(found, d)
	}
	if provider, can := b.(backend.BlockProvider); can && (v.Block || v.Version == 0) {
		d, ok, err := provider.PresentReadOnly(ctx, v)
		if err != nil {
			return nil, err
		}
		if ok {
			found = append(found, d)
		}
	}
	devices := map[uint64]mount.BlockDevice{}
	for _, d := range found {
		number, err := blockdev.WholeNumber(d.Node())
		if err != nil {
			return nil, err
		}
		devices[number] = d
	}
	return devices, nil
}

// podsUsing returns the UIDs of the pods in which a device is published.
func podsUsing(d mount.BlockDevice) (map[string]bool, error) {
	mounts, err := mount.Of(d)
	if err != nil {
		return nil, err
	}
	using := map[string]bool{}
	for _, m := range mounts {
		if uid, ok := podAt(m.Mountpoint); ok {
			using[uid] = true
		}
	}
	return using, nil
}

// podPath matches the target paths of a kubelet: of a filesystem below the directory of the pod, and of a raw device in a
// directory that has an entry for each pod.
var podPath = regexp.MustCompile(`/pods/([^/]+)/volumes/|/volumeDevices/publish/[^/]+/([^/]+)$`)

// podAt returns the UID of the pod of a target path. ok is false if the path is not of a pod.
func podAt(target string) (uid string, ok bool) {
	m := podPath.FindStringSubmatch(target)
	if m == nil {
		return "", false
	}
	return m[1] + m[2], true
}
