package disk

import (
	"context"
	"errors"
	"math"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "disk"

// minSize is the smallest disk for a raw device, in bytes.
const minSize = volume.MiB

// Backend makes volumes of whole disks.
type Backend struct {
	backend.Pools
	formatter *blockdev.Formatter
	loops     *blockdev.LoopTags // the read-only devices
}

var (
	_ backend.Backend           = (*Backend)(nil)
	_ backend.Publisher         = (*Backend)(nil)
	_ backend.Expander          = (*Backend)(nil)
	_ backend.HealthChecker     = (*Backend)(nil)
	_ backend.BlockProvider     = (*Backend)(nil)
	_ backend.OwnershipVerifier = (*Backend)(nil)
	_ backend.Cloner            = (*Backend)(nil)
)

// Kind describes volumes that are whole disks of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a whole disk](disks.md) of a node",
	Media: []pool.Kind{key}, PoolSection: func() pool.Section { return new(Disks) }, Section: newSection,
	Parameters: []backend.Parameter{
		backend.FSType,
		backend.MkfsOptions,
		{
			Key: paramWipe, Values: []string{string(wipeDiscard), string(wipeZero), string(wipeNone)}, Default: string(wipeDiscard),
			Doc: "What happens to the data of a [deleted volume](disks.md#delete). `discard`: the disk gives the storage back if it guarantees zeros, else everything is overwritten. `zero`: everything is overwritten. `none`: the next user of the disk can read it.",
		},
	},
	New: New,
}

// New makes the backend on the pools. It ignores those that have no disks.
func New(pools *pool.Set) backend.Backend {
	own := func(c pool.Config) bool {
		_, disks := c.Section.(*Disks)
		return disks
	}
	return &Backend{
		Pools:     backend.Pools{Backend: Name, Set: pools, Own: own, Explain: noRoom},
		formatter: blockdev.NewFormatter(),
		loops:     blockdev.NewLoopTags(blockdev.IsPartitionPath),
	}
}

// Supports implements backend.Backend: access from one node.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a disk is on one node: use ReadWriteOnce or ReadWriteOncePod, or a backend that shares", c.Mode)
	case !c.Block && c.FSType != "" && !volume.ValidFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: want one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	return nil
}

func bounds(fsType string, block bool) volume.Bounds {
	if block {
		return volume.Bounds{Min: minSize, Granule: volume.MiB}
	}
	return volume.Bounds{Min: blockdev.MinSize(fsType), Granule: volume.MiB}
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := b.Existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	if spec.Source != nil {
		return b.createOf(ctx, p, spec)
	}
	// A disk that cannot be written is skipped.
	for tries := len(of(p).states()); ; tries-- {
		v, err := createEmpty(ctx, p, spec)
		if !errors.Is(err, blockdev.ErrDiskRefuses) || tries <= 1 {
			return v, err
		}
		klog.FromContext(ctx).Error(err, "Marking a free disk failed; trying the next one", "pool", p.Name())
	}
}

func createEmpty(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	c, err := claimDisk(ctx, p, spec.Capacity, bounds(spec.FSType(), spec.Block()).Min)
	if err != nil {
		return volume.Volume{}, err
	}
	v := recordOf(p, spec, c)
	v.Block, v.FSType, v.MkfsOptions = spec.Block(), spec.FSType(), spec.Parameters.MkfsOptions()
	if err := backend.CheckMkfsOptions(spec.Parameters, v.FSType, v.Capacity); err != nil {
		return volume.Volume{}, errors.Join(err, c.Close())
	}
	return v, noRoom(p, create(ctx, p, v, c, nil))
}

// recordOf returns the record of a new volume on a claimed disk.
func recordOf(p *pool.Pool, spec volume.Spec, c *claim) volume.Volume {
	return volume.Volume{
		Version:    volume.RecordVersion,
		ID:         p.ID(Name, spec.Name()),
		CoName:     spec.CoName,
		Capacity:   c.Disk.Room(),
		SectorSize: c.Disk.SectorSize,
		Section:    &section{GUID: c.GUID.String(), Identity: c.Disk.Identity, Wipe: wipeMode(spec.Parameters.Get(paramWipe))},
		Namespace:  spec.Parameters.Namespace,
		Source:     spec.Source,
		Created:    time.Now().UTC().Truncate(time.Second),
	}
}

// Delete implements backend.Backend.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	p, v, err := b.LookupToDelete(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.SyncVolumes()
	}
	if err != nil {
		return err
	}
	if err := p.Attachments.Unpublished(id); err != nil {
		return err
	}
	if err := b.releaseDisk(ctx, p, v); err != nil {
		return err
	}
	return noRoom(p, p.Remove(ctx, v))
}

// noRoom names the filesystem that is full.
func noRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: the filesystem of its records has no room: %w: free space in %s", p.Name(), err, p.Config().Directory.Path)
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	if err := backend.CheckMkfsOptions(q.Parameters, q.FSType, math.MaxInt64); err != nil {
		return backend.Capacity{}, err
	}
	return b.Room(q.Parameters, bounds(q.FSType, q.Block))
}
