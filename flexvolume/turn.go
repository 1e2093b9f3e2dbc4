package flexvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// patience is how long a call waits for others of its pool: a pool has one writer, and
// so calls for its volumes come one at a time.
const patience = 90 * time.Second

// turn is one call at work: it has the lock of its pool, and serves the driver's
// services to itself.
type turn struct {
	state      *os.Root
	lock       *os.File
	name       string // of the lock
	pools      *pool.Set
	controller *controllerserver.Server
	node       *nodeserver.Server
	backends   *backend.Registry
	close      func()
}

// begin waits for the lock of a pool, or of a directory of a server, and opens the pool.
// One that cannot be opened is the error of who needs it: volumes go without it.
func (e *Executable) begin(ctx context.Context, lock string, patience time.Duration) (*turn, error) {
	state, err := e.openState()
	if err != nil {
		return nil, err
	}
	f, err := lockFile(ctx, state, lock, patience)
	if err != nil {
		state.Close()
		return nil, err
	}
	return e.serve(ctx, state, f, lock), nil
}

func (e *Executable) openState() (*os.Root, error) {
	if err := os.MkdirAll(e.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w: give it one that can be written", err)
	}
	state, err := os.OpenRoot(e.StateDir)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{locksDir, targetsDir, stagedDir, "pools"} {
		if err := state.MkdirAll(dir, 0o700); err != nil {
			state.Close()
			return nil, fmt.Errorf("state directory: %w: give it one that can be written", err)
		}
	}
	return state, nil
}

// lockFile takes a lock, and waits for it. It lives as long as the process.
func lockFile(ctx context.Context, state *os.Root, name string, patience time.Duration) (*os.File, error) {
	f, err := state.OpenFile(filepath.Join(locksDir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = retry.For(ctx, patience, func() (bool, error) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		return errors.Is(err, syscall.EWOULDBLOCK), err
	})
	if err != nil {
		f.Close()
		return nil, volume.Errorf(volume.ErrUnavailable, "another call for the same pool is at work (%w): try again", err)
	}
	return f, nil
}

func (e *Executable) serve(ctx context.Context, state *os.Root, lock *os.File, name string) *turn {
	s := &turn{state: state, lock: lock, name: name}
	var own []pool.Config
	for _, c := range e.Pools {
		if lockName(c.Name, "") == name {
			own = append(own, c)
		}
	}
	s.pools = pool.NewSet(own, state)
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var run sync.WaitGroup
	run.Go(func() { s.pools.Run(running) })
	s.close = func() { stop(); run.Wait() }
	_ = s.pools.AwaitReady(ctx) // who needs the pool is told

	var backends []backend.Backend
	for _, make := range e.Backends {
		backends = append(backends, make(s.pools))
	}
	s.backends = backend.NewRegistry(backends...)
	s.controller = controllerserver.New(s.backends, "", 0)
	s.node = nodeserver.New(s.backends, "", 0)
	return s
}

func (s *turn) end() {
	s.close()
	s.lock.Close()
	s.state.Close()
}

// volume is the ID of the volume that options describe, which is made if they say so.
func (s *turn) volume(ctx context.Context, o options) (string, error) {
	if o.share != nil {
		return o.handle(), nil
	}
	if o.namespace == "" {
		return "", volume.Errorf(volume.ErrInvalid, "option %s is missing: a kubelet adds it; by hand, give the namespace that the volume belongs to", optionNamespace)
	}
	id, err := s.find(ctx, o)
	if errors.Is(err, volume.ErrNotFound) && o.size != 0 {
		err = s.create(ctx, o)
	}
	if err != nil {
		return "", err
	}
	return id.String(), s.claim(ctx, o)
}

// create makes a volume of this node. Whoever may make a pod may call for it, so its
// directory is in the volume's own folder: a subDir could be somebody else's directory.
func (s *turn) create(ctx context.Context, o options) error {
	if dir := o.parameters[volume.ParamSubDir]; dir != "" {
		return volume.Errorf(volume.ErrInvalid, "option %s=%q: the directory could be somebody else's: remove the option, or make the volume with a StorageClass", volume.ParamSubDir, dir)
	}
	_, err := s.controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: o.name, Parameters: o.parameters,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: o.size},
		VolumeCapabilities: []*csi.VolumeCapability{o.capability()},
	})
	return err
}

// find looks a volume of this node up. The ID is also that of a volume that is not there.
func (s *turn) find(ctx context.Context, o options) (id volume.ID, err error) {
	p, err := s.pools.Named(o.pool)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return id, fmt.Errorf("%w: FlexVolume needs a pool that no running driver serves; for volumes of this one make PersistentVolumes with a csi source", err)
	}
	if err != nil {
		return id, err
	}
	b, err := s.backends.ByName(o.backend)
	if err != nil {
		return id, err
	}
	id = p.ID(o.backend, volume.NameFor(o.name))
	_, err = b.Get(ctx, id)
	if errors.Is(err, volume.ErrNotFound) && o.size == 0 {
		return id, fmt.Errorf("%w: name one that is there in option %s, or give option %s to have it made", err, optionVolume, optionSize)
	}
	return id, err
}

// mount stages the volume once for all pods, and binds it to the target's directory.
// Of a call that fails nothing stays, but what was there before.
func (s *turn) mount(ctx context.Context, t target, o options) (err error) {
	before, err := mount.OnPath(t.Path)
	if err != nil {
		return err
	}
	if err := s.vacate(ctx, t, before != nil); err != nil {
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

// vacate takes down another volume that a killed call has left of a directory: the record
// is all that tells of it. One that is mounted there is an error.
func (s *turn) vacate(ctx context.Context, t target, mounted bool) error {
	have, err := readTarget(s.state.FS(), recordName(t.Path))
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, volume.ErrDamaged):
		return nil
	case err != nil || have.Volume == t.Volume:
		return err
	case mounted || have.lock() != s.name:
		return volume.Errorf(volume.ErrInUse, "%s is for volume %s, or was to be: unmount it there first", t.Path, have.Volume)
	}
	return s.release(ctx, have)
}

func (s *turn) stage(ctx context.Context, t target, o options) error {
	staging := s.staging(t.Volume)
	if err := os.Mkdir(staging, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	_, err := s.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: t.Volume, VolumeContext: o.share, StagingTargetPath: staging, VolumeCapability: o.capability(),
	})
	return err
}

// release undoes mount, and what calls that were killed have left of the same pool.
func (s *turn) release(ctx context.Context, t target) error {
	all, err := s.targets(ctx)
	if err != nil {
		return err
	}
	err = s.takeDown(ctx, t, all)
	for _, other := range all {
		if other.lock() == s.name && other.Path != t.Path {
			s.clear(ctx, other, all)
		}
	}
	return err
}

// clear takes down a volume that was to be mounted at a directory where nothing is. If
// that fails the next call tries it again.
func (s *turn) clear(ctx context.Context, t target, all []target) {
	at, err := mount.OnPath(t.Path)
	if err == nil && at == nil {
		err = s.takeDown(ctx, t, all)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Clearing what a killed call left failed", "volume", t.Volume, "path", t.Path)
	}
}

// takeDown takes a volume from one directory, and unstages it if it is mounted at no
// other of those recorded; so also if the directory cannot be removed. The record goes
// last: what a killed call leaves is found by it.
func (s *turn) takeDown(ctx context.Context, t target, all []target) error {
	used, err := usedElsewhere(t, all)
	if err != nil {
		return err
	}
	if !used {
		if err := s.giveUp(ctx, t); err != nil {
			return err
		}
	}
	_, kept := s.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: t.Volume, TargetPath: t.Path})
	if at, err := mount.OnPath(t.Path); at != nil || err != nil {
		return errors.Join(kept, err)
	}
	if !used {
		if err := s.unstage(ctx, t.Volume); err != nil {
			return err
		}
	}
	return errors.Join(kept, s.forget(t))
}

// outage is how long a server may be silent before what is mounted from it is given up,
// with what was not written yet.
const outage = 2 * time.Minute

// giveUp has a directory of a server unstaged by force once its server has been silent for
// longer than outage; before, that is an error. It comes before anything is taken down: to
// a kubelet a volume is gone with the directory that it was mounted at, and no call comes
// again.
func (s *turn) giveUp(ctx context.Context, t target) error {
	at, err := mount.OnPath(s.staging(t.Volume))
	if err != nil {
		return err
	}
	silent := t.Pool == "" && at != nil && mount.IsNFS(at) && !mount.Answers(ctx, at)
	s.node.Teardown = func() (bool, error) { return silent, nil }
	took, err := s.silentFor(t, silent)
	if err != nil || !silent {
		return err
	}
	if left := outage - took; left > 0 {
		return volume.Errorf(volume.ErrUnavailable, "the server of %s does not answer, and may not have all that was written: it is waited for, and given up in %v", at.Source, left)
	}
	return s.free(ctx, t)
}

// silentFor is how long a target's server has been silent, by its record.
func (s *turn) silentFor(t target, silent bool) (time.Duration, error) {
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

// letGo is how long a target may stay busy once what its users wait for fails.
const letGo = 10 * time.Second

// free unmounts a target whose server is given up. A program that was killed, and waits
// for the server, keeps it busy until what it waits for fails.
func (s *turn) free(ctx context.Context, t target) error {
	at, err := mount.OnPath(t.Path)
	if err != nil || at == nil || !mount.IsNFS(at) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, letGo)
	defer cancel()
	err = mount.AbortNFS(ctx, s.staging(t.Volume), func() bool { return !errors.Is(mount.Unmount(t.Path), syscall.EBUSY) })
	if errors.Is(err, context.DeadlineExceeded) {
		return nil // the call that takes it down says who keeps it
	}
	return err
}

// sinceBoot is how long the machine runs, in seconds. No mount is older, and setting the
// clock does not change it.
func sinceBoot() (int64, error) {
	var i syscall.Sysinfo_t
	err := syscall.Sysinfo(&i)
	return int64(i.Uptime), os.NewSyscallError("sysinfo", err) //nolint:unconvert // 32 bits on some machines
}

func (s *turn) unstage(ctx context.Context, id string) error {
	staging := s.staging(id)
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

// expand makes what is behind a volume at least as large, and returns its size.
func (s *turn) expand(ctx context.Context, o options, size int64) (int64, error) {
	if o.share != nil {
		return 0, volume.Errorf(volume.ErrInvalid, "a directory of a server has no size of its own: grow what it is on")
	}
	id, err := s.find(ctx, o)
	if err != nil {
		return 0, err
	}
	resp, err := s.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id.String(), CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	return resp.GetCapacityBytes(), err
}

// follow grows the filesystem of a staged volume.
func (s *turn) follow(ctx context.Context, o options) error {
	if o.share != nil {
		return nil
	}
	id, err := s.find(ctx, o)
	if err != nil {
		return err
	}
	staging := s.staging(id.String())
	at, err := mount.OnPath(staging)
	if at == nil || err != nil {
		return err
	}
	_, err = s.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id.String(), VolumePath: staging})
	return err
}

// sweep takes down what calls that were killed have left, where no other call is at
// work.
func (e *Executable) sweep(ctx context.Context) error {
	state, err := e.openState()
	if err != nil {
		return err
	}
	defer state.Close()
	all, err := (&turn{state: state}).targets(ctx)
	for _, t := range all {
		if at, failed := mount.OnPath(t.Path); failed == nil && at == nil {
			err = errors.Join(err, e.sweepOne(ctx, t))
		}
	}
	return err
}

func (e *Executable) sweepOne(ctx context.Context, t target) error {
	s, err := e.begin(ctx, t.lock(), 0)
	if err != nil { // somebody is at work, and does it
		return nil
	}
	defer s.end()
	all, err := s.targets(ctx)
	if err == nil && slices.Contains(all, t) {
		s.clear(ctx, t, all)
	}
	return err
}
