package lvm

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Thin pools zero their blocks. Free extents can contain the data of logical volumes that other programs have removed, at
// any time, and a raw volume shows the content of its extents. So the extents of a thick raw volume are zeroed before the
// volume exists, and before it gets more of them. A filesystem does not show blocks that were never written. An encrypted
// raw volume shows its extents decrypted with a key that never encrypted them, which is random data.

// showsExtents reports whether a volume shows what its extents contain.
func (s *storage) showsExtents(v volume.Volume) bool {
	return v.Block && s.thin == "" && v.Encryption == nil
}

// zero makes an active logical volume of a raw volume read as zeros. progress gets the number of bytes done.
func (s *storage) zero(ctx context.Context, v volume.Volume, id dm.VolumeID, size int64, progress func(int64)) error {
	device, err := id.Open(dm.Exclusive)
	if err != nil {
		return err
	}
	defer device.Close()
	return blockdev.ZeroRange(ctx, device, 0, size, blockdev.ZeroOptions{
		Release: sectionOf(v).Wipe == wipeDiscard, Budget: s.cfg.Background(device),
		Progress: func(upTo int64) error {
			progress(upTo)
			return nil
		},
	})
}

// growthSuffix is the end of the name of a growth: a logical volume with the extents that a raw volume is going to get.
// It has the tag with the GUID of the volume, growthTag and unusedTag.
const growthSuffix = ".growth"

// lockTime is the time for which expandRaw waits for a call that stages the volume, after the extents were zeroed.
const lockTime = time.Minute

// expandRaw implements Expand for a thick raw volume, in a job that a retry joins.
func (b *Backend) expandRaw(ctx context.Context, p *pool.Pool, v volume.Volume, r volume.Range) (_ volume.Volume, err error) {
	for {
		err := p.Jobs.Do(ctx, v.ID.Name, func(ctx context.Context, j *pool.Job) error { return b.growRaw(ctx, p, v.ID, r, j.Progress) })
		if err != nil {
			return v, err
		}
		if v, err = p.ByID(v.ID); err != nil || v.Capacity >= r.Required { // otherwise the call has joined one for a smaller size
			return v, errors.Join(err, backend.WithinLimit(v.Capacity, r))
		}
	}
}

// growRaw grows a raw volume. It zeroes the new extents before it locks the volume, so that the volume can be staged
// meanwhile.
func (b *Backend) growRaw(ctx context.Context, p *pool.Pool, id volume.ID, r volume.Range, progress func(int64)) error {
	v, err := p.ByID(id)
	if err != nil {
		return err
	}
	s := storageOf(p)
	var size int64
	if v.Capacity < r.Required {
		if size, err = r.Choose(s.bounds(v)); err == nil {
			defer s.beginGrowth(sectionOf(v).GUID)() //nolint:contextcheck // the growth is removed even if the call has ended
			err = s.prepareGrowth(ctx, p, v, size, progress)
		}
		if err != nil {
			return b.Unexpandable(p, r, err)
		}
	}
	return retry.For(ctx, lockTime, func() (bool, error) {
		_, err := b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
			return size, p.Grow(ctx, v, size, func() error { return s.useGrowth(ctx, v, size) })
		})
		return errors.Is(err, volume.ErrPending), err
	})
}

// beginGrowth protects the growth of the volume with a GUID from Scan until end is called, which removes the growth.
func (s *storage) beginGrowth(guid string) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.growing[guid] = true
	return func() {
		ctx := context.Background()
		if err := s.change(ctx, func(g dm.Group, r *dm.Report) error { return removeGrowth(ctx, g, r, guid) }); err != nil {
			klog.ErrorS(err, "Removing the extents of an interrupted expansion failed; the driver tries again within a minute", "pool", s.cfg.Name, "guid", guid)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.growing, guid)
	}
}

// prepareGrowth creates the growth with which a volume will have a size in bytes, and zeroes it.
func (s *storage) prepareGrowth(ctx context.Context, p *pool.Pool, v volume.Volume, size int64, progress func(int64)) error {
	guid := sectionOf(v).GUID
	var lv dm.LogicalVolume
	err := s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) (err error) {
		if lv, err = s.locate(v, *r); err == nil {
			err = removeGrowth(ctx, g, r, guid) // of an interrupted call
		}
		return err
	})
	if err != nil || lv.Size >= size { // an interrupted call has extended it
		return err
	}
	growth := dm.LogicalVolume{Name: volumeName(guid) + growthSuffix, Size: size - lv.Size, Tags: append(s.tags(v), growthTag)}
	if err := s.awaitRoom(ctx, p, growth.Size); err != nil {
		return err
	}
	if growth.ID, err = s.allocate(ctx, growth, true); err != nil {
		return err
	}
	err = s.zero(ctx, v, growth.ID, growth.Size, progress)
	crashpoint.Here(crashpoint.GrowZeroed)
	return err
}

// useGrowth enlarges the logical volume of a volume to a size in bytes with exactly the extents of its growth. It does
// nothing if an interrupted call has done so. If another program takes the extents meanwhile, the error is ErrNoRoom.
func (s *storage) useGrowth(ctx context.Context, v volume.Volume, size int64) error {
	guid := sectionOf(v).GUID
	return s.explainVolume(v, s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		lv, err := s.locate(v, *r)
		if err != nil || lv.Size >= size {
			return err
		}
		growth, ok := r.Named(volumeName(guid) + growthSuffix)
		if !ok || !isGrowth(growth, guid) || lv.Size+growth.Size != size {
			return volume.Errorf(volume.ErrUnavailable, "volume %s: another program has changed its logical volume, or removed %s%s: retry", v.ID, volumeName(guid), growthSuffix)
		}
		ranges, err := g.Ranges(ctx, growth.Name, growth.ID)
		if err != nil {
			return err
		}
		if err := removeGrowth(ctx, g, r, guid); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.GrowFreed)
		return extend(ctx, g, r, lv, size, ranges...)
	}))
}

// isGrowth reports whether a logical volume is the growth of the volume with a GUID.
func isGrowth(lv dm.LogicalVolume, guid string) bool {
	return lv.Name == volumeName(guid)+growthSuffix && lv.HasTag(growthTag) && lv.HasTag(unusedTag) && lv.HasTag(guidTag+guid)
}

// removeGrowth removes the growth of the volume with a GUID, which is in a record, if there is one.
func removeGrowth(ctx context.Context, g dm.Group, r *dm.Report, guid string) error {
	i := slices.IndexFunc(r.Volumes, func(lv dm.LogicalVolume) bool { return isGrowth(lv, guid) })
	if i < 0 {
		return nil
	}
	return remove(ctx, g, r, r.Volumes[i])
}

// removeGrowths removes what killed drivers have left.
func (s *storage) removeGrowths(ctx context.Context, g dm.Group, r *dm.Report, known inventory) {
	for _, lv := range slices.Clone(r.Volumes) {
		guid, ok := strings.CutSuffix(strings.TrimPrefix(lv.Name, volumeName("")), growthSuffix)
		s.mu.Lock()
		growing := s.growing[guid]
		s.mu.Unlock()
		if !ok || growing || known.volumes[guid].Folder == "" || !lv.HasTag(poolTag+s.cfg.Name) {
			continue
		}
		if err := removeGrowth(ctx, g, r, guid); err != nil {
			klog.FromContext(ctx).Error(err, "Removing the extents of an interrupted expansion failed", "pool", s.cfg.Name, "volume", lv.Name)
		}
	}
}
