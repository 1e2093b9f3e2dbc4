package loop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// attachShared is Attach for an image in a shared pool.
func (b *Backend) attachShared(ctx context.Context, p *pool.Pool, v volume.Volume) (mount.Source, error) {
	if err := b.checkOwner(p, v); err != nil {
		return nil, err
	}
	source, ok, err := b.attached(ctx, v)
	if errors.Is(err, blockdev.ErrDeviceBusy) {
		err = volume.Errorf(volume.ErrInUse, "volume %s: %w", v.ID, err)
	}
	if ok && err == nil {
		err = b.checkLock(v)
	}
	if ok || err != nil {
		return source, err
	}
	if err := b.checkFencing(p); err != nil {
		return nil, err
	}
	b.swept.Do(func() { b.sweep(ctx, p) })
	dir, err := b.mountPrivate(ctx, p, v.ID)
	if err != nil {
		return nil, err
	}
	source, err = b.attachPrivate(ctx, p, v, dir)
	dir.Close()
	if err != nil {
		return nil, errors.Join(err, b.unmountPrivate(context.WithoutCancel(ctx), v.ID))
	}
	return source, nil
}

// attachPrivate attaches the image in dir, the root of its private mount. ErrUnavailable if
// another node has the lock: if that node is down, its lease at the server expires.
func (b *Backend) attachPrivate(ctx context.Context, p *pool.Pool, v volume.Volume, dir *os.Root) (mount.Source, error) {
	e, err := privateMount(b.privatePath(v.ID))
	if err == nil && e == nil {
		err = volume.Errorf(volume.ErrPending, "volume %s: the mount for its image was removed meanwhile: try again", v.ID)
	}
	if err == nil {
		err = checkMounted(p, e)
	}
	if err != nil {
		return nil, err
	}
	var image *os.File
	err = retry.For(ctx, releaseTime, func() (again bool, err error) {
		image, err = p.Images.LockAt(dir, v.ID.Name)
		return errors.Is(err, volume.ErrInUse), err
	})
	if errors.Is(err, volume.ErrInUse) {
		return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: its image is locked by another node, whose writes are still accepted: wait until that node releases it or its lease at the server expires (90 s with a Linux server's settings), or have the server's administrator expire that client", v.ID)
	}
	if err != nil {
		return nil, err
	}
	// Before it was locked, the volume may have been published to another node.
	if err := b.checkOwner(p, v); err != nil {
		return nil, errors.Join(err, image.Close())
	}
	return b.attachLocked(ctx, p, v, image)
}

// checkOwner refuses a volume that is controller-published to another node and not to this
// one: the other node may be writing to it.
func (b *Backend) checkOwner(p *pool.Pool, v volume.Volume) error {
	attachments, err := p.Attachments.List(v.ID.Name)
	if err != nil || len(attachments) == 0 {
		return err
	}
	for _, a := range attachments {
		if a.Node == b.Set.NodeID() {
			return nil
		}
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q and no longer to node %q: publish it here first", v.ID, attachments[0].Node, b.Set.NodeID())
}

// checkLock verifies that the volume's device on this node, if there is one, still has the
// lock on its image. After the server has revoked it, the kernel fails all I/O of the device,
// but an idle filesystem on it does not detect that: it still shows its cached content,
// although another node may have changed the volume.
func (b *Backend) checkLock(v volume.Volume) error {
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil || !ok {
		return err
	}
	err = blockdev.Probe(number)
	if errors.Is(err, syscall.EIO) {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: the server no longer accepts writes to the volume's image from this node (%w): this node was disconnected and lost its lock, and another node may have written since, or the export has become read-only; stop its pods on this node and unstage it", v.ID, err)
	}
	return err
}

// VerifyOwnership implements backend.OwnershipVerifier.
func (b *Backend) VerifyOwnership(_ context.Context, v volume.Volume) error {
	p, err := b.Set.ByID(v.ID)
	if err != nil || !p.Shared() {
		return err
	}
	if err := b.checkOwner(p, v); err != nil {
		return err
	}
	return b.checkLock(v)
}

// abort makes all requests that wait for the image of a volume fail, until ctx ends or the
// device has released the image. Then it stops, because the kernel returns the lock to the
// server: without that no node gets the lock while this one runs. It does nothing if the
// server answers at the address of the mount, so that dirty pages are still written. Only the
// ID of v is used.
func (b *Backend) abort(ctx context.Context, v volume.Volume) error {
	path := b.privatePath(v.ID)
	if e, err := privateMount(path); err != nil || e == nil || mount.Answers(ctx, e) {
		return err
	}
	return mount.AbortNFS(context.WithoutCancel(ctx), path, func() bool { return ctx.Err() != nil || !b.bound(v) })
}

// bound tells whether the volume has a device on this node, or may have one after an error.
func (b *Backend) bound(v volume.Volume) bool {
	_, ok, err := b.Loops.Find(b.tag(v.ID))
	return ok || err != nil
}

// detachShared frees the volume's devices, and then unmounts the private mount. Teardown
// decides whether by force. Only the ID of v is used.
func (b *Backend) detachShared(ctx context.Context, v volume.Volume) error {
	force, err := b.Set.Teardown(v.ID.Pool)
	if err != nil {
		return err
	}
	if force {
		return b.detachByForce(ctx, v)
	}
	if err := b.detachDevices(ctx, v); err != nil {
		return err
	}
	b.Loops.Forget(b.tag(v.ID))
	return b.unmountPrivate(ctx, v.ID)
}

// forcedUnmountTime is how long a filesystem may take to unmount when all its writes fail.
const forcedUnmountTime = 10 * time.Second

// freeByForce returns when the devices are free. The process that freed them may still wait
// for the server to accept that the lock is released.
func (b *Backend) freeByForce(ctx context.Context, v volume.Volume) error {
	abort, stop := context.WithCancel(ctx)
	defer stop()
	freed, aborted := make(chan error, 1), make(chan error, 1)
	go func() {
		freed <- retry.For(abort, forcedUnmountTime, func() (bool, error) {
			err := b.detachDevices(ctx, v)
			return errors.Is(err, blockdev.ErrDeviceBusy), err
		})
	}()
	go func() { aborted <- b.abort(abort, v) }()
	select {
	case err := <-freed:
		stop()
		return errors.Join(err, <-aborted)
	case err := <-aborted:
		if b.bound(v) {
			err = errors.Join(err, <-freed)
		}
		return err
	}
}

// detachByForce is detachShared for a server that does not answer: requests of the devices
// that wait for it fail.
func (b *Backend) detachByForce(ctx context.Context, v volume.Volume) error {
	if err := b.freeByForce(ctx, v); err != nil {
		return err
	}
	b.Loops.Forget(b.tag(v.ID))
	path := b.privatePath(v.ID)
	if _, err := privateMount(path); err != nil {
		return err
	}
	if err := mount.DetachNFS(path); err != nil {
		return err
	}
	return mount.RemoveTarget(path)
}

// The image of a volume in a shared pool is opened through a private mount, which has a
// superblock of its own: aborting the requests to a silent server affects no other volume.
// The mount is at a path, so that it outlives the process and the next process finds it.

// releaseTime is how long to wait for a private mount or the lock of an image: the kernel
// closes the image a moment after it has freed the device.
const releaseTime = 2 * time.Second

// privatePath is the mount point of a volume's private mount.
func (b *Backend) privatePath(id volume.ID) string {
	return filepath.Join(b.Set.MountsDir(), strings.TrimPrefix(b.tag(id), tagPrefix))
}

// imageSource is the folder of a volume on its server.
func imageSource(p *pool.Pool, name string) mount.NFS {
	c := p.Config().NFS
	return mount.NFS{
		Server:  strings.Trim(c.Server, "[]"),
		Path:    path.Join(c.Export, pool.FolderPath(name)),
		Options: append(slices.Clone(c.MountOptions), "nosharecache", "hard", "actimeo=0", "nosuid", "nodev", "noexec"),
	}
}

// mountPrivate creates the private mount of a volume without a device, and opens its root. It
// removes a mount that another process has left at the path.
func (b *Backend) mountPrivate(ctx context.Context, p *pool.Pool, id volume.ID) (*os.Root, error) {
	if err := b.unmountPrivate(ctx, id); err != nil {
		return nil, err
	}
	target := b.privatePath(id)
	if err := os.MkdirAll(target, 0o700); err != nil {
		return nil, err
	}
	source := imageSource(p, id.Name)
	m, version, err := mount.MountNFS(ctx, source, 0)
	if err != nil {
		return nil, errors.Join(backend.ExplainMount(err), mount.RemoveTarget(target))
	}
	defer func() { _ = m.Close() }()
	if err := checkVersion(p, version); err != nil {
		return nil, errors.Join(err, mount.RemoveTarget(target))
	}
	dir, err := openRoot(m)
	if err == nil {
		if err = m.MoveTo(target); err == nil {
			return dir, nil
		}
		dir.Close()
	}
	return nil, errors.Join(err, mount.RemoveTarget(target))
}

func openRoot(m *mount.Detached) (*os.Root, error) {
	dir, err := m.OpenRoot()
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

// unmountPrivate removes the private mount of a volume, and its mount point. It is no error if
// there is none.
func (b *Backend) unmountPrivate(ctx context.Context, id volume.ID) error {
	target := b.privatePath(id)
	err := retry.For(ctx, releaseTime, func() (again bool, err error) {
		e, err := privateMount(target)
		if err != nil || e == nil {
			return false, err
		}
		err = mount.Unmount(target)
		// Another mount may be below it, or another call may have unmounted it already.
		return err == nil || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EINVAL), err
	})
	if errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrInUse, "volume %s: its image is in use on this node: %w", id, err)
	}
	if err != nil {
		return err
	}
	return mount.RemoveTarget(target)
}

// privateMount is the private mount at a path; nil if there is none.
func privateMount(path string) (*mount.Entry, error) {
	e, err := mount.OnPath(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e == nil {
		return nil, nil //nolint:nilnil // no mount is an answer
	}
	if err == nil && !mount.IsNFS(e) {
		err = volume.Errorf(volume.ErrPrecondition, "%s is a mount of type %s, which this driver did not create: unmount it", path, e.FSType)
	}
	return e, err
}

// sweep removes the private mounts of the pool that an earlier process has left without a
// device.
func (b *Backend) sweep(ctx context.Context, p *pool.Pool) {
	log := klog.FromContext(ctx)
	volumes := imageSource(p, "").String() + "/"
	left, err := mount.Table(func(e *mount.Entry) bool {
		return mount.IsNFS(e) && filepath.Dir(e.Mountpoint) == b.Set.MountsDir() && strings.HasPrefix(e.Source, volumes)
	})
	if err != nil {
		log.Error(err, "Listing leftover mounts of images failed")
		return
	}
	for _, e := range left {
		// A device that was bound in another container does not keep the mount busy.
		if _, bound, err := b.Loops.Find(tagPrefix + filepath.Base(e.Mountpoint)); err != nil || bound {
			continue
		}
		err := mount.Unmount(e.Mountpoint)
		if err == nil {
			err = mount.RemoveTarget(e.Mountpoint)
		}
		if err != nil && !errors.Is(err, syscall.EBUSY) {
			log.Error(err, "Unmounting a leftover mount of an image failed", "path", e.Mountpoint)
		}
	}
}

// revalidate makes the kernel request the size of a volume's image from the server, for
// UpdateSize. The mount caches no attributes, but an open file may.
func (b *Backend) revalidate(id volume.ID) error {
	_, err := os.Lstat(filepath.Join(b.privatePath(id), pool.ImageFile))
	return err
}
