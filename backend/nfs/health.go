package nfs

import (
	"context"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	p, broken := b.Reach(v)
	if broken != nil {
		return backend.Found(broken)
	}
	return backend.Found(backend.DirectoryHealth(p, v), backend.AlmostFull(p))
}
