package disk

import (
	"context"
	"errors"
	"fmt"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, diskCondition)
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(ctx context.Context) []backend.Condition {
	found := b.Pools.StorageHealth(ctx)
	for _, p := range b.OpenPools() {
		found = append(found, poolConditions(p)...)
	}
	return found
}

// diskCondition returns the condition of a volume's disk; nil if the disk is healthy.
func diskCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	d, m, err := storageOf(p).locate(v)
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
			Message: fmt.Sprintf("volume %s: %v: check the kernel log and the disk's own log (smartctl)", v.ID, err),
		}
	}
	if m.Damaged {
		return &backend.Condition{
			Severity: backend.Degraded, Reason: backend.ReasonPartitionTableDamaged,
			Message: fmt.Sprintf("volume %s: the primary partition table of %s is damaged, and its backup is intact: restore the primary table (gdisk, sfdisk), and find out which program wrote to it", v.ID, d.Path),
		}
	}
	return nil
}

// poolConditions returns the conditions of a pool's disks that belong to no volume.
func poolConditions(p *pool.Pool) []backend.Condition {
	var found []backend.Condition
	add := func(reason backend.Reason, format string, args ...any) {
		found = append(found, backend.Condition{Severity: backend.Degraded, Reason: reason, Message: fmt.Sprintf(format, args...), Pool: p.Name()})
	}
	for _, s := range storageOf(p).states() {
		switch s.reason {
		case diskOtherPool:
			add(backend.ReasonDiskInTwoPools, "%s: %s: change disks.match of one of the two pools", s.disk.Path, s.detail)
		case diskOrphaned:
			add(backend.ReasonDiskOrphaned, "%s is %s", s.disk.Path, s.detail)
		case blockdev.DiskUnreadable:
			add(backend.ReasonDiskUnreadable, "%s: %s: check the kernel log", s.disk.Path, s.detail)
		default: // free, claimed by a volume, or in use by another program
		}
	}
	for _, err := range p.Trash.Errors() {
		add(backend.ReasonDiskNotWiped, "pool %q: %v", p.Name(), err)
	}
	return found
}
