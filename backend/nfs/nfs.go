package nfs

import (
	"context"
	"errors"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "nfs"

// bounds allows every size, because no size is enforced.
var bounds = volume.Bounds{Min: 1, Granule: 1}

// Backend creates directory volumes in nfs pools.
type Backend struct{ backend.Directories }

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Publisher      = (*Backend)(nil)
	_ backend.Expander       = (*Backend)(nil)
	_ backend.HealthChecker  = (*Backend)(nil)
	_ backend.Limiter        = (*Backend)(nil)
	_ backend.StaticProvider = (*Backend)(nil)
	_ backend.Snapshotter    = (*Backend)(nil)
)

// Kind describes volumes that are directories of an NFS export.
var Kind = backend.Kind{
	Name: Name, Doc: "[a directory of an export](nfs.md)",
	Media:       []pool.Kind{pool.KindExport},
	Directories: true, FSTypes: []string{"nfs", "nfs4"}, MountFlags: []string{"nfs"}, CheckMountFlags: checkMountFlags,
	SharedModes: []volume.AccessMode{volume.MultiNodeMultiWriter, volume.MultiNodeReaderOnly},
	Parameters:  backend.DirectoryParameters,
	Check:       backend.CheckDirectory,
	New:         New,
}

// New creates the backend on the pools. It ignores node-local pools.
func New(pools *pool.Set) backend.Backend {
	b := &Backend{}
	b.Directories = backend.Directories{
		Pools:  backend.Pools{Backend: Name, Set: pools, Own: pool.Config.Shared, Explain: explain},
		Bounds: bounds, Prepare: prepare, Copy: b.copyFrom,
		Source: func(v volume.Volume) (mount.Source, error) { return b.source(v) },
	}
	return b
}

// Enforced implements backend.Limiter. The driver does not set quotas on the server, whose
// administrator may.
func (b *Backend) Enforced(volume.Volume) string { return backend.EnforcedNot }

// checkMountFlags refuses NFS options that the driver sets or does not support.
func checkMountFlags(words []string) error {
	flags, err := mount.ParseFlags(words)
	if err == nil {
		err = mount.CheckNFSOptions(flags.Data)
	}
	if err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", words, err)
	}
	return nil
}

// explain adds the remedy for an errno of an export.
func explain(p *pool.Pool, err error) error {
	for kind, reason := range reasons {
		if errors.Is(err, kind) && !volume.HasKind(err) {
			return volume.Errorf(reason.kind, "pool %q: %w: %s", p.Name(), err, reason.remedy)
		}
	}
	return err
}

const squashed = "the server maps this node's root to another user: export with no_root_squash"

var reasons = map[error]struct {
	kind   error
	remedy string
}{
	syscall.EACCES: {volume.ErrPrecondition, squashed},
	syscall.EPERM:  {volume.ErrPrecondition, squashed},
	syscall.EROFS:  {volume.ErrPrecondition, "the export is read-only: export it rw"},
	syscall.ENOSPC: {volume.ErrExhausted, "free space on the server, or grow its filesystem"},
	syscall.EDQUOT: {volume.ErrExhausted, "raise the quota on the server"},
	syscall.ESTALE: {volume.ErrUnavailable, "the export was replaced, or exported again: try again"},
}

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, backend.DirectoryHealth, backend.AlmostFull)
}
