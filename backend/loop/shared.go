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
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// attachShared is Attach for an image in a shared pool.
func (b *Backend) attachShared(ctx context.Context, p *pool.Pool, v volume.Volume, secrets volume.Secrets) (mount.Source, error) {
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
	source, err = b.attachPrivate(ctx, p, v, dir, secrets)
	dir.Close()
	if err != nil {
		return nil, errors.Join(err, b.unmountPrivate(context.WithoutCancel(ctx), v.ID))
	}
	return source, nil
}

// attachPrivate attaches the image in dir, the root of its private mount. ErrUnavailable if
// another node holds the lock. If that node is down, the server releases the lock when the lease of
// the node expires.
func (b *Backend) attachPrivate(ctx context.Context, p *pool.Pool, v volume.Volume, dir *os.Root, secrets volume.Secrets) (mount.Source, error) {
	e, err := privateMount(b.privatePath(v.ID))
	if err == nil && e == nil {
		err = volume.Errorf(volume.ErrPending, "volume %s: the mount for its image was removed meanwhile: retry", v.ID)
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
	// The volume may have been published to another node before the image was locked.
	if err := b.checkOwner(p, v); err != nil {
		return nil, errors.Join(err, image.Close())
	}
	return b.attachLocked(ctx, p, v, image, secrets)
}

// checkOwner refuses a volume that is controller-published to another node and not to this one,
// because the other node may be writing to the volume.
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
	return volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q and not to node %q: publish it to %[3]q first", v.ID, attachments[0].Node, b.Set.NodeID())
}

// checkLock verifies that the volume's device on this node, if there is one, still holds the lock
// on the image. After the server has revoked the lock, the kernel fails all I/O of the device. An
// idle filesystem does not detect that, and still returns cached data, although another node may
// have changed the volume.
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

// abort aborts all pending requests for the image of a volume, until ctx ends or the device has
// released the image. After that it must not abort the kernel's request that returns the lock to the
// server, or no other node gets the lock while this node runs. If the server answers at the address
// of the mount, abort does nothing, so that dirty pages are written. Only the ID of v is used.
func (b *Backend) abort(ctx context.Context, v volume.Volume) error {
	path := b.privatePath(v.ID)
	if e, err := privateMount(path); err != nil || e == nil || mount.Answers(ctx, e) {
		return err
	}
	return mount.AbortNFS(context.WithoutCancel(ctx), path, func() bool { return ctx.Err() != nil || !b.bound(v) })
}

// bound reports whether the volume has a device on this node. It returns true if that is unknown.
func (b *Backend) bound(v volume.Volume) bool {
	_, ok, err := b.Loops.Find(b.tag(v.ID))
	return ok || err != nil
}

// detachShared frees the volume's devices, and then unmounts the private mount, by force if
// pool.Set.Teardown requires it. Only the ID of v is used.
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

// forcedUnmountTime is the timeout for the unmount of a filesystem whose writes are aborted.
const forcedUnmountTime = 10 * time.Second

// freeByForce frees the volume's devices, and aborts the requests that delay this. It returns when
// the devices are free, although a goroutine may still wait until the server confirms the release of
// the lock.
func (b *Backend) freeByForce(ctx context.Context, v volume.Volume) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	freed, aborted := make(chan error, 1), make(chan error, 1)
	go func() {
		freed <- retry.For(ctx, forcedUnmountTime, func() (bool, error) {
			err := b.detachDevices(ctx, v)
			return errors.Is(err, blockdev.ErrDeviceBusy) || errors.Is(err, luks.ErrBusy), err
		})
	}()
	go func() { aborted <- b.abort(ctx, v) }()
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

// detachByForce is detachShared for a server that does not answer: the pending requests of the devices
// fail.
func (b *Backend) detachByForce(ctx context.Context, v volume.Volume) error {
	if err := b.freeByForce(ctx, v); err != nil {
		return err
	}
	if err := b.CloseMapped(ctx, v); err != nil { // removes the device node if the kernel has closed the container
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

// The image of a volume in a shared pool is opened through a private mount. The mount has a superblock
// of its own, so that aborting its requests affects no other volume. It is mounted at a path, so
// that the next process of the driver finds it.

// releaseTime is the timeout for unmounting a private mount and for locking an image. Both can fail for
// a moment, because the kernel closes the image only after it has freed the device.
const releaseTime = 2 * time.Second

// privatePath is the mount point of a volume's private mount.
func (b *Backend) privatePath(id volume.ID) string {
	return filepath.Join(b.Set.MountsDir(), strings.TrimPrefix(b.tag(id), tagPrefix))
}

// imageSource returns the NFS address and mount options of a volume's folder.
func imageSource(p *pool.Pool, name string) mount.NFS {
	c := p.Config().NFS
	return mount.NFS{
		Server:  strings.Trim(c.Server, "[]"),
		Path:    path.Join(c.Export, pool.FolderPath(name)),
		Options: append(slices.Clone(c.MountOptions), "nosharecache", "hard", "actimeo=0", "nosuid", "nodev", "noexec"),
	}
}

// mountPrivate creates the private mount of a volume that has no device, and opens the root of the
// mount. It first removes a private mount that another process has left.
func (b *Backend) mountPrivate(ctx context.Context, p *pool.Pool, id volume.ID) (*os.Root, error) {
	if err := b.unmountPrivate(ctx, id); err != nil {
		return nil, err
	}
	target := b.privatePath(id)
	if err := os.MkdirAll(target, 0o700); err != nil {
		return nil, err
	}
	source := imageSource(p, id.Name)
	const attributes = 0 // the options contain nosuid, nodev and noexec
	m, version, err := mount.MountNFS(ctx, source, attributes)
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

// openRoot opens the root directory of a mount that is not attached to a path yet.
func openRoot(m *mount.Detached) (*os.Root, error) {
	dir, err := m.OpenRoot()
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

// unmountPrivate removes the private mount of a volume, and its mount point. It succeeds if there
// is none.
func (b *Backend) unmountPrivate(ctx context.Context, id volume.ID) error {
	target := b.privatePath(id)
	err := retry.For(ctx, releaseTime, func() (again bool, err error) {
		e, err := privateMount(target)
		if err != nil || e == nil {
			return false, err
		}
		err = mount.Unmount(target)
		// After an unmount, and after EINVAL, privateMount is called again: another mount may be below this
		// one, or another call may have unmounted it.
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

// privateMount returns the private mount at a path; nil if there is none.
func privateMount(path string) (*mount.Entry, error) {
	e, err := mount.OnPath(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e == nil {
		return nil, nil //nolint:nilnil // there is no mount
	}
	if err == nil && !mount.IsNFS(e) {
		err = volume.Errorf(volume.ErrPrecondition, "%s is a mount of type %s, which this driver did not create: unmount it", path, e.FSType)
	}
	return e, err
}

// sweep removes the private mounts without a device that an earlier process has left.
func (b *Backend) sweep(ctx context.Context, p *pool.Pool) {
	log := klog.FromContext(ctx)
	volumes := imageSource(p, "").String() + "/" // the folder of all volumes on the server
	left, err := mount.Table(func(e *mount.Entry) bool {
		return mount.IsNFS(e) && filepath.Dir(e.Mountpoint) == b.Set.MountsDir() && strings.HasPrefix(e.Source, volumes)
	})
	if err != nil {
		log.Error(err, "Listing leftover mounts of images failed")
		return
	}
	for _, e := range left {
		// Unmount does not fail with EBUSY if the device was bound in another container.
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

// revalidate makes the kernel request the size of a volume's image from the server, so that
// blockdev.GrowLoop sees the new size. The mount caches no attributes, but an open file may.
func (b *Backend) revalidate(id volume.ID) error {
	_, err := os.Lstat(filepath.Join(b.privatePath(id), pool.ImageFile))
	return err
}
