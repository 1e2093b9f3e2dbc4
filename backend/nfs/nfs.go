package nfs

import (
	"context"
	"errors"
	"os"
	"slices"
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
type Backend struct{ backend.Pools }

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Publisher      = (*Backend)(nil)
	_ backend.Expander       = (*Backend)(nil)
	_ backend.HealthChecker  = (*Backend)(nil)
	_ backend.Limiter        = (*Backend)(nil)
	_ backend.StaticProvider = (*Backend)(nil)
	_ backend.Snapshotter    = (*Backend)(nil)
)

// fsTypes are what a request may call the filesystem.
var fsTypes = []string{"nfs", "nfs4"}

// Kind describes volumes that are directories of an NFS export.
var Kind = backend.Kind{
	Name: Name, Doc: "[a directory of an export](nfs.md)",
	Media:       []pool.Kind{pool.KindExport},
	Directories: true, FSTypes: fsTypes, MountFlags: []string{"nfs"},
	SharedModes: []volume.AccessMode{volume.MultiNodeMultiWriter, volume.MultiNodeReaderOnly},
	Parameters:  backend.DirectoryParameters,
	Check:       backend.CheckDirectory,
	New:         New,
}

// New creates the backend on the pools. It ignores node-local pools.
func New(pools *pool.Set) backend.Backend {
	return &Backend{backend.Pools{Backend: Name, Set: pools, Own: pool.Config.Shared, Explain: explain}}
}

// Enforced implements backend.Limiter. The driver does not set quotas on the server, whose
// administrator may.
func (b *Backend) Enforced(volume.Volume) string { return backend.EnforcedNot }

// Supports implements backend.Backend. MULTI_NODE_SINGLE_WRITER is refused, because nothing
// distinguishes the node that may write. Raw devices are refused.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode == volume.MultiNodeSingleWriter:
		return volume.Errorf(volume.ErrInvalid, "volume_capability.access_mode %s: nothing would keep the other nodes from writing: use %s (ReadWriteMany) or %s", c.Mode, volume.MultiNodeMultiWriter, volume.MultiNodeReaderOnly)
	case c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, volumes of backend %s are directories: use volumeMode Filesystem, or a backend with devices", Name)
	case c.FSType != "" && !slices.Contains(fsTypes, c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty", c.FSType, Name)
	}
	flags, err := mount.ParseFlags(c.MountFlags)
	if err == nil {
		err = mount.CheckNFSOptions(flags.Data)
	}
	if err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", c.MountFlags, err)
	}
	return nil
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	asked, err := backend.Asked(spec)
	if err != nil {
		return volume.Volume{}, err
	}
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := b.Existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	if spec.Source != nil {
		return b.createOf(ctx, p, spec, asked)
	}
	v, err := create(ctx, p, spec, asked)
	if errors.Is(err, pool.ErrExists) {
		return b.Existing(p, spec)
	}
	return v, err
}

func create(ctx context.Context, p *pool.Pool, spec volume.Spec, asked volume.DirectoryParameters) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds)
	if err != nil {
		return volume.Volume{}, err
	}
	v := backend.DirectoryRecord(p.ID(Name, spec.Name()), spec, size, asked)
	err = p.CreateDirectory(ctx, v, nil, func(dir *os.File, made bool) error { return prepare(dir, made, asked, v.Directory) })
	return v, explain(p, err)
}

// explain adds the remedy for an errno of an export.
func explain(p *pool.Pool, err error) error {
	for kind, reason := range reasons {
		if errors.Is(err, kind) && !decided(err) {
			return volume.Errorf(reason.kind, "pool %q: %w: %s", p.Name(), err, reason.remedy)
		}
	}
	return err
}

const squashed = "the server does not let this node's root be root: export with no_root_squash"

var reasons = map[error]struct {
	kind   error
	remedy string
}{
	syscall.EACCES: {volume.ErrPrecondition, squashed},
	syscall.EPERM:  {volume.ErrPrecondition, squashed},
	syscall.EROFS:  {volume.ErrPrecondition, "the export is read-only: export it rw"},
	syscall.ENOSPC: {volume.ErrExhausted, "free space on the server, or grow its filesystem"},
	syscall.EDQUOT: {volume.ErrExhausted, "raise the quota on the server"},
	syscall.ESTALE: {volume.ErrUnavailable, "the export was replaced, or exported anew: try again"},
}

// decided tells whether an error says already what kind it is of.
func decided(err error) bool {
	for _, kind := range []error{
		volume.ErrInvalid, volume.ErrNotFound, volume.ErrIncompatible, volume.ErrOutOfRange, volume.ErrExhausted,
		volume.ErrPrecondition, volume.ErrPending, volume.ErrUnavailable, volume.ErrDamaged,
	} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// Delete implements backend.Backend. What becomes of the directory is in the record.
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
	// A directory that is retained may be mounted for another volume.
	if retained := v.Directory.SubDir != "" && v.Directory.OnDelete == volume.OnDeleteRetain; !retained {
		if err := b.unused(v); err != nil {
			return err
		}
	}
	return explain(p, p.Remove(ctx, v))
}

// unused refuses a volume that is mounted on this node. For other nodes only the publication records
// show it.
func (b *Backend) unused(v volume.Volume) error {
	source, err := b.source(v)
	if err != nil {
		return err
	}
	mounts, err := mount.Of(source)
	if err != nil || len(mounts) == 0 {
		return err
	}
	return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", v.ID, mounts[0].Mountpoint)
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	return b.Room(q.Parameters, bounds)
}

// Expand implements backend.Expander. It only reserves more space.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(bounds)
		if err != nil {
			return 0, err
		}
		return size, p.Grow(ctx, v, size, func() error { return nil })
	})
}

// ResizeDevice implements backend.Expander.
func (b *Backend) ResizeDevice(context.Context, volume.Volume) error { return nil }
