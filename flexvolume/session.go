package flexvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// lockTime limits how long a call waits for other calls for the same pool or NFS directory.
const lockTime = 90 * time.Second

// session is one running call. It holds the lock of the volume's pool or of the NFS directory, so that
// no other process changes the same records and staging mounts.
type session struct {
	*connection
	state    *os.Root
	stateDir *os.File // the state directory as an open file
	lock     *os.File
	lockName string
}

// begin waits for the lock of t, for at most wait, and connects to the driver that serves the pool. If
// pool is empty, it connects to the on-demand driver.
func (e *Executable) begin(ctx context.Context, t target, pool string, wait time.Duration) (_ *session, err error) {
	s := &session{lockName: t.lock()}
	defer func() {
		if err != nil {
			s.end()
		}
	}()
	if s.state, err = e.openState(); err != nil {
		return nil, err
	}
	if s.stateDir, err = s.state.Open("."); err != nil {
		return nil, err
	}
	if s.lock, err = lockFile(ctx, s.state, s.lockName, wait); err != nil {
		return nil, err
	}
	s.connection, err = e.connect(ctx, s.stateDir, pool)
	return s, err
}

// end releases the lock, and closes the connection and the state directory.
func (s *session) end() {
	if s.connection != nil {
		s.close()
	}
	s.lock.Close()
	s.stateDir.Close()
	if s.state != nil {
		s.state.Close()
	}
}

// openState opens the state directory, which it creates if necessary.
func (e *Executable) openState() (*os.Root, error) {
	if err := os.MkdirAll(e.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w: set %s to a writable directory", err, StateDirVariable)
	}
	state, err := os.OpenRoot(e.StateDir)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{locksDir, targetsDir, stagedDir, uuidsDir} {
		if err := state.MkdirAll(dir, 0o700); err != nil {
			state.Close()
			return nil, fmt.Errorf("state directory: %w: set %s to a writable directory", err, StateDirVariable)
		}
	}
	return state, nil
}

// lockFile acquires a lock, and waits for it until the timeout. Closing the file releases the lock.
func lockFile(ctx context.Context, state *os.Root, name string, timeout time.Duration) (*os.File, error) {
	f, err := state.OpenFile(filepath.Join(locksDir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = retry.For(ctx, timeout, func() (bool, error) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		return errors.Is(err, syscall.EWOULDBLOCK), err
	})
	if err != nil {
		f.Close()
		return nil, volume.Errorf(volume.ErrUnavailable, "another call for the same pool is running (%w): retry", err)
	}
	return f, nil
}

// id returns the ID of the node-local volume that the options describe. The volume need not exist.
func (s *session) id(ctx context.Context, o options) (string, error) {
	uuid, err := s.poolUUID(ctx, o.parameters)
	if err == nil {
		err = checkUUID(s.state, o.pool, uuid)
	}
	return volume.ID{Backend: o.kind, Pool: o.pool, PoolUUID: uuid, Name: volume.NameFor(o.name)}.String(), err
}

// findOrCreate returns the ID of the volume that the options describe. It creates a missing volume if
// the options have a size. An existing volume must belong to the namespace of the pod.
func (s *session) findOrCreate(ctx context.Context, o options) (string, error) {
	if o.share != nil {
		return o.handle(), nil
	}
	if o.namespace == "" {
		return "", volume.Errorf(volume.ErrInvalid, "option %s is missing: a kubelet adds it; in a call by hand, set it to the namespace that the volume belongs to", optionNamespace)
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return "", err
	}
	// The namespace is verified before the volume is mounted, because a failed call to mount unstages
	// the volume, which other pods may use.
	resp, err := s.controller.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{o.capability()},
		Parameters: map[string]string{volume.ParamNamespace: o.namespace},
	})
	switch {
	case status.Code(err) == codes.NotFound && o.size != 0:
		return id, s.create(ctx, o)
	case err != nil:
		return "", explainMissing(err)
	case resp.GetConfirmed() == nil:
		return "", volume.Errorf(volume.ErrPrecondition, "%s", resp.GetMessage())
	}
	return id, nil
}

// explainMissing adds the options that select or create a volume to a NotFound error.
func explainMissing(err error) error {
	if status.Code(err) != codes.NotFound {
		return err
	}
	return fmt.Errorf("%w: set option %s to an existing volume, or set option %s to create it", err, optionVolume, optionSize)
}

// create creates a node-local volume. It refuses subDir, because every user who may create pods can
// trigger the call, and subDir could be a directory of another user.
func (s *session) create(ctx context.Context, o options) error {
	if dir := o.parameters[volume.ParamSubDir]; dir != "" {
		return volume.Errorf(volume.ErrInvalid, "option %s=%q: the directory could belong to another user: remove the option, or create the volume with a StorageClass", volume.ParamSubDir, dir)
	}
	o.parameters[volume.ParamNamespace] = o.namespace
	_, err := s.controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: o.name, Parameters: o.parameters,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: o.size},
		VolumeCapabilities: []*csi.VolumeCapability{o.capability()},
	})
	return err
}

// assign sets the namespace of a volume that is not mounted.
func (s *session) assign(ctx context.Context, o options, namespace string) error {
	if o.share != nil {
		return volume.Errorf(volume.ErrInvalid, "an NFS directory belongs to no namespace: the server controls access to it")
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(s.staging(id))
	if err != nil {
		return err
	}
	if at != nil {
		return volume.Errorf(volume.ErrInUse, "the volume is mounted: delete its pods first")
	}
	_, err = s.controller.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{
		VolumeId: id, MutableParameters: map[string]string{volume.ParamNamespace: namespace},
	})
	return explainMissing(err)
}

// mount stages the volume once for all pods, and publishes it at the path of the target. If it fails, it
// restores the previous state of the path.
func (s *session) mount(ctx context.Context, t target, o options) (err error) {
	before, err := mount.OnPath(t.Path)
	if err != nil {
		return err
	}
	if err := s.releasePrevious(ctx, t, before != nil); err != nil {
		return err
	}
	if err := s.writeRecord(t); err != nil {
		return err
	}
	if before == nil {
		defer func() {
			if err != nil {
				err = errors.Join(err, s.release(ctx, t))
			}
		}()
	}
	if err := s.stage(ctx, t, o); err != nil {
		return err
	}
	_, err = s.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: t.Volume, VolumeContext: o.share, StagingTargetPath: s.staging(t.Volume), TargetPath: t.Path,
		VolumeCapability: o.capability(), Readonly: o.readOnly,
	})
	return err
}

// releasePrevious releases the volume that the record at the path of t names, if that is not the volume of t:
// a killed call left the record. It returns an error if a volume is mounted at the path (mounted), or if the
// other volume has another lock.
func (s *session) releasePrevious(ctx context.Context, t target, mounted bool) error {
	recorded, err := readTarget(s.state.FS(), recordName(t.Path))
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, volume.ErrDamaged):
		return nil
	case err != nil || recorded.Volume == t.Volume:
		return err
	case mounted || recorded.lock() != s.lockName:
		return volume.Errorf(volume.ErrInUse, "%s is the directory of volume %s: unmount it there first", t.Path, recorded.Volume)
	}
	return s.release(ctx, recorded)
}

// stage stages the volume of t, and returns an error if this process does not see the staging mount.
func (s *session) stage(ctx context.Context, t target, o options) error {
	staging := s.staging(t.Volume)
	if err := os.Mkdir(staging, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	_, err := s.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: t.Volume, VolumeContext: o.share, StagingTargetPath: staging, VolumeCapability: o.capability(),
	})
	if err != nil {
		return err
	}
	at, err := mount.OnPath(staging)
	if err == nil && at == nil {
		return volume.Errorf(volume.ErrPrecondition, "the driver at %s mounted the volume at %s, but this process does not see the mount, because the container of the driver has its own mounts: set %s to a directory whose mounts the container shares with the node, such as a directory below /var/lib/kubelet",
			s.socket, staging, StateDirVariable)
	}
	return err
}

// expand grows the volume's storage to at least size bytes, and returns its size in bytes.
func (s *session) expand(ctx context.Context, o options, size int64) (int64, error) {
	if o.share != nil {
		return 0, volume.Errorf(volume.ErrInvalid, "an NFS directory has no size of its own: expand the filesystem on the server")
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return 0, err
	}
	resp, err := s.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	return resp.GetCapacityBytes(), explainMissing(err)
}

// expandFilesystem expands the filesystem of a staged volume.
func (s *session) expandFilesystem(ctx context.Context, o options) error {
	if o.share != nil {
		return nil
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return err
	}
	staging := s.staging(id)
	at, err := mount.OnPath(staging)
	if at == nil || err != nil {
		return err
	}
	_, err = s.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: staging})
	return err
}

// outage is how long an NFS server may not answer before its directories are unmounted by force. Data that
// the server has not received is then lost.
const outage = 2 * time.Minute

// sweepTime limits sweep, because a kubelet waits for the answer to init before it uses other plugins.
const sweepTime = 10 * time.Second

// release undoes mount, and cleans up after killed calls that held the same lock.
func (s *session) release(ctx context.Context, t target) error {
	all, err := targets(ctx, s.state)
	if err != nil {
		return err
	}
	err = s.tearDown(ctx, t, all)
	for _, other := range all {
		if other.lock() == s.lockName && other.Path != t.Path {
			s.releaseUnmounted(ctx, other, all)
		}
	}
	return err
}

// releaseUnmounted releases the volume of a target if nothing is mounted at the target, because a killed
// call left the record. If that fails, the next call retries.
func (s *session) releaseUnmounted(ctx context.Context, t target, all []target) {
	at, err := mount.OnPath(t.Path)
	if err == nil && at == nil {
		err = s.tearDown(ctx, t, all)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to clean up after a killed call", "volume", t.Volume, "path", t.Path)
	}
}

// tearDown unmounts a volume from a target, and unstages the volume if it is mounted at no other target,
// even if the directory of the target cannot be removed. It removes the record last, because the record
// is needed to clean up after a killed call.
func (s *session) tearDown(ctx context.Context, t target, all []target) error {
	used, err := usedElsewhere(t, all)
	if err != nil {
		return err
	}
	forced := false
	if !used {
		if forced, err = s.checkOutage(ctx, t); err != nil {
			return err
		}
	}
	_, unpublishErr := s.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: t.Volume, TargetPath: t.Path})
	if at, err := mount.OnPath(t.Path); at != nil || err != nil {
		return errors.Join(unpublishErr, err)
	}
	if !used {
		if err := s.unstage(ctx, t.Volume, forced); err != nil {
			return err
		}
	}
	return errors.Join(unpublishErr, s.removeRecord(t))
}

// unstage unstages a volume and removes its staging path. force is true if the NFS server does not answer.
func (s *session) unstage(ctx context.Context, id string, force bool) error {
	staging := s.staging(id)
	if force {
		if err := forceUnmountStaging(ctx, staging); err != nil {
			return err
		}
	}
	_, err := s.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	if err != nil {
		return err
	}
	return mount.RemoveTarget(staging)
}

// usedElsewhere reports whether the volume of t is mounted at another target.
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

// checkOutage returns an error while the NFS server of a target does not answer. When the server has not
// answered for the time outage, checkOutage unmounts the target by force, and reports that the staging
// mount must be unmounted by force too. It must precede all other steps, because a kubelet makes no
// further call after the directory of the target is removed.
func (s *session) checkOutage(ctx context.Context, t target) (force bool, err error) {
	at, err := mount.OnPath(s.staging(t.Volume))
	if err != nil {
		return false, err
	}
	isSilent := t.Pool == "" && at != nil && mount.IsNFS(at) && !mount.Answers(ctx, at)
	elapsed, err := s.silentFor(t, isSilent)
	if err != nil || !isSilent {
		return false, err
	}
	if left := outage - elapsed; left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "the server of %s does not answer, and may not have received all written data: the volume stays mounted, and is unmounted by force in %v", at.Source, left)
	}
	return true, forceUnmountTarget(ctx, t.Path)
}

// silentFor returns how long the server of a target has not answered. It stores the start of that time in
// the record, because no process runs between calls. isSilent is true if the server does not answer now.
func (s *session) silentFor(t target, isSilent bool) (time.Duration, error) {
	now, err := sinceBoot()
	if err != nil || isSilent == (t.SilentSince != 0) {
		return time.Duration(now-t.SilentSince) * time.Second, err
	}
	t.SilentSince = 0
	if isSilent {
		t.SilentSince = now
	}
	return 0, s.writeRecord(t)
}

// sinceBoot returns the uptime in seconds. Unlike the wall clock it cannot be set, and no mount is older.
func sinceBoot() (int64, error) {
	var i syscall.Sysinfo_t
	err := syscall.Sysinfo(&i)
	return int64(i.Uptime), os.NewSyscallError("sysinfo", err) //nolint:unconvert // 32 bits on some machines
}

// abandon is a mount.Abandon that always abandons the server.
func abandon() (force bool, err error) { return true, nil }

// forceUnmountTarget unmounts a target of a server that does not answer. It returns no error if the target
// is busy: a killed program that waits for the server keeps the target busy until its I/O fails.
func forceUnmountTarget(ctx context.Context, path string) error {
	n, err := mount.NFSAt(path)
	if err != nil || n == nil {
		return err
	}
	err = n.Unmount(ctx, path, abandon)
	if errors.Is(err, syscall.EBUSY) {
		return nil // NodeUnpublishVolume fails if the target is still busy
	}
	return err
}

// forceUnmountStaging unmounts the staging mount of a server that does not answer.
func forceUnmountStaging(ctx context.Context, staging string) error {
	n, err := mount.NFSAt(staging)
	if err != nil || n == nil {
		return err
	}
	return n.UnmountLast(ctx, staging, abandon)
}

// sweep cleans up after killed calls. It skips pools with a running call and pools that no driver serves,
// because the next call for such a pool cleans up.
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
		if at, mountErr := mount.OnPath(t.Path); mountErr == nil && at == nil && e.served(ctx, t.Pool) {
			err = errors.Join(err, e.sweepOne(ctx, t))
		}
	}
	return err
}

// sweepOne releases the volume of a target where nothing is mounted. It does nothing if another call holds the
// lock of the target.
func (e *Executable) sweepOne(ctx context.Context, t target) error {
	s, err := e.begin(ctx, t, t.Pool, 0)
	if errors.Is(err, syscall.EWOULDBLOCK) { // the running call cleans up
		return nil
	}
	if err != nil {
		return err
	}
	defer s.end()
	all, err := targets(ctx, s.state)
	if err == nil && slices.Contains(all, t) {
		s.releaseUnmounted(ctx, t, all)
	}
	return err
}
