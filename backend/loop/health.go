package loop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	checks := []backend.Check{imageCondition, b.ownerCondition}
	if allocationOf(v) == thin {
		checks = append(checks, backend.AlmostFull)
	}
	return b.Examine(v, checks...)
}

// ownerCondition reports a device on this node whose volume another node owns, or has owned.
func (b *Backend) ownerCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	if !p.Shared() || b.Set.NodeID() == "" {
		return nil
	}
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil || !ok {
		return nil
	}
	lost := cmp.Or(b.checkOwner(p, v), b.checkLock(v))
	if lost == nil {
		return nil
	}
	return &backend.Condition{
		Severity: backend.Inaccessible, Reason: backend.ReasonLockLost,
		Message: fmt.Sprintf("%s is still attached on this node: %v; writes to it may be lost, stop its pods on this node", blockdev.LoopPath(number), lost),
	}
}

func imageCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if errors.Is(err, volume.ErrDamaged) {
		return &backend.Condition{Severity: backend.DataLoss, Reason: backend.ReasonImageMissing, Message: err.Error()}
	}
	if err != nil {
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonImageUnreadable, Message: err.Error()}
	}
	defer image.Close()
	if _, err := checkSize(image, v); err != nil {
		return &backend.Condition{Severity: backend.DataLoss, Reason: backend.ReasonImageTruncated, Message: err.Error()}
	}
	return nil
}
