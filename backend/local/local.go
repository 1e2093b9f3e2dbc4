// Package local is the backend of volumes that are directories of a filesystem of one node. If the
// filesystem supports it (project quota of XFS and ext4, simple quotas of btrfs), each directory is
// limited to its capacity. Otherwise the capacity is not enforced.
//
// A volume's directory is `data` in the volume's folder, or the subDir of its class. It is
// bind-mounted at the staging path from a descriptor that was opened beneath the pool, so that no
// link is followed and the mount gives no access to parent directories.
package local

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "local"

// bounds allow multiples of the block size of quotas. The minimum exceeds the size of an empty directory.
var bounds = volume.Bounds{Min: volume.MiB, Granule: 4096}

// Backend creates volumes that are directories of a filesystem of this node.
type Backend struct{ backend.Directories }

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Limiter       = (*Backend)(nil)
	_ backend.Meter         = (*Backend)(nil)
	_ backend.Snapshotter   = (*Backend)(nil)
	_ backend.Transferrer   = (*Backend)(nil)
)

// Kind describes volumes that are directories of a filesystem of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a directory](../kinds/directories.md) of a node",
	Media: []pool.Kind{pool.KindDirectory}, Directories: true,
	MountFlags: volume.FSTypes, CheckMountFlags: checkMountFlags,
	Parameters: append(slices.Clip(backend.DirectoryParameters), backend.Copies),
	Check:      backend.CheckDirectory,
	New:        New,
}

// New creates the backend. It uses only pools that are directories of this node.
func New(pools *pool.Set) backend.Backend {
	accepts := func(c pool.Config) bool { return !c.Shared() && c.Section == nil }
	b := &Backend{}
	b.Directories = backend.Directories{
		Pools:  backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: backend.NoRoom},
		Bounds: bounds, Prepare: backend.PrepareDirectory, Copy: b.copyFrom,
		Source: func(v volume.Volume) (mount.Source, error) { return b.NodeDirectory(v) },
	}
	return b
}

// Enforced implements backend.Limiter. docs/kinds/directories.md describes who can exceed the limit of a directory.
func (b *Backend) Enforced(v volume.Volume) string {
	limited := v.Directory != nil && v.Directory.Quota != nil
	if v.Version == 0 { // only the ID is known
		p, err := b.Set.ByID(v.ID)
		limited = err == nil && p.Quotas.Has(v.ID.Name)
	}
	if limited {
		return backend.EnforcedCooperative
	}
	return backend.EnforcedNot
}

// checkMountFlags refuses filesystem-specific mount flags, because a bind mount cannot have them.
func checkMountFlags(words []string) error {
	flags, err := mount.ParseFlags(words)
	switch {
	case err != nil:
		return backend.ExplainMountFlags(words, err)
	case len(flags.Data) > 0:
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: volumes of backend %s are directories, have no filesystem of their own, and cannot have %s: remove it from mountOptions", words, Name, strings.Join(flags.Data, ","))
	case flags.Context != "":
		return backend.ExplainMountFlags(words, fmt.Errorf("%w: volumes of backend %s are directories, which share a filesystem", mount.ErrBadContext, Name))
	}
	return nil
}

// Create implements backend.Backend. The new volume may share data with other volumes, whose limits then
// increase. Create sets these limits.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	v, err := b.Directories.Create(ctx, spec)
	if err != nil {
		return v, err
	}
	return v, b.limitOwners(v)
}

// limitOwners sets the limits of the volumes that have written data of a new volume.
func (b *Backend) limitOwners(v volume.Volume) error {
	if v.Source == nil || len(v.Source.Owners) == 0 {
		return nil
	}
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	return p.Quotas.Relimit(v.Source.Owners...)
}

// Capacity implements backend.Backend. A pool whose configuration requires limits has no capacity if
// its filesystem cannot enforce them.
func (b *Backend) Capacity(ctx context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	room, err := b.Directories.Capacity(ctx, q)
	if err != nil || room.Min == 0 { // another driver has the pool
		return room, err
	}
	p, err := b.Named(q.Parameters.Pool)
	if err != nil {
		return backend.Capacity{}, err
	}
	_, err = p.Quotas.Limits()
	if errors.Is(err, volume.ErrPrecondition) {
		return backend.Capacity{Min: bounds.Min}, nil
	}
	return room, err
}

// Attach implements backend.Backend. It restores a limit that was changed. A volume whose limit cannot be
// enforced now is attached, too; Health reports it.
func (b *Backend) Attach(ctx context.Context, v volume.Volume, _ volume.Secrets) (mount.Source, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	if errors.Is(p.Quotas.Check(v), pool.ErrQuotaChanged) {
		if err := p.Quotas.Relimit(v.ID); err != nil {
			return nil, err
		}
	}
	source, err := b.AttachNodeDirectory(ctx, p, v)
	if err != nil {
		return nil, err
	}
	if err := p.Images.BeginChange(v.ID.Name); err != nil {
		return nil, errors.Join(err, source.Close())
	}
	return source, nil
}

// Measure implements backend.Meter.
func (b *Backend) Measure(_ context.Context, v volume.Volume) (backend.Measure, bool, error) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return backend.Measure{}, false, err
	}
	u, ok, err := p.Quotas.Usage(v)
	return backend.Measure{Bytes: u.Limit.Bytes, UsedBytes: u.Bytes, Inodes: u.Limit.Inodes, UsedInodes: u.Inodes}, ok, err
}

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, backend.DirectoryHealth, quotaCondition, backend.AlmostFull)
}

// quotaCondition is a backend.Check that reports a volume whose limit is not enforced as recorded.
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
