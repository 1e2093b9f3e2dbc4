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

// attachShared is Attach for an image that other nodes reach.
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
	if err := b.fence(p); err != nil {
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

// attachPrivate attaches the image that is in dir, a mount of its own.
func (b *Backend) attachPrivate(ctx context.Context, p *pool.Pool, v volume.Volume, dir *os.Root) (mount.Source, error) {
	e, err := privateMount(b.privatePath(v.ID))
	if err == nil && e == nil {
		err = volume.Errorf(volume.ErrPending, "volume %s: the mount for its image was taken away meanwhile: try again", v.ID)
	}
	if err == nil {
		err = checkMounted(p, e)
	}
	if err != nil {
		return nil, err
	}
	image, err := lockAt(ctx, p, v, dir)
	if err != nil {
		return nil, err
	}
	// Before the lock somebody may have given the volume to another node.
	if err := b.checkOwner(p, v); err != nil {
		return nil, errors.Join(err, image.Close())
	}
	return b.attachLocked(ctx, p, v, image)
}

// lockAt locks the image in a volume's folder. Whoever has the lock may be a node
// that is gone, and whose lease at the server ends by itself: ErrUnavailable.
func lockAt(ctx context.Context, p *pool.Pool, v volume.Volume, dir *os.Root) (image *os.File, err error) {
	err = retry.For(ctx, letGo, func() (bool, error) {
		image, err = p.Images.LockAt(dir, v.ID.Name)
		return errors.Is(err, volume.ErrInUse), err
	})
	if errors.Is(err, volume.ErrInUse) {
		return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: its image is locked by another node, whose writes still count: wait until that node lets go or its lease at the server ends (90 s with a Linux server's settings), or have the server's administrator expire that client", v.ID)
	}
	return image, err
}

// checkOwner refuses a volume that is controller-published to another node and
// not to this one: that this node should have it is over, and the other one may
// be writing.
func (b *Backend) checkOwner(p *pool.Pool, v volume.Volume) error {
	at, err := p.Attachments.List(v.ID.Name)
	if err != nil || len(at) == 0 {
		return err
	}
	for _, a := range at {
		if a.Node == b.Set.NodeID() {
			return nil
		}
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q and not to node %q any more: publish it here first", v.ID, at[0].Node, b.Set.NodeID())
}

// checkLock makes sure that the device of a volume on this node, if there is one,
// still has the lock on its image. Once the server has taken it away the kernel fails
// all that the device does, for ever; but a filesystem on it that was idle does not
// know, and shows what was there before another node had the volume.
func (b *Backend) checkLock(v volume.Volume) error {
	number, ok, err := b.loops.Find(b.tag(v.ID))
	if err != nil || !ok {
		return err
	}
	err = blockdev.Probe(number)
	if errors.Is(err, syscall.EIO) {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: the server takes no writes to the volume's image from this node any more (%w): this node was cut off from it and lost its lock, and another node may have written since, or the export is read-only by now; stop its pods here and unstage it", v.ID, err)
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

// abort makes what waits for the image of a volume fail, until ctx ends or the device has
// released the image: then the kernel only returns the lock, which the server has to learn
// of, or nobody gets it as long as this node runs. A server that answers at the address of
// the mount still receives what was written. Of v the ID is enough.
func (b *Backend) abort(ctx context.Context, v volume.Volume) error {
	at := b.privatePath(v.ID)
	if e, err := privateMount(at); err != nil || e == nil || mount.Answers(ctx, e) {
		return err
	}
	return mount.AbortNFS(context.WithoutCancel(ctx), at, func() bool { return ctx.Err() != nil || !b.bound(v) })
}

// bound tells whether the volume has a device here, for all that is known.
func (b *Backend) bound(v volume.Volume) bool {
	_, ok, err := b.loops.Find(b.tag(v.ID))
	return ok || err != nil
}

// detachShared frees the volume's devices and then its image's mount, as Teardown
// says. Of v the ID is enough.
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
	b.loops.Forget(b.tag(v.ID))
	return b.unmountPrivate(ctx, v.ID)
}

// failing is how long a filesystem may take to end once all its writes fail.
const failing = 10 * time.Second

// freeByForce returns when the devices are free. Who freed them may still wait to
// tell the server that the lock is.
func (b *Backend) freeByForce(ctx context.Context, v volume.Volume) error {
	abort, stop := context.WithCancel(ctx)
	defer stop()
	freed, aborted := make(chan error, 1), make(chan error, 1)
	go func() {
		freed <- retry.For(abort, failing, func() (bool, error) {
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

// detachByForce is for a server that does not answer: what devices wait for fails.
func (b *Backend) detachByForce(ctx context.Context, v volume.Volume) error {
	if err := b.freeByForce(ctx, v); err != nil {
		return err
	}
	b.loops.Forget(b.tag(v.ID))
	at := b.privatePath(v.ID)
	if _, err := privateMount(at); err != nil {
		return err
	}
	if err := mount.DetachNFS(at); err != nil {
		return err
	}
	return mount.RemoveTarget(at)
}
