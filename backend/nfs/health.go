package nfs

import (
	"context"
	"errors"

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
	return backend.Found(directoryCondition(p, v), backend.AlmostFull(p))
}

func directoryCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	dir, err := p.OpenDirectory(v)
	switch {
	case errors.Is(err, volume.ErrDamaged):
		return &backend.Condition{Severity: backend.DataLoss, Reason: backend.ReasonDirectoryMissing, Message: err.Error()}
	case err != nil:
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDirectoryUnreachable, Message: err.Error()}
	}
	dir.Close()
	return nil
}
