package lvm

import (
	"context"
	"fmt"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// thinStorage is the storage of a pool whose volumes are in a thin pool.
type thinStorage struct{ *storage }

var _ pool.ThinStorage = thinStorage{}

// openThin verifies that the thin pool of a pool can be used, and activates it. It stays active when the driver ends,
// because dmeventd(8) would not monitor it after another activation by the driver.
func (g *Group) openThin(ctx context.Context, c pool.Config, group dm.Group, report dm.Report) error {
	if g.ThinPool == "" {
		return nil
	}
	for _, other := range c.Earlier() {
		if o, ok := other.Section.(*Group); ok && o.VolumeGroup == g.VolumeGroup && o.ThinPool == g.ThinPool {
			return volume.Errorf(volume.ErrPrecondition, "thin pool %s is that of pool %q: give each pool its own thin pool", g.thinPath(), other.Name)
		}
	}
	lv, ok := report.Named(g.ThinPool)
	switch {
	case !ok:
		return volume.Errorf(volume.ErrPrecondition, "volume group %s has no thin pool %s: create it: lvcreate --type thin-pool --size SIZE --name %[2]s %[1]s", g.VolumeGroup, g.ThinPool)
	case !lv.IsPool:
		return volume.Errorf(volume.ErrPrecondition, "%s is not a thin pool: set lvm.thinPool to the name of one (lvs -o lv_name,lv_layout %s)", g.thinPath(), g.VolumeGroup)
	}
	if err := g.open(c).activatePool(ctx, group, report); err != nil {
		return err
	}
	t, ok, err := lv.ID.ThinPool()
	if ok && !t.Zero {
		err = volume.Errorf(volume.ErrPrecondition, "thin pool %s does not zero its blocks, so a volume could show the data of deleted ones: lvchange --zero y %[1]s", g.thinPath())
	}
	return err
}

// thinPath names the thin pool as lvm(8) does.
func (s *storage) thinPath() string { return s.name + "/" + s.thin }

// activatePool activates the thin pool of the pool, if it has one and another program has deactivated it.
func (s *storage) activatePool(ctx context.Context, g dm.Group, r dm.Report) error {
	if _, ok := r.Named(s.thin); !ok {
		return nil
	}
	active, err := g.PoolActive(s.thin)
	if err == nil && !active {
		err = g.ActivatePool(ctx, s.thin)
	}
	return err
}

// thinPool returns the current state of the thin pool. It starts no process.
func (s *storage) thinPool() (t dm.ThinPool, err error) {
	_, r := s.state()
	lv, ok := r.Named(s.thin)
	if ok {
		if t, ok, err = lv.ID.ThinPool(); err != nil {
			return t, err
		}
	}
	if !ok {
		return t, volume.Errorf(volume.ErrUnavailable, "thin pool %s is missing or not active: restore it, or activate it (lvchange --activate y %[1]s)", s.thinPath())
	}
	return t, nil
}

// Space implements pool.ThinStorage.
func (s thinStorage) Space() (ledger.Extent, error) {
	t, err := s.thinPool()
	return ledger.Extent{Total: t.Data.Total, Free: t.Data.Free()}, err
}

// Usage implements pool.Storage.
func (s thinStorage) Usage(u ledger.Usage) ledger.Usage {
	if s.obstacle(u) != nil {
		u.Room, u.Largest = 0, 0
	}
	return u
}

// Summary implements pool.Storage.
func (s thinStorage) Summary(u ledger.Usage) (found, advice string) {
	t, err := s.thinPool()
	if err != nil {
		return err.Error(), "see the message"
	}
	found = fmt.Sprintf("%s of %s are free in thin pool %s, %d%% of its metadata are used", volume.FormatSize(u.Free), volume.FormatSize(u.Total), s.thinPath(), t.Metadata.Percent())
	if o := s.obstacle(u); o != nil {
		return found + "; " + o.state, o.remedy
	}
	if s.cfg.Overcommit > 1 && !t.ErrorIfFull {
		return found, fmt.Sprintf("writes wait when the pool is full: let dmeventd extend it (thin_pool_autoextend_threshold in lvm.conf), or let them fail at once (lvchange --errorwhenfull y %s)", s.thinPath())
	}
	return found, ""
}

// obstacle is a state in which the driver creates and grows nothing in a thin pool.
type obstacle struct {
	severity backend.Severity
	reason   backend.Reason
	// state describes the state, and remedy how to end it.
	state, remedy string
}

// fullMetadata is the used part of the metadata, in percent, above which nothing is created. Without free metadata the
// kernel makes the pool read-only, and it needs a repair.
const fullMetadata = 90

// obstacle returns the worst obstacle; nil if there is none.
func (s *storage) obstacle(u ledger.Usage) *obstacle {
	t, err := s.thinPool()
	at := s.thinPath()
	switch {
	case err != nil:
		return &obstacle{backend.Inaccessible, backend.ReasonPoolUnavailable, err.Error(), "activate it: lvchange --activate y " + at}
	case t.NeedsCheck, t.Mode == dm.ModeReadOnly, t.Mode == dm.ModeFailed:
		return &obstacle{
			backend.Inaccessible, backend.ReasonPoolNeedsRepair, fmt.Sprintf("thin pool %s is in the mode %q, because its metadata is full or damaged", at, t.Mode),
			fmt.Sprintf("stop its pods, deactivate its volumes, and repair it: lvconvert --repair %s; if the metadata is full, extend it: lvextend --poolmetadatasize +SIZE %[1]s", at),
		}
	case t.Mode == dm.ModeOutOfSpace:
		return &obstacle{backend.Inaccessible, backend.ReasonPoolFull, fmt.Sprintf("thin pool %s has no free data blocks, and writes to its volumes fail", at), "extend it: lvextend --size +SIZE " + at}
	case t.Metadata.Percent() >= fullMetadata:
		return &obstacle{
			backend.Degraded, backend.ReasonPoolMetadataAlmostFull, fmt.Sprintf("thin pool %s uses %d%% of its metadata, and becomes read-only if it is full", at, t.Metadata.Percent()),
			fmt.Sprintf("extend it: lvextend --poolmetadatasize +SIZE %s", at),
		}
	case u.Low():
		return &obstacle{
			backend.Degraded, backend.ReasonPoolAlmostFull, fmt.Sprintf("thin pool %s has %s free, below its reserve of %s", at, volume.FormatSize(u.Free), volume.FormatSize(u.Reserve)),
			fmt.Sprintf("delete volumes or snapshots, or extend it: lvextend --size +SIZE %s", at),
		}
	}
	return nil
}

// checkRoom returns ErrExhausted if nothing may be created or grown in the thin pool. The ledger compares the sizes.
func (s *storage) checkRoom(p *pool.Pool) error {
	u, err := p.Usage()
	if err != nil {
		return err
	}
	if o := s.obstacle(u.Usage); o != nil {
		return volume.Errorf(volume.ErrExhausted, "pool %q: %s: %s", s.cfg.Name, o.state, o.remedy)
	}
	return nil
}

// thinCondition is a backend.Check of the thin pool.
func thinCondition(p *pool.Pool, _ volume.Volume) *backend.Condition {
	s := storageOf(p)
	if s.thin == "" {
		return nil
	}
	u, _ := p.Usage() // an error is an obstacle
	o := s.obstacle(u.Usage)
	if o == nil {
		return nil
	}
	return &backend.Condition{Severity: o.severity, Reason: o.reason, Message: fmt.Sprintf("pool %q: %s: %s", p.Name(), o.state, o.remedy), Pool: p.Name()}
}

// CheckTrim implements backend.Trimmer.
func (b *Backend) CheckTrim(v volume.Volume) error {
	p, err := b.Set.ByID(v.ID)
	if err == nil && storageOf(p).thin == "" {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is not in a thin pool: its logical volume keeps its extents", v.ID)
	}
	if err != nil {
		return err
	}
	return b.CheckTrimmable(v)
}

// TrimBudget implements backend.Trimmer.
func (b *Backend) TrimBudget(v volume.Volume) (*background.Budget, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	device, err := b.OpenDevice(v)
	if err != nil {
		return nil, err
	}
	defer device.Close()
	return p.Background(device), nil
}
