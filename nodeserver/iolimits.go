package nodeserver

import (
	"context"
	"errors"
	"io/fs"
	"regexp"
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
)

// CheckIOLimits returns ErrInvalid if the I/O of pods cannot be limited on this node.
func (s *Server) CheckIOLimits() error {
	if err := s.Cgroups.Check(); err != nil {
		return volume.Errorf(volume.ErrInvalid, "the I/O of the volume cannot be limited: %w; or use a class without limits", err)
	}
	return nil
}

// ApplyIOLimits makes the limits in the record of a volume effective for the pods that use the volume on this node.
func (s *Server) ApplyIOLimits(ctx context.Context, id volume.ID) error {
	_, err := s.applyIOLimits(ctx, id)
	return err
}

// RestoreIOLimits calls ApplyIOLimits for all volumes in pools of this node that have limits. An earlier call may have been
// interrupted, or the cgroup of a pod created again.
func (s *Server) RestoreIOLimits(ctx context.Context) error {
	var errs []error
	for _, limiter := range backend.As[backend.IOLimiter](s.backends) {
		ids, err := limiter.IOLimited()
		errs = append(errs, err)
		for _, id := range ids {
			if err := s.ApplyIOLimits(ctx, id); !errors.Is(err, volume.ErrNotFound) { // ErrNotFound: deleted meanwhile
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// limitPublished limits the I/O of the pod in which a volume was published at a target path.
func (s *Server) limitPublished(ctx context.Context, v volume.Volume, target string) error {
	if v.IOLimits == nil {
		return nil
	}
	pod, ok := podAt(target)
	if !ok && v.IOLimits.Limited() {
		return volume.Errorf(volume.ErrPrecondition, "volume %s limits the I/O of pods, but target_path %q is not that of a pod of a kubelet: remove the limits of the volume, or publish it in a pod", v.ID, target)
	}
	ctx, cancel := context.WithTimeout(ctx, cgroupTimeout)
	defer cancel()
	tick := time.NewTicker(cgroupInterval)
	defer tick.Stop()
	for {
		limited, err := s.applyIOLimits(ctx, v.ID)
		if err != nil || limited[pod] || !v.IOLimits.Limited() {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return volume.Errorf(volume.ErrUnavailable, "volume %s limits the I/O of pods, but pod %s has no cgroup below %s after %s: check that the kubelet runs with --cgroups-per-qos, or remove the limits of the volume", v.ID, pod, s.Cgroups, cgroupTimeout)
		}
	}
}

// releaseIOLimits removes the limits of pods that do not use the volume any more, because the number of a device is used
// again for other volumes. An error is logged, so that the pod can end: its cgroup ends with it.
func (s *Server) releaseIOLimits(ctx context.Context, b backend.Backend, v volume.Volume) {
	if v.IOLimits == nil && v.Version != 0 {
		return
	}
	s.limiting.Lock()
	defer s.limiting.Unlock()
	if _, err := s.limit(ctx, b, v); err != nil {
		klog.FromContext(ctx).Error(err, "Removing the I/O limits of pods that do not use the volume failed", "volume", v.ID)
	}
}

// applyIOLimits is ApplyIOLimits, and returns the UIDs of the pods whose I/O it limited.
func (s *Server) applyIOLimits(ctx context.Context, id volume.ID) (limited map[string]bool, err error) {
	s.limiting.Lock() // from reading the record, so that limits that are changed meanwhile are not replaced by old ones
	defer s.limiting.Unlock()
	b, v, err := s.backends.Volume(ctx, id.String())
	if err != nil || v.IOLimits == nil {
		return nil, err
	}
	limited, err = s.limit(ctx, b, v)
	if errors.Is(err, cgroup.ErrUnsupported) {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s limits the I/O of pods: %w; or remove the limits of the volume", id, err)
	}
	return limited, err
}

// limit limits the I/O of the pods that use a volume, and removes the limits of all others. It returns the UIDs of the pods
// whose I/O it limited. Without limits in v, the limits of the pods that use the volume stay. The caller holds s.limiting.
func (s *Server) limit(ctx context.Context, b backend.Backend, v volume.Volume) (limited map[string]bool, err error) {
	devices, err := devicesOf(ctx, b, v)
	if err != nil || len(devices) == 0 {
		return nil, err
	}
	pods, err := s.Cgroups.Pods()
	if errors.Is(err, cgroup.ErrUnsupported) && !v.IOLimits.Limited() {
		return nil, nil // no pod has limits
	}
	if err != nil {
		return nil, err
	}
	limited = map[string]bool{}
	var errs []error
	for _, d := range devices {
		errs = append(errs, limitDevice(d, v.IOLimits, pods, limited))
	}
	return limited, errors.Join(errs...)
}

// limitDevice is limit for one device. It adds the UIDs of the pods to limited.
func limitDevice(d mount.BlockDevice, limits *volume.IOLimits, pods map[string]cgroup.Pod, limited map[string]bool) error {
	number, err := blockdev.WholeNumber(d.Node())
	if err != nil {
		return err
	}
	using, err := podsUsing(d)
	if err != nil {
		return err
	}
	var errs []error
	for uid, pod := range pods {
		switch {
		case !using[uid]:
			err = pod.Limit(number, cgroup.Limits{})
			if errors.Is(err, cgroup.ErrUnsupported) { // the pod has no limits
				err = nil
			}
		case limits == nil:
			continue
		default:
			err = pod.Limit(number, cgroup.Limits{
				ReadBytes: limits.ReadBytes, WriteBytes: limits.WriteBytes, ReadIOPS: limits.ReadIOPS, WriteIOPS: limits.WriteIOPS,
			})
			limited[uid] = err == nil
		}
		if !errors.Is(err, fs.ErrNotExist) { // ErrNotExist: the pod has ended
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// devicesOf returns the device of a volume and the read-only device of a raw volume, if they exist. A volume without a
// readable record may be a raw volume.
func devicesOf(ctx context.Context, b backend.Backend, v volume.Volume) (devices []mount.BlockDevice, err error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	if d, isDevice := source.(mount.BlockDevice); ok && isDevice {
		devices = append(devices, d)
	}
	provider, can := b.(backend.BlockProvider)
	if !can || !v.Block && v.Version != 0 {
		return devices, nil
	}
	d, ok, err := provider.PresentReadOnly(ctx, v)
	if ok && err == nil {
		devices = append(devices, d)
	}
	return devices, err
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
