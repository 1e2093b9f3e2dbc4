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

// lockTime limits how long a call waits for other calls for the same pool.
const lockTime = 90 * time.Second

// session is one running call. It holds the lock of the volume's pool, or of the directory of a
// server, so that no other process changes the same records and staging mounts.
type session struct {
	*connection
	state    *os.Root
	stateDir *os.File // state as an open file
	lock     *os.File
	lockName string
}

// begin waits for the lock of t, and connects to the driver that serves the pool. Without a pool it
// connects to the on-demand driver.
func (e *Executable) begin(ctx context.Context, t target, pool string, lockTime time.Duration) (_ *session, err error) {
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
	if s.lock, err = lockFile(ctx, s.state, s.lockName, lockTime); err != nil {
		return nil, err
	}
	s.connection, err = e.connect(ctx, s.stateDir, pool)
	return s, err
}

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

func (e *Executable) openState() (*os.Root, error) {
	if err := os.MkdirAll(e.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w: set one that is writable", err)
	}
	state, err := os.OpenRoot(e.StateDir)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{locksDir, targetsDir, stagedDir, uuidsDir} {
		if err := state.MkdirAll(dir, 0o700); err != nil {
			state.Close()
			return nil, fmt.Errorf("state directory: %w: set one that is writable", err)
		}
	}
	return state, nil
}

// lockFile waits for a lock until the timeout. Closing the file releases the lock.
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

// id returns the ID of the node-local volume that options describe. The volume need not exist.
func (s *session) id(ctx context.Context, o options) (string, error) {
	uuid, err := s.poolUUID(ctx, o.parameters)
	if err == nil {
		err = checkUUID(ctx, s.state, o.pool, uuid)
	}
	return volume.ID{Backend: o.kind, Pool: o.pool, PoolUUID: uuid, Name: volume.NameFor(o.name)}.String(), err
}

// volume returns the ID of the volume that options describe. It creates a missing volume if options
// have a size. The volume must belong to the namespace of the pod.
func (s *session) volume(ctx context.Context, o options) (string, error) {
	if o.share != nil {
		return o.handle(), nil
	}
	if o.namespace == "" {
		return "", volume.Errorf(volume.ErrInvalid, "option %s is missing: a kubelet adds it; by hand, give the namespace that the volume belongs to", optionNamespace)
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return "", err
	}
	// The namespace is verified before any other call for the volume: a call that fails later
	// unstages the volume, which other pods may use.
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

// explainMissing adds to a NotFound error how to select or create a volume.
func explainMissing(err error) error {
	if status.Code(err) != codes.NotFound {
		return err
	}
	return fmt.Errorf("%w: set option %s to an existing volume, or set option %s to create it", err, optionVolume, optionSize)
}

// create creates a node-local volume. It rejects subDir, which could be a directory of another user:
// every user who may create pods can trigger the call.
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

// assign sets the namespace of a volume. It fails if the volume has a namespace and is mounted.
func (s *session) assign(ctx context.Context, o options, namespace string) error {
	if o.share != nil {
		return volume.Errorf(volume.ErrInvalid, "a directory of a server belongs to no namespace: the server controls access")
	}
	id, err := s.id(ctx, o)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(s.staging(id))
	if err != nil {
		return err
	}
	change := map[string]string{volume.ParamNamespace: namespace}
	if at != nil {
		change[volume.ParamNamespaceBefore] = ""
	}
	_, err = s.controller.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: change})
	if at != nil && status.Code(err) == codes.FailedPrecondition {
		return volume.Errorf(volume.ErrInUse, "the volume is mounted: delete its pods first: %w", err)
	}
	return explainMissing(err)
}

// mount stages the volume once for all pods, and publishes it at the target's directory. If it
// fails, it restores the previous state of the directory.
func (s *session) mount(ctx context.Context, t target, o options) (err error) {
	before, err := mount.OnPath(t.Path)
	if err != nil {
		return err
	}
	if err := s.releasePrevious(ctx, t, before != nil); err != nil {
		return err
	}
	if err := s.record(t); err != nil {
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

// releasePrevious releases another volume that the record of the directory names: a killed call left
// the record. It fails if that volume is mounted there.
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
		return volume.Errorf(volume.ErrPrecondition, "the driver at %s mounted the volume at %s, but the mount is not visible here: the container of the driver has its own mounts; set %s to a directory whose mounts it shares with the node, such as a directory below /var/lib/kubelet",
			s.socket, staging, StateDirVariable)
	}
	return err
}

// expand grows the volume's storage to at least size bytes, and returns its size in bytes.
func (s *session) expand(ctx context.Context, o options, size int64) (int64, error) {
	if o.share != nil {
		return 0, volume.Errorf(volume.ErrInvalid, "a directory of a server has no size of its own: expand its filesystem")
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

// outage is the time without an answer after which the directories of a server are unmounted by force.
// Data that the server has not received is then lost.
const outage = 2 * time.Minute

// sweepTime limits sweep: a kubelet waits for the answer to init before it uses other plugins.
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
			s.clear(ctx, other, all)
		}
	}
	return err
}

// clear releases the volume of a record whose directory has no mount. If that fails, the next call
// retries.
func (s *session) clear(ctx context.Context, t target, all []target) {
	at, err := mount.OnPath(t.Path)
	if err == nil && at == nil {
		err = s.tearDown(ctx, t, all)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to clean up after a killed call", "volume", t.Volume, "path", t.Path)
	}
}

// tearDown unmounts a volume from one directory, and unstages it if no other recorded directory uses
// it, even if the directory cannot be removed. It removes the record last: the record is needed to
// clean up after a killed call.
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
	return errors.Join(unpublishErr, s.forget(t))
}

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

// usedElsewhere reports whether a volume is mounted at a directory other than that of t.
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

// checkOutage fails while the server of a directory does not answer. After outage it unmounts the
// directory by force, and force is true for the staging mount. It must precede all other steps: a
// kubelet makes no further call after the directory is removed. The record contains the time, because
// no driver runs permanently.
func (s *session) checkOutage(ctx context.Context, t target) (force bool, err error) {
	at, err := mount.OnPath(s.staging(t.Volume))
	if err != nil {
		return false, err
	}
	silent := t.Pool == "" && at != nil && mount.IsNFS(at) && !mount.Answers(ctx, at)
	elapsed, err := s.silentFor(t, silent)
	if err != nil || !silent {
		return false, err
	}
	if left := outage - elapsed; left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "the server of %s does not answer, and may not have received all written data: the volume stays mounted, and is unmounted by force in %v", at.Source, left)
	}
	return true, forceUnmountTarget(ctx, t.Path)
}

// silentFor returns how long the server of a target has not answered. It keeps the start in the record.
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

// sinceBoot returns the uptime in seconds. Unlike the wall clock it cannot be set, and no mount is older.
func sinceBoot() (int64, error) {
	var i syscall.Sysinfo_t
	err := syscall.Sysinfo(&i)
	return int64(i.Uptime), os.NewSyscallError("sysinfo", err) //nolint:unconvert // 32 bits on some machines
}

// abandon is the mount.Abandon for a server that is always abandoned.
func abandon() (force bool, err error) { return true, nil }

// forceUnmountTarget unmounts a target of a server that does not answer. A killed program that waits
// for the server keeps the target busy until its I/O fails.
func forceUnmountTarget(ctx context.Context, path string) error {
	n, err := mount.NFSAt(path)
	if err != nil || n == nil {
		return err
	}
	err = n.Unmount(ctx, path, abandon)
	if errors.Is(err, syscall.EBUSY) {
		return nil // NodeUnpublishVolume reports the users
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

// sweep cleans up after killed calls. It skips a pool with a running call and a pool that no driver
// serves: the next call for that pool cleans up.
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
	if errors.Is(err, syscall.EWOULDBLOCK) { // the running call cleans up
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
