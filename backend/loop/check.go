package loop

import (
	"context"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// CheckFilesystem implements backend.FilesystemChecker. It checks a copy of the image that shares its blocks.
func (b *Backend) CheckFilesystem(ctx context.Context, v volume.Volume) (found string, err error) {
	if err := b.Checkable(v); err != nil {
		return "", err
	}
	p, err := b.Usable(v.ID)
	if err != nil {
		return "", err
	}
	var image *os.File
	s, release, err := b.TakeTemporary(ctx, p, v, backend.CheckPurpose, expectedSnapshot, func(ctx context.Context, c *backend.SnapshotCopy) (err error) {
		image, err = b.copyToCheck(ctx, c)
		return err
	})
	if err != nil {
		if image != nil {
			image.Close()
		}
		return "", b.Explain(p, err)
	}
	defer func() { err = errors.Join(err, image.Close(), release()) }()
	device, err := blockdev.AttachLoop(ctx, image, blockdev.LoopConfig{SectorSize: v.SectorSize, Tag: Tag(s.ID), AutoClear: true})
	if err != nil {
		return "", err
	}
	defer device.Close()
	crashpoint.Here(crashpoint.CheckAttached)
	return backend.CheckCopy(ctx, device.File(), v, p.Background(image))
}

// copyToCheck copies the image of a volume to a temporary snapshot, and opens it.
func (b *Backend) copyToCheck(ctx context.Context, c *backend.SnapshotCopy) (image *os.File, err error) {
	all, err := b.openSources(ctx, c.Pool, c.Volumes)
	if err != nil {
		return nil, err
	}
	defer all.close()
	if !all[0].formatted() {
		return nil, backend.NotFormatted(all[0].v)
	}
	if image, err = createImage(c.Pool, c.Folders[0]); err != nil {
		return nil, err
	}
	err = copyShared(ctx, image, all)
	if errors.Is(err, clone.ErrNotShared) {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: its pool %q cannot share blocks, so the volume cannot be copied without a pause: put the pool on xfs or btrfs, or check %s with the tools of %s while the volume is not staged",
			all[0].v.ID, c.Pool.Name(), c.Pool.ImagePath(all[0].v.ID.Name), all[0].v.FSType)
	}
	return image, err
}
