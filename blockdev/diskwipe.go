package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Wipe makes a claimed disk blank where anybody would look, its mark last, so that it
// is free. With zero all of its data is overwritten. wiped is called before the mark
// goes. A call that ends early before that is made again from the beginning; later,
// Unmark does the rest. ErrDiskBusy while something has the disk, ErrNoMark if its mark is
// not whole: somebody else may have the disk now.
func (d Disk) Wipe(ctx context.Context, guid string, zero bool, wiped func() error) error {
	disk, err := d.OpenExclusive(ctx)
	if err != nil {
		return err
	}
	defer disk.Close()
	m, err := d.verify(disk, guid)
	if err != nil {
		return err
	}
	if m.Damaged {
		return fmt.Errorf("%s: its first partition table is damaged, so that the disk may be another's now: %w", d.Path, ErrNoMark)
	}
	if err := d.hidePartition(disk); err != nil {
		return err
	}
	if err := d.wipeData(ctx, disk, zero); err != nil {
		return err
	}
	if err := wiped(); err != nil {
		return err
	}
	return EraseMark(disk, d.Size, d.SectorSize)
}

// Unmark removes what there is of the mark of a disk that has no data, or has none any
// more. ErrNotBlank if it has something that anybody would know it by.
func (d Disk) Unmark(ctx context.Context, guid string) error {
	disk, err := d.OpenExclusive(ctx)
	if err != nil {
		return err
	}
	defer disk.Close()
	m, err := ReadMark(disk, d.Size, d.SectorSize)
	if err != nil || m.GUID.String() != guid {
		return errors.Join(fmt.Errorf("%s is not %s any more: %w", d.Path, guid, ErrNoMark), err)
	}
	if err := requireZerosIn(disk, d.dataPlaces()); err != nil {
		return err
	}
	if err := d.hidePartition(disk); err != nil {
		return err
	}
	return EraseMark(disk, d.Size, d.SectorSize)
}

// data is what lies between the tables.
func (d Disk) data() span {
	t := newTable(d.Size, d.SectorSize)
	return span{(2 + t.entrySectors()) * t.sector, t.backupEntries() * t.sector}
}

// dataPlaces are diskPlaces between the tables.
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

// wipeData wipes all between the tables.
func (d Disk) wipeData(ctx context.Context, disk *os.File, zero bool) error {
	if zero {
		if err := zeroOut(ctx, disk, d.data()); err != nil {
			return err
		}
	} else if err := discard(disk, d.data()); err != nil {
		return err
	}
	// What a discarded block reads as is the disk's own business.
	var places []span
	for _, p := range d.dataPlaces() {
		if err := requireZeros(disk, p.start, p.end); errors.Is(err, ErrNotBlank) {
			places = append(places, p)
		} else if err != nil {
			return err
		}
	}
	return zeroIn(disk, places)
}

func zeroOut(ctx context.Context, disk *os.File, data span) error {
	for at := data.start; at < data.end; at += wipeChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := blockRange(disk, unix.BLKZEROOUT, span{at, min(at+wipeChunk, data.end)}); err != nil {
			return err
		}
	}
	return disk.Sync()
}

// blockRange is an ioctl on a range of a disk's bytes (linux/block/ioctl.c).
func blockRange(disk *os.File, request uint, s span) error {
	arg := [2]uint64{uint64(s.start), uint64(s.end - s.start)}
	if err := ioctl(int(disk.Fd()), request, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("wiping %s at byte %d: %w", disk.Name(), s.start, err)
	}
	return nil
}

// Clearing is what a person runs to clear a disk that nobody needs. None of it is forced:
// each step refuses a disk that something has.
func (d Disk) Clearing() string {
	steps := fmt.Sprintf("wipefs -a %s && blkdiscard --zeroout %[1]s", d.Path)
	if parts, err := d.partitions(); err != nil || len(parts) > 0 {
		steps = fmt.Sprintf("partx -d %s && %s", d.Path, steps)
	}
	return steps
}
