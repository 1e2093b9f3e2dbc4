package nfs

import (
	"context"
	"errors"
	"fmt"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	p, err := b.pools.ByID(v.ID)
	if err == nil {
		err = p.Check()
	}
	if err != nil {
		return []backend.Condition{backend.PoolUnavailable(err)}
	}
	if v.Version == 0 { // listed by its ID alone
		_, err := p.Lookup(v.ID.Name)
		return []backend.Condition{{Severity: backend.DataLoss, Reason: "RecordDamaged", Message: fmt.Sprint(err)}}
	}
	var found []backend.Condition
	if c := directoryCondition(p, v); c != nil {
		found = append(found, *c)
	}
	if c := roomCondition(p); c != nil {
		found = append(found, *c)
	}
	return found
}

func directoryCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	dir, err := p.OpenDirectory(v)
	switch {
	case errors.Is(err, volume.ErrDamaged):
		return &backend.Condition{Severity: backend.DataLoss, Reason: "DirectoryMissing", Message: err.Error()}
	case err != nil:
		return &backend.Condition{Severity: backend.Inaccessible, Reason: "DirectoryUnreachable", Message: err.Error()}
	}
	dir.Close()
	return nil
}

// roomCondition warns before writes fail: no directory has space of its own.
func roomCondition(p *pool.Pool) *backend.Condition {
	u, err := p.Usage()
	if err != nil || !u.Low() {
		return nil
	}
	return &backend.Condition{
		Severity: backend.Degraded, Reason: "PoolAlmostFull",
		Message: fmt.Sprintf("pool %q has %s free, below its reserve of %s: writes to its volumes will soon fail; free space on the server, or grow its filesystem",
			p.Name(), volume.FormatSize(u.Free), volume.FormatSize(u.Reserve)),
	}
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(context.Context) []backend.Condition {
	var found []backend.Condition
	for _, s := range b.pools.States() {
		c, ok := b.pools.Config(s.Name)
		if !ok || !c.Shared() {
			continue
		}
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		if err != nil {
			found = append(found, backend.PoolUnavailable(err))
			continue
		}
		if c := roomCondition(s.Pool); c != nil {
			found = append(found, *c)
		}
	}
	return found
}
