package local

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
	p, broken := b.Reach(v)
	if broken != nil {
		return backend.Found(broken)
	}
	if p.OfDisks() {
		return backend.Found(diskHealth(p, v))
	}
	return backend.Found(directoryCondition(p, v), quotaCondition(p, v), backend.AlmostFull(p))
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

// quotaCondition finds a volume that is not kept to its size as it was when it was made.
func quotaCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	err := p.CheckQuota(v)
	if err == nil {
		return nil
	}
	c := backend.Condition{Severity: backend.Degraded, Reason: "QuotaUnreadable", Message: fmt.Sprintf("volume %s: %v", v.ID, err)}
	switch {
	case errors.Is(err, pool.ErrQuotaOff):
		c.Reason = "QuotaNotInForce"
	case errors.Is(err, pool.ErrQuotaChanged):
		c.Reason = "QuotaChanged"
	case errors.Is(err, pool.ErrQuotaLost):
		c.Reason = "QuotaLost"
	}
	return &c
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(ctx context.Context) []backend.Condition {
	found := b.Pools.StorageHealth(ctx)
	for _, s := range b.Set.States() {
		if s.Pool == nil || s.Pool.Shared() || s.Pool.Check() != nil {
			continue
		}
		if s.Pool.OfDisks() {
			found = append(found, diskConditions(s.Pool)...)
			continue
		}
		if _, err := s.Pool.Limits(); err != nil {
			found = append(found, backend.Condition{Severity: backend.Degraded, Reason: "QuotaNotInForce", Message: err.Error(), Pool: s.Name})
		}
	}
	return found
}
