package local

import (
	"errors"
	"fmt"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// diskHealth finds what is wrong with a volume's disk.
func diskHealth(p *pool.Pool, v volume.Volume) *backend.Condition {
	d, m, err := p.FindDisk(v)
	switch {
	case errors.Is(err, volume.ErrUnavailable):
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDiskMissing, Message: err.Error()}
	case errors.Is(err, volume.ErrPrecondition):
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDiskTwice, Message: err.Error()}
	case err != nil:
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDiskUnreadable, Message: err.Error()}
	}
	if err := d.Probe(); err != nil {
		return &backend.Condition{
			Severity: backend.Inaccessible, Reason: backend.ReasonDiskUnreadable,
			Message: fmt.Sprintf("volume %s: %v: see the kernel's log and the disk's own (smartctl)", v.ID, err),
		}
	}
	if m.Damaged {
		return &backend.Condition{
			Severity: backend.Degraded, Reason: backend.ReasonPartitionTableDamaged,
			Message: fmt.Sprintf("volume %s: the first partition table of %s is damaged, the one at its end is good: restore it (gdisk, sfdisk), and see who wrote there", v.ID, d.Path),
		}
	}
	return nil
}

// diskConditions find what is wrong with the disks of a pool that no volume has.
func diskConditions(p *pool.Pool) []backend.Condition {
	var found []backend.Condition
	add := func(reason backend.Reason, format string, args ...any) {
		found = append(found, backend.Condition{Severity: backend.Degraded, Reason: reason, Message: fmt.Sprintf(format, args...), Pool: p.Name()})
	}
	for _, s := range p.DiskStates() {
		switch s.State {
		case pool.DiskOtherPool:
			add(backend.ReasonDiskInTwoPools, "%s: %s: change disks.match of one of them", s.Disk.Path, s.Detail)
		case pool.DiskOrphaned:
			add(backend.ReasonDiskOrphaned, "%s is %s", s.Disk.Path, s.Detail)
		case blockdev.DiskUnreadable:
			add(backend.ReasonDiskUnreadable, "%s: %s: see the kernel's log", s.Disk.Path, s.Detail)
		default: // free, a volume's, or not to be had, which is as it may be
		}
	}
	for _, err := range p.TrashErrors() {
		add(backend.ReasonDiskNotWiped, "pool %q: %v", p.Name(), err)
	}
	return found
}
