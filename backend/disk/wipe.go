package disk

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Names of files in a volume's folder that record the state of its disk. All but backend.WipingFile are empty.
const (
	// wipedFile means that the data is wiped, and the mark may be removed, too.
	wipedFile = "wiped"
	// unusedFile means that the disk was claimed for a volume that was not created. The disk may have a
	// mark.
	unusedFile = "unused"
	// copyingFile means that another volume's data is or was copied to the disk of a new volume, so that Abandon lets it be wiped. It
	// stays in the folder of the volume, because the driver may be killed until the volume is committed.
	copyingFile = "copying"
)

// Abandon implements pool.Storage. If no data was copied to the disk, Reclaim removes only the mark.
func (s *storage) Abandon(folder *os.Root) error {
	copied, err := backend.HasFlag(folder, copyingFile)
	if err == nil && !copied {
		err = backend.CreateFlag(folder, unusedFile)
	}
	return err
}

// Reclaim implements pool.Storage: it wipes and frees the disk of a deleted volume.
func (s *storage) Reclaim(ctx context.Context, folder *os.Root, path string) error {
	v, ok, err := pool.ReadTrashed(forms, folder)
	switch {
	case err != nil && !errors.Is(err, volume.ErrDamaged):
		return fmt.Errorf("%s: %w", path, err)
	case err != nil:
		return errors.Join(fmt.Errorf("%s has no readable record of a disk: restore the record from a backup; or remove that folder, then trivet doctor shows its disk as orphaned", path), err)
	case !ok: // the disk was wiped
		return nil
	}
	if err := s.wipeDisk(ctx, v, folder); err != nil {
		return fmt.Errorf("volume %s, which was deleted: %w: insert its unchanged disk, and the driver wipes the disk; if the disk is lost, or used otherwise now, remove %s", v.ID, err, path)
	}
	return nil
}

// EraseHeader implements pool.HeaderEraser. At most four disks are wiped at the same time, so without it the header of
// another disk would stay for hours. If it does nothing, Reclaim reports why, or erases the header.
func (s *storage) EraseHeader(ctx context.Context, folder *os.Root, v volume.Volume) error {
	for _, flag := range []string{unusedFile, wipedFile} {
		if is, err := backend.HasFlag(folder, flag); err != nil || is {
			return err
		}
	}
	if d, _, err := blockdev.FindClaim(s.match, claimed(v)); err == nil {
		_ = d.EraseHeader(ctx, sectionOf(v).GUID, v.Overhead())
	}
	return nil
}

// wipeDisk finds the disk of a deleted volume, verifies that it is the volume's, and wipes it.
func (s *storage) wipeDisk(ctx context.Context, v volume.Volume, folder *os.Root) error {
	wiped, err := backend.HasFlag(folder, wipedFile)
	if err != nil {
		return err
	}
	unused, err := backend.HasFlag(folder, unusedFile)
	if err != nil {
		return err
	}
	d, m, err := blockdev.FindClaim(s.match, claimed(v))
	// A disk without an identity can be verified only by its mark.
	unmarked := errors.Is(err, blockdev.ErrNoMark) || errors.Is(err, blockdev.ErrDiskGone) && sectionOf(v).Identity == ""
	switch {
	case unmarked && (wiped || unused):
		return nil
	case err != nil:
		return err
	}
	defer s.rescan(d.Path)
	switch {
	case unused && m.Used:
		return fmt.Errorf("%s has data, but its record says that it is unused: %s was restored from an older backup", d.Path, s.cfg.Directory.Path)
	case unused, wiped && (!m.Complete || m.Damaged): // there is nothing to wipe but the mark
		return d.Unmark(ctx, sectionOf(v).GUID)
	}
	err = wipe(ctx, d, v, folder)
	if errors.Is(err, blockdev.ErrNotBlank) { // the disk was written to after it was zeroed
		_ = folder.Remove(backend.WipingFile) // the next attempt starts at offset 0
	}
	return err
}

// wipe wipes a disk. It begins at the offset that an interrupted call has recorded.
func wipe(ctx context.Context, d blockdev.Disk, v volume.Volume, folder *os.Root) error {
	return d.Wipe(ctx, sectionOf(v).GUID, blockdev.WipeOptions{
		Header:  v.Overhead(),
		Keep:    sectionOf(v).Wipe == wipeNone,
		Release: sectionOf(v).Wipe == wipeDiscard,
		From:    backend.WipedOffset(folder.FS()), Progress: backend.WipeProgress(folder),
		Wiped: func() error { return backend.CreateFlag(folder, wipedFile) },
	})
}
