// Package nfs is the backend of volumes that are directories of an export, which many nodes can use
// at once. Their capacity is not enforced: the only limit is the size of the export's filesystem.
//
// A volume's directory is `data` in the volume's folder, or the subDir of its class. That path
// itself is mounted, so that the mount gives no access to parent directories. Only root can enter a
// volume's folder, whatever the mode of the directory.
package nfs

import (
	"context"
	"errors"
	"os"
	"path"
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

// Backend creates volumes that are directories of exports.
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
	Name: Name, Doc: "[a directory of an export](../kinds/nfs.md)",
	Media:       []pool.Kind{pool.KindExport},
	Directories: true, FSTypes: []string{"nfs", "nfs4"}, MountFlags: []string{"nfs"}, CheckMountFlags: checkMountFlags,
	SharedModes: []volume.AccessMode{volume.MultiNodeMultiWriter, volume.MultiNodeReaderOnly},
	Parameters:  backend.DirectoryParameters,
	Check:       backend.CheckDirectory,
	New:         New,
}

// New creates the backend. It uses only pools that are exports.
func New(pools *pool.Set) backend.Backend {
	b := &Backend{}
	b.Directories = backend.Directories{
		Pools:  backend.Pools{Backend: Name, Set: pools, Accepts: pool.Config.Shared, Explain: explain},
		Bounds: bounds, Prepare: prepare, Copy: b.copyFrom,
		Source: func(v volume.Volume) (mount.Source, error) { return b.source(v) },
	}
	return b
}

// Enforced implements backend.Limiter. Only an administrator can set quotas on the server.
func (b *Backend) Enforced(volume.Volume) string { return backend.EnforcedNot }

// checkMountFlags refuses NFS options that the driver sets or does not support.
func checkMountFlags(words []string) error {
	if err := mount.CheckNFSOptions(words); err != nil {
		return backend.ExplainMountFlags(words, err)
	}
	return nil
}

// explain adds the remedy to an errno of an export.
func explain(p *pool.Pool, err error) error {
	for errno, r := range remedies {
		if errors.Is(err, errno) && !volume.HasKind(err) {
			return volume.Errorf(r.kind, "pool %q: %w: %s", p.Name(), err, r.remedy)
		}
	}
	return err
}

// denied is the remedy for an error that a server causes by mapping root to another user, or a node without a Kerberos
// ticket.
const denied = "the server denies this node's root: export with no_root_squash, and with Kerberos map the principal of the node to root, and check that rpc.gssd of the node gets a ticket (journalctl -u rpc-gssd)"

// remedies are the kind and the remedy of an errno.
var remedies = map[error]struct {
	kind   error
	remedy string
}{
	syscall.EACCES:      {volume.ErrPrecondition, denied},
	syscall.EPERM:       {volume.ErrPrecondition, denied},
	syscall.EKEYEXPIRED: {volume.ErrPrecondition, denied},
	syscall.EROFS:       {volume.ErrPrecondition, "the export is read-only: export it rw"},
	syscall.ENOSPC:      {volume.ErrExhausted, "free space on the server, or grow its filesystem"},
	syscall.EDQUOT:      {volume.ErrExhausted, "raise the quota on the server"},
	syscall.ESTALE:      {volume.ErrUnavailable, "the export was replaced or exported again: retry"},
}

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, backend.DirectoryHealth, backend.AlmostFull)
}

// ownSuperblock gives each mount its own superblock, so that aborting its requests does not affect
// other mounts of the server.
const ownSuperblock = "nosharecache"

// Attach implements backend.Backend. It opens the directory beneath the pool without following links.
// The kernel mounts the volume by path, and source.Verify checks that the mount shows the opened
// directory.
func (b *Backend) Attach(_ context.Context, v volume.Volume, _ volume.Secrets) (mount.Source, error) {
	source, err := b.source(v)
	if err != nil || v.Version == 0 && v.Directory != nil { // a static volume has no record
		return source, err
	}
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	dir, err := p.OpenDirectory(v)
	if err != nil {
		return nil, explain(p, err)
	}
	defer dir.Close()
	want, err := identify(dir)
	if err != nil {
		return nil, explain(p, err)
	}
	source.Verify = func(root *os.File) error { return verify(v, root, want) }
	return source, nil
}

// identity identifies a directory in all mounts from its server. It does not contain the device
// number, which differs between mounts.
type identity struct {
	ino    uint64
	handle string
}

// identify returns the identity of an open directory.
func identify(dir *os.File) (identity, error) {
	st, err := stat(dir)
	if err != nil {
		return identity{}, err
	}
	handle, err := mount.Handle(dir)
	return identity{st.Ino, handle}, err
}

// verify returns ErrDamaged unless the mounted directory root is the volume's. The kernel follows links in
// the path of a mount, and a user who can write to the export can create a link at any time.
func verify(v volume.Volume, root *os.File, want identity) error {
	got, err := identify(root)
	if err != nil || got == want {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %s: the server mounted another directory at its path: check the path for a symbolic link; nothing was mounted", v.ID)
}

// StaticAt implements backend.StaticProvider.
func (b *Backend) StaticAt(path string) (mount.Source, error) {
	source, err := mount.NFSAt(path)
	if err != nil || source == nil {
		return nil, err
	}
	return source, nil
}

// Detach implements backend.Backend. A mounted NFS volume has nothing to detach.
func (b *Backend) Detach(context.Context, volume.Volume) error { return nil }

// source returns the location of a volume on its server. The pool need not be open. If v has only the
// ID, the source matches any path in the pool.
func (b *Backend) source(v volume.Volume) (*mount.NFSSource, error) {
	c, ok := b.Set.Config(v.ID.Pool)
	if !ok {
		c, ok = pool.DirectConfig(v.ID.Pool)
	}
	if !ok || c.NFS == nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: pool %q is not an nfs pool of this driver's configuration: add it to the configuration", v.ID, v.ID.Pool)
	}
	n, err := address(c.NFS)
	if err != nil {
		return nil, err
	}
	if v.Directory == nil {
		return &mount.NFSSource{NFS: n, AnyPath: true}, nil
	}
	n.Path = path.Join(n.Path, pool.DirectoryPath(v))
	return &mount.NFSSource{NFS: n}, nil
}

// address returns the address and the mount options of an export.
func address(c *pool.NFS) (mount.NFS, error) {
	server, err := volume.CanonicalServer(c.Server)
	if err != nil {
		return mount.NFS{}, err
	}
	export, err := volume.CanonicalExport(c.Export)
	if err != nil {
		return mount.NFS{}, err
	}
	return mount.NFS{Server: server, Path: export, Options: slices.Concat(c.MountOptions, []string{ownSuperblock})}, nil
}
