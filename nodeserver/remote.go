package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// mountRemote mounts a directory of a server at the staging path, and leaves there
// nothing else.
func mountRemote(ctx context.Context, source mount.Source, r request) error {
	if err := showRemote(ctx, source, r); err != nil {
		return err
	}
	return checkShown(source, r.staging)
}

// showRemote mounts a directory of a server out of sight, and shows it at the staging
// path if it is the volume's.
func showRemote(ctx context.Context, source mount.Source, r request) (err error) {
	n := source.NFS.With(r.options.Data)
	if err := mount.CheckNFSOptions(r.options.Data); err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", r.capability.MountFlags, err)
	}
	fs, _, err := mount.MountNFS(ctx, n, r.options.Attr)
	if errors.Is(err, mount.ErrBadOption) {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove from mountOptions what the NFS client does not know", r.capability.MountFlags, err)
	}
	if err != nil {
		return backend.ExplainNFS(err)
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	if err := verify(fs, source); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageMounted)
	return fs.MoveTo(r.staging)
}

// checkShown takes away what a path led to through a symbolic link, which whoever can
// write above it may have made: the mount table has the path that was found (nfs(5) has
// no flag to follow none). Over version 3 the server follows them, unseen.
func checkShown(source mount.Source, staging string) error {
	e, err := mount.OnPath(staging)
	if err != nil || e == nil {
		return err
	}
	if shown, err := source.Shows(e); shown || err != nil {
		return err
	}
	err = volume.Errorf(volume.ErrPrecondition, "%s: a part of this path is a symbolic link, and the server has %s there: name that, if it is meant", source.NFS.Source(), e.Source)
	return errors.Join(err, mount.Unmount(staging))
}

func verify(fs *mount.Detached, source mount.Source) error {
	if source.Verify == nil {
		return nil
	}
	root, err := fs.OpenRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	return source.Verify(root)
}

// unstageShared unmounts a volume whose storage is on a server, as Teardown says.
func (s *Server) unstageShared(ctx context.Context, b backend.Backend, v volume.Volume, staging string, mine func() (bool, error)) error {
	e, err := mount.OnPath(staging)
	if err != nil || e == nil {
		return err
	}
	force, err := s.teardown(ctx, e)
	if err != nil {
		return err
	}
	if mount.IsNFS(e) {
		ok, err := mine()
		if err != nil {
			return err
		}
		if !ok {
			return leftAlone("staging_target_path", staging)
		}
		return unmountNFS(ctx, e, staging, force)
	}
	plain := func(ctx context.Context) error { return unmount(ctx, "staging_target_path", staging, mine) }
	aborter, can := b.(backend.Aborter)
	if !force || !can {
		return plain(ctx)
	}
	abort := func(ctx context.Context) error { return aborter.Abort(ctx, v) }
	return aborting(ctx, abort, plain, func() bool { return replaced(e, staging) })
}

// teardown is Teardown for one mount. A server may have several addresses, and one
// that answers at the mount's own is not given up: it still gets what was written.
func (s *Server) teardown(ctx context.Context, e *mount.Entry) (force bool, err error) {
	if s.Teardown == nil {
		return false, nil
	}
	force, err = s.Teardown()
	if (force || err != nil) && mount.IsNFS(e) && mount.Answers(ctx, e) {
		return false, nil
	}
	return force, err
}

// replaced tells whether a mount is not at a path any more.
func replaced(e *mount.Entry, path string) bool {
	now, err := mount.OnPath(path)
	return err == nil && (now == nil || now.ID != e.ID)
}

// aborting runs a step that waits for storage which does not answer, and has what
// it waits for fail: abort does that until its context ends, or the storage is let
// go. Then the step is not waited for if it is done but for that.
func aborting(ctx context.Context, abort, step func(context.Context) error, done func() bool) error {
	until, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	aborted, stepped := make(chan struct{}), make(chan error, 1)
	go func() { defer close(aborted); _ = abort(until) }() // the step tells how it went
	go func() { stepped <- step(ctx) }()
	select {
	case err := <-stepped:
		stop()
		<-aborted
		return err
	case <-aborted:
		if done() {
			return nil
		}
		return <-stepped
	}
}

// unmountTarget unmounts a volume from a target. A program that was killed, and waits
// for a silent server, keeps the target busy: once the server is given up, what it
// waits for fails, if nobody else has the volume.
func (s *Server) unmountTarget(ctx context.Context, b backend.Backend, v volume.Volume, target string, mine func() (bool, error)) error {
	err := unmount(ctx, "target_path", target, mine)
	if !errors.Is(err, syscall.EBUSY) || !v.ID.Shared() {
		return err
	}
	e, other := mount.OnPath(target)
	if other != nil || e == nil {
		return errors.Join(err, other)
	}
	if force, outage := s.teardown(ctx, e); outage != nil || !force {
		return err
	}
	abort, other := lastAbort(b, v, e)
	if other != nil || abort == nil {
		return errors.Join(err, other)
	}
	return aborting(ctx, abort, func(ctx context.Context) error {
		return retry.For(ctx, letGo, func() (bool, error) {
			err := unmount(ctx, "target_path", target, mine)
			return errors.Is(err, syscall.EBUSY), err
		})
	}, func() bool { return false })
}

// letGo is how long a target may stay busy once what its users wait for fails.
const letGo = 10 * time.Second

// lastAbort makes what waits for a volume's storage fail; nil if it is shown elsewhere
// than at its target's mount and where it is staged: then others wait for it too.
func lastAbort(b backend.Backend, v volume.Volume, e *mount.Entry) (func(context.Context) error, error) {
	beside, err := mount.Beside(e)
	if err != nil || len(beside) != 1 {
		return nil, err
	}
	if mount.IsNFS(e) { // through the other mount, since whoever aborts keeps one busy
		return func(ctx context.Context) error {
			return mount.AbortNFS(context.WithoutCancel(ctx), beside[0], func() bool { return ctx.Err() != nil })
		}, nil
	}
	aborter, can := b.(backend.Aborter)
	if !can {
		return nil, nil
	}
	return func(ctx context.Context) error { return aborter.Abort(ctx, v) }, nil
}

// unmountNFS unmounts a staged directory of a server. What is dirty is written while
// the mount still stands: an unmount that waits for the server could not be
// repeated.
func unmountNFS(ctx context.Context, e *mount.Entry, staging string, force bool) error {
	shown, err := mount.Beside(e)
	if err != nil {
		return err
	}
	if len(shown) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "staging_target_path %q: the volume is still published at %s: unpublish it there first", staging, shown[0])
	}
	if force {
		return forced(mount.ForceUnmountNFS(ctx, staging))
	}
	if err := syncAt(staging); err != nil && !stale(err) {
		return volume.Errorf(volume.ErrUnavailable, "staging_target_path: what was written to the volume is not on its server yet: %w", err)
	}
	return unmount(ctx, "staging_target_path", staging, func() (bool, error) { return true, nil })
}

func syncAt(staging string) error {
	dir, err := os.Open(staging)
	if err != nil {
		return err
	}
	defer dir.Close()
	return mount.SyncFilesystem(dir)
}

// forced says that an unmount by force takes longer than its caller waits.
func forced(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return volume.Errorf(volume.ErrUnavailable, "the volume is being unmounted by force, its server being silent: %w: try again", err)
	}
	return err
}

// stale tells whether an error says that the server does not know the directory any
// more: nothing can be written to it, now or later.
func stale(err error) bool { return errors.Is(err, syscall.ESTALE) }

// unstageStatic unstages a volume of which nothing is known but where it is mounted.
func (s *Server) unstageStatic(ctx context.Context, staging string) error {
	e, err := staticMount("staging_target_path", staging)
	if err != nil || e == nil {
		return err
	}
	force, err := s.teardown(ctx, e)
	if err != nil {
		return err
	}
	return unmountNFS(ctx, e, staging, force)
}

// unpublishStatic does the same for a target.
func unpublishStatic(ctx context.Context, target string) error {
	e, err := staticMount("target_path", target)
	if err != nil {
		return err
	}
	if e != nil {
		err := unmount(ctx, "target_path", target, func() (bool, error) { return true, nil })
		if err != nil {
			return err
		}
	}
	return removeTarget(target)
}

// staticMount is the NFS mount at a path; nil if nothing is mounted there.
func staticMount(field, path string) (*mount.Entry, error) {
	e, err := mount.OnPath(path)
	if err == nil && e != nil && !mount.IsNFS(e) {
		return nil, volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it is left alone", field, path)
	}
	return e, err
}

// staticStats are those of a volume of which only the path is known.
func staticStats(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
	e, err := mount.OnPath(path)
	if err == nil && (e == nil || !mount.IsNFS(e) && !mount.IsMemory(e, memoryName(id))) {
		err = volume.Errorf(volume.ErrNotFound, "volume_path %q: no volume is mounted there", path)
	}
	if err != nil {
		return nil, err
	}
	return filesystemStats(path)
}

// staticHealth looks at the paths of a volume of which nothing else is known; without
// one that is a mount of a server there is no such volume.
func staticHealth(req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	for _, path := range []string{req.GetStagingTargetPath(), req.GetVolumePublishPath()} {
		if path == "" {
			continue
		}
		e, err := mount.OnPath(path)
		if err != nil {
			return nil, err
		}
		if e != nil && mount.IsNFS(e) || mount.IsMemory(e, memoryName(req.GetVolumeId())) {
			return &csi.NodeGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), mountConditions(e))}, nil
		}
	}
	return nil, volume.Errorf(volume.ErrNotFound, "volume %q is not this driver's, and not mounted at the paths given", req.GetVolumeId())
}

// directoryConditions looks at a staged directory.
func directoryConditions(source mount.Source) ([]backend.Condition, error) {
	mounts, err := mount.Of(source)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	return mountConditions(mounts[0]), nil
}

func mountConditions(e *mount.Entry) []backend.Condition {
	if _, err := isEmpty(e.Mountpoint); err != nil {
		return []backend.Condition{{
			Severity: backend.Inaccessible, Reason: backend.ReasonDirectoryUnreachable,
			Message: fmt.Sprintf("%s at %s does not answer: %v", e.Source, e.Mountpoint, explainStale(err)),
		}}
	}
	return nil
}

// explainStale says what a stale handle means (open(2) and others, ESTALE).
func explainStale(err error) error {
	if !stale(err) {
		return err
	}
	return volume.Errorf(volume.ErrPrecondition, "%w: the directory was removed on the server, or another filesystem was exported in its place: restore it there; pods get it back when they are started anew", err)
}
