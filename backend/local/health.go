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
	return b.Examine(v, backend.DirectoryHealth, quotaCondition, backend.AlmostFull)
}

// quotaCondition reports a volume whose limit is not in force as it was at its creation.
func quotaCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	err := p.Quotas.Check(v)
	if err == nil {
		return nil
	}
	c := backend.Condition{Severity: backend.Degraded, Reason: backend.ReasonQuotaUnreadable, Message: fmt.Sprintf("volume %s: %v", v.ID, err)}
	switch {
	case errors.Is(err, pool.ErrQuotaOff):
		c.Reason = backend.ReasonQuotaNotInForce
	case errors.Is(err, pool.ErrQuotaChanged):
		c.Reason = backend.ReasonQuotaChanged
	case errors.Is(err, pool.ErrQuotaLost):
		c.Reason = backend.ReasonQuotaLost
	}
	return &c
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(ctx context.Context) []backend.Condition {
	found := b.Pools.StorageHealth(ctx)
	for _, p := range b.OpenPools() {
		if _, err := p.Quotas.Limits(); err != nil {
			found = append(found, backend.Condition{Severity: backend.Degraded, Reason: backend.ReasonQuotaNotInForce, Message: err.Error(), Pool: p.Name()})
		}
	}
	return found
}
