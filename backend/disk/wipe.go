package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Names of files in a volume's folder that record the state of its disk. All but wipingFile are empty.
const (
	// wipedFile means that the data is wiped, and the mark may be removed, too.
	wipedFile = "wiped"
	// unusedFile means that the disk was claimed for a volume that was not created. The disk may have a
	// mark.
	unusedFile = "unused"
	// wipingFile contains the offset in bytes up to which the disk is zeroed.
	wipingFile = "wiping"
	// copyingFile means that another volume's data is being copied to the disk of a new volume.
	copyingFile = "copying"
)

// Abandon implements pool.Storage. If no data was copied to the disk, Reclaim removes only the mark.
func (s *storage) Abandon(folder *os.Root) error {
	copied, err := hasFlag(folder, copyingFile)
	if err == nil && !copied {
		err = createFlag(folder, unusedFile)
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

// wipeDisk finds the disk of a deleted volume, verifies that it is the volume's, and wipes it.
func (s *storage) wipeDisk(ctx context.Context, v volume.Volume, folder *os.Root) error {
	wiped, err := hasFlag(folder, wipedFile)
	if err != nil {
		return err
	}
	unused, err := hasFlag(folder, unusedFile)
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
		_ = folder.Remove(wipingFile) // the next attempt starts at offset 0
	}
	return err
}

// wipe wipes a disk. It begins at the offset that an interrupted call has recorded.
func wipe(ctx context.Context, d blockdev.Disk, v volume.Volume, folder *os.Root) error {
	var saved time.Time
	return d.Wipe(ctx, sectionOf(v).GUID, blockdev.WipeOptions{
		Keep:    sectionOf(v).Wipe == wipeNone,
		Release: sectionOf(v).Wipe == wipeDiscard,
		From:    wipedOffset(folder.FS()),
		Progress: func(upTo int64) error {
			if time.Since(saved) < saveInterval {
				return nil
			}
			saved = time.Now()
			err := atomicfile.Write(folder, wipingFile, strconv.AppendInt(nil, upTo, 10))
			crashpoint.Here(crashpoint.ReapZeroed)
			return err
		},
		Wiped: func() error { return createFlag(folder, wipedFile) },
	})
}

// wipedOffset returns the recorded offset up to which a disk is wiped; 0 if no valid offset is recorded,
// because to wipe the disk from the beginning is safe.
func wipedOffset(folder fs.FS) int64 {
	b, err := fs.ReadFile(folder, wipingFile)
	if err != nil {
		return 0
	}
	upTo, _ := strconv.ParseInt(string(b), 10, 64)
	return upTo
}

// saveInterval is the interval between two records of the progress of a wipe.
const saveInterval = 30 * time.Second

// createFlag durably creates an empty file in a volume's folder.
func createFlag(folder *os.Root, name string) error {
	if err := folder.WriteFile(name, nil, 0o600); err != nil {
		return err
	}
	return atomicfile.Sync(folder, ".")
}

// hasFlag reports whether createFlag has created the file.
func hasFlag(folder *os.Root, name string) (bool, error) {
	_, err := folder.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
