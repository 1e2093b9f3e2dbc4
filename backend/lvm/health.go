package lvm

import (
	"context"
	"errors"
	"fmt"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, volumeCondition, thinCondition, backend.FilesystemCondition)
}

// volumeCondition returns the condition of a volume's logical volume at the last scan; nil if it is healthy.
func volumeCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	s := storageOf(p)
	_, r := s.state()
	lv, err := s.locate(v, r)
	if err == nil && lv.Partial {
		err = fmt.Errorf("volume %s: a physical volume with a part of %s/%s is missing: attach its disk", v.ID, s.name, lv.Name)
	}
	if err == nil {
		return nil
	}
	return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDiskMissing, Message: err.Error()}
}

// StorageHealth implements backend.HealthChecker.
func (b *Backend) StorageHealth(ctx context.Context) []backend.Condition {
	found := b.Pools.StorageHealth(ctx)
	for _, p := range b.OpenPools() {
		add := func(reason backend.Reason, format string, args ...any) {
			found = append(found, backend.Condition{Severity: backend.Degraded, Reason: reason, Message: fmt.Sprintf(format, args...), Pool: p.Name()})
		}
		if c := thinCondition(p, volume.Volume{}); c != nil && c.Reason != backend.ReasonPoolAlmostFull { // b.Pools reports it
			found = append(found, *c)
		}
		for _, d := range p.Storage().Devices() {
			switch d.State {
			case deviceMissing:
				add(backend.ReasonDiskMissing, "%s (%s) is missing: %s", d.Path, d.Detail, d.Advice)
			case deviceOrphaned:
				add(backend.ReasonDiskOrphaned, "%s is orphaned: %s: %s", d.Path, d.Detail, d.Advice)
			}
		}
		for _, err := range p.Trash.Errors() {
			add(backend.ReasonDiskNotWiped, "pool %q: %v", p.Name(), err)
		}
	}
	return found
}

// examine reports whether this node can use logical volumes.
func examine() []backend.Finding {
	mapper := backend.Finding{Name: "device mapper", Found: "/dev/mapper/control can be used"}
	if err := dm.CheckControl(); err != nil {
		mapper.Found, mapper.Unusable = err.Error(), true
		mapper.Advice = "load the dm_mod module (modprobe dm_mod), and give the container the host's /dev"
	}
	lvm := backend.Finding{Name: "lvm"}
	version, err := dm.Version(context.Background())
	lvm.Found = version
	if err != nil {
		lvm.Found, lvm.Unusable = err.Error(), true
		lvm.Advice = "run lvm version on the node"
		if errors.Is(err, command.ErrMissing) {
			lvm.Advice = "install the package " + dm.Package + ", or run the driver from its image"
		}
	}
	return []backend.Finding{mapper, lvm}
}
