package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Names of files in a volume's folder that record the state of its logical volume.
const (
	// wipedFile is an empty file: the data is wiped, and the logical volume may be removed.
	wipedFile = "wiped"
	// unusedFile is an empty file: the volume was not created. The logical volume may exist. If it was taken over, it has
	// data.
	unusedFile = "unused"
	// copyingFile is an empty file: the data of a volume on another node is or was received on a thick logical volume. It stays in the
	// folder of the volume, because the driver may be killed until the volume is committed.
	copyingFile = "copying"
)

// Abandon implements pool.Storage. A logical volume on which data was received is wiped as that of a deleted volume.
func (s *storage) Abandon(folder *os.Root) error {
	copied, err := backend.HasFlag(folder, copyingFile)
	if err == nil && !copied {
		err = backend.CreateFlag(folder, unusedFile)
	}
	return err
}

// Reclaim implements pool.Storage: it wipes and removes the logical volume of a deleted volume, or removes those of
// deleted snapshots.
func (s *storage) Reclaim(ctx context.Context, folder *os.Root, path string) error {
	v, ok, err := pool.ReadTrashed(forms, folder)
	switch {
	case err != nil && !errors.Is(err, volume.ErrDamaged):
		return fmt.Errorf("%s: %w", path, err)
	case err != nil:
		return errors.Join(fmt.Errorf("%s has no readable record of a logical volume: restore the record from a backup; or remove that folder, then trivet doctor shows its logical volume as orphaned", path), err)
	case !ok: // the logical volume was removed, or the folder is that of snapshots
		return s.reclaimSnapshots(ctx, folder, path)
	}
	if err := s.removeVolume(ctx, v, folder); err != nil {
		return fmt.Errorf("volume %s, which was deleted: %w; if its logical volume must be kept, remove %s", v.ID, err, path)
	}
	return nil
}

// removeVolume verifies that a logical volume is that of a deleted volume, wipes it unless it never had data, and
// removes it.
func (s *storage) removeVolume(ctx context.Context, v volume.Volume, folder *os.Root) error {
	if err := s.removeTemporary(ctx, folder); err != nil {
		return err
	}
	g, lv, ok, err := s.find(ctx, sectionOf(v).identity)
	if err != nil || !ok {
		return err
	}
	abandoned, err := backend.HasFlag(folder, unusedFile)
	if err != nil {
		return err
	}
	wiped, err := backend.HasFlag(folder, wipedFile)
	if err != nil {
		return err
	}
	neverUsed := lv.HasTag(unusedTag)
	switch {
	case abandoned && sectionOf(v).LogicalVolume != "":
		return s.release(ctx, v)
	case !lv.HasTag(guidTag + sectionOf(v).GUID):
		return missingTag(g, lv, sectionOf(v).GUID)
	case abandoned && !neverUsed:
		return fmt.Errorf("%s/%s may have data, but its record says that the volume was not created: %s was restored from an older backup", g.Name, lv.Name, s.cfg.Directory.Path)
	case !neverUsed && !wiped && lv.Pool == "": // a thin pool zeroes its blocks before another volume sees them
		if err := s.wipe(ctx, g, lv, v, folder); err != nil {
			return err
		}
	}
	return s.change(ctx, func(g dm.Group, r *dm.Report) error {
		if err := removeGrowth(ctx, g, r, sectionOf(v).GUID); err != nil {
			return err
		}
		return remove(ctx, g, r, lv)
	})
}

// missingTag is the error for a logical volume that has the UUID of a record, but not its tag.
func missingTag(g dm.Group, lv dm.LogicalVolume, guid string) error {
	return fmt.Errorf("%s/%s has the UUID of its record, but not the tag %s: if it is the volume's, add the tag (lvchange --addtag)", g.Name, lv.Name, guidTag+guid)
}

// EraseHeader implements pool.HeaderEraser. A thick logical volume that never had data of the volume needs no erasing. A thin one
// may have the header of another volume, of which it is a copy.
func (s *storage) EraseHeader(ctx context.Context, folder *os.Root, v volume.Volume) error {
	abandoned, err := backend.HasFlag(folder, unusedFile)
	if err != nil {
		return err
	}
	if t, err := s.thinPool(); s.thin != "" && (err != nil || t.Data.Free() < luks.DataOffset) {
		return err // if a snapshot shares the header, writing to it needs free blocks
	}
	var device *os.File
	err = s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) (err error) {
		lv, ok := r.Volume(sectionOf(v).id())
		neverUsed := lv.HasTag(unusedTag)
		if !ok || !lv.HasTag(guidTag+sectionOf(v).GUID) || neverUsed && lv.Pool == "" || abandoned && !neverUsed { // see removeVolume
			return nil
		}
		device, err = open(ctx, g, lv, dm.Exclusive)
		return err
	})
	if err != nil || device == nil {
		return err
	}
	defer device.Close()
	return luks.Erase(device)
}

// find finds the logical volume of a deleted volume or snapshot, by its UUID if the record has one, and otherwise by its
// name. ok is false if there is none.
func (s *storage) find(ctx context.Context, of identity) (g dm.Group, lv dm.LogicalVolume, ok bool, err error) {
	err = s.changeCurrent(ctx, func(current dm.Group, r *dm.Report) error {
		g = current
		if of.Group != g.UUID {
			return fmt.Errorf("it belongs to the volume group with the UUID %s, and %s has %s", of.Group, g.Name, g.UUID)
		}
		if of.Volume != "" {
			lv, ok = r.Volume(of.id())
		} else if lv, ok = r.Named(volumeName(of.GUID)); ok {
			ok = lv.HasTag(guidTag + of.GUID)
		}
		return nil
	})
	return g, lv, ok, err
}

// wipe makes a logical volume read as zeros. It begins at the offset that an interrupted call has recorded.
func (s *storage) wipe(ctx context.Context, g dm.Group, lv dm.LogicalVolume, v volume.Volume, folder *os.Root) error {
	device, err := open(ctx, g, lv, dm.Exclusive)
	if err != nil {
		return err
	}
	defer device.Close()
	err = blockdev.ZeroRange(ctx, device, min(backend.WipedOffset(folder.FS()), lv.Size), lv.Size, blockdev.ZeroOptions{
		Release: sectionOf(v).Wipe == wipeDiscard, Budget: s.cfg.Background(device), Progress: backend.WipeProgress(folder),
	})
	if errors.Is(err, blockdev.ErrNotBlank) { // the volume was written to after it was zeroed
		_ = folder.Remove(backend.WipingFile) // the next attempt starts at offset 0
	}
	if err == nil {
		err = backend.CreateFlag(folder, wipedFile)
		crashpoint.Here(crashpoint.ReapErasing)
	}
	return err
}
