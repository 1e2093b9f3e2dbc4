package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// WipeOptions are the options of Wipe.
type WipeOptions struct {
	// Header is the size in bytes of the beginning of the data that is durably overwritten first, also with Keep.
	Header int64
	// Keep means that only the places of signatures are overwritten, and other data is kept.
	Keep bool
	// Release means that the disk may release the storage (ZeroRange).
	Release bool
	// From is the last offset that an interrupted call passed to Progress, or 0.
	From int64
	// Progress is called repeatedly with the offset up to which the disk is durably zeroed.
	Progress func(upTo int64) error
	// Wiped is called before the mark is removed. If Wipe is interrupted after that, call Unmark instead of
	// Wipe.
	Wiped func() error
}

// Wipe removes the data of a claimed disk, and then its mark, so that the disk is free. The error is ErrDiskBusy
// while a program has the disk open. The error is ErrNoMark if the mark is not complete, because another program may
// use the disk. The error is ErrNotBlank if the disk was written to after an earlier call zeroed it; the next call
// must set From to 0.
func (d Disk) Wipe(ctx context.Context, guid string, o WipeOptions) error {
	disk, err := d.openToWipe(ctx, guid)
	if err != nil {
		return err
	}
	defer disk.Close()
	if err := d.eraseHeader(disk, o.Header); err != nil {
		return err
	}
	if err := d.wipeData(ctx, disk, o); err != nil {
		return err
	}
	if err := o.Wiped(); err != nil {
		return err
	}
	return EraseMark(disk, d.Size, d.SectorSize)
}

// EraseHeader durably overwrites the beginning of the data of a claimed disk, before Wipe does so. size is the size of the
// header in bytes. The errors are those of Wipe.
func (d Disk) EraseHeader(ctx context.Context, guid string, size int64) error {
	disk, err := d.openToWipe(ctx, guid)
	if err != nil {
		return err
	}
	defer disk.Close()
	return d.eraseHeader(disk, size)
}

// openToWipe opens a claimed disk exclusively, and makes the kernel forget its partition.
func (d Disk) openToWipe(ctx context.Context, guid string) (*os.File, error) {
	disk, err := d.OpenExclusive(ctx)
	if err != nil {
		return nil, err
	}
	m, err := d.verify(disk, guid)
	if err == nil && m.Damaged {
		err = fmt.Errorf("%s: its first partition table is damaged, so another program may use the disk now: %w", d.Path, ErrNoMark)
	}
	if err == nil {
		err = d.hidePartition(disk)
	}
	if err != nil {
		return nil, errors.Join(err, disk.Close())
	}
	return disk, nil
}

// eraseHeader overwrites the first size bytes of the data.
func (d Disk) eraseHeader(disk *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	start, _ := newTable(d.Size, d.SectorSize).room()
	return zeroIn(disk, []span{{start, start + size}})
}

// Unmark removes the mark, or the rest of it, from a disk whose data was wiped. The error is ErrNotBlank if the disk
// has a signature.
func (d Disk) Unmark(ctx context.Context, guid string) error {
	disk, err := d.OpenExclusive(ctx)
	if err != nil {
		return err
	}
	defer disk.Close()
	m, err := ReadMark(disk, d.Size, d.SectorSize)
	if err != nil || m.GUID.String() != guid {
		return errors.Join(fmt.Errorf("%s no longer has the mark of %s: %w", d.Path, guid, ErrNoMark), err)
	}
	if err := requireZerosIn(disk, d.dataPlaces()); err != nil {
		return err
	}
	if err := d.hidePartition(disk); err != nil {
		return err
	}
	return EraseMark(disk, d.Size, d.SectorSize)
}

// data returns the range between the two partition tables.
func (d Disk) data() span {
	t := newTable(d.Size, d.SectorSize)
	const first = 2 // sectors: the boot record and the header of the first table
	return span{(first + t.entrySectors()) * t.sector, t.backupEntries() * t.sector}
}

// dataPlaces returns the parts of diskPlaces that are in the range of data.
func (d Disk) dataPlaces() []span {
	var places []span
	data := d.data()
	for _, p := range diskPlaces(d.Size, d.SectorSize) {
		if p = (span{max(p.start, data.start), min(p.end, data.end)}); p.start < p.end {
			places = append(places, p)
		}
	}
	return places
}

// wipeData zeroes the range of data, or only its signatures with o.Keep.
func (d Disk) wipeData(ctx context.Context, disk *os.File, o WipeOptions) error {
	if o.Keep {
		return zeroIn(disk, d.dataPlaces())
	}
	data := d.data()
	if err := ZeroRange(ctx, disk, max(data.start, o.From), data.end, ZeroOptions{Release: o.Release, Progress: o.Progress}); err != nil {
		return err
	}
	return requireZerosIn(disk, d.dataPlaces())
}

// Clearing returns shell commands with which an administrator clears an unused disk. Each of them fails if the
// disk is in use.
func (d Disk) Clearing() string {
	steps := fmt.Sprintf("wipefs -a %s && blkdiscard --zeroout %[1]s", d.Path)
	if parts, err := d.partitions(); err != nil || len(parts) > 0 {
		steps = fmt.Sprintf("partx -d %s && %s", d.Path, steps)
	}
	return steps
}
