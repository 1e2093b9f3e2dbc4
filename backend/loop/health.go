package loop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
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
	if c := imageCondition(p, v); c != nil {
		found = append(found, *c)
	}
	if c := b.ownerCondition(p, v); c != nil {
		found = append(found, *c)
	}
	if c := roomCondition(p); c != nil && v.Allocation == volume.Thin {
		found = append(found, *c)
	}
	return found
}

// ownerCondition finds a device on this node whose volume is another node's, or was.
func (b *Backend) ownerCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	if !p.Shared() || b.pools.NodeID() == "" {
		return nil
	}
	number, ok, err := b.find(b.tag(v.ID))
	if err != nil || !ok {
		return nil
	}
	lost := cmp.Or(b.checkOwner(p, v), b.checkLock(v))
	if lost == nil {
		return nil
	}
	return &backend.Condition{
		Severity: backend.Inaccessible, Reason: "LockLost",
		Message: fmt.Sprintf("%s still has the volume on this node: %v; what is written to it here may not arrive, stop its pods here", blockdev.LoopPath(number), lost),
	}
}

func imageCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	image, err := p.OpenImage(v.ID.Name, os.O_RDONLY)
	if errors.Is(err, volume.ErrDamaged) {
		return &backend.Condition{Severity: backend.DataLoss, Reason: "ImageMissing", Message: err.Error()}
	}
	if err != nil {
		return &backend.Condition{Severity: backend.Inaccessible, Reason: "ImageUnreadable", Message: err.Error()}
	}
	defer image.Close()
	if _, err := checkSize(image, v); err != nil {
		return &backend.Condition{Severity: backend.DataLoss, Reason: "ImageTruncated", Message: err.Error()}
	}
	return nil
}

// roomCondition warns before thin volumes fail to get the space promised to
// them, which they would notice only at fsync.
func roomCondition(p *pool.Pool) *backend.Condition {
	u, err := p.Usage()
	if err != nil || !u.Low() {
		return nil
	}
	return &backend.Condition{
		Severity: backend.Degraded, Reason: "PoolAlmostFull",
		Message: fmt.Sprintf("pool %q has %s free, below its reserve of %s: writes to thin volumes will soon fail; free space or grow the pool",
			p.Name(), volume.FormatSize(u.Free), volume.FormatSize(u.Reserve)),
	}
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(context.Context) []backend.Condition {
	var found []backend.Condition
	for _, s := range b.pools.States() {
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
