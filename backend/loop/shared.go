package loop

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

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
