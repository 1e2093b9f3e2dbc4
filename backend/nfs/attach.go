package nfs

import (
	"context"
	"os"
	"path"
	"slices"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// ownSuperblock gives each mount its own superblock, so that one can be aborted without the other
// mounts of the server.
const ownSuperblock = "nosharecache"

// Attach implements backend.Backend. It opens the directory beneath the pool without following links.
// The directory that is then mounted by path must be the same.
func (b *Backend) Attach(_ context.Context, v volume.Volume) (mount.Source, error) {
	source, err := b.source(v)
	if err != nil || isStatic(v) {
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

// identity identifies a directory in every mount of its server. The device number does not, because
// each mount has its own.
type identity struct {
	ino    uint64
	handle string
}

func identify(dir *os.File) (identity, error) {
	st, err := stat(dir)
	if err != nil {
		return identity{}, err
	}
	handle, err := mount.Handle(dir)
	return identity{st.Ino, handle}, err
}

// verify checks that a mounted directory is the volume's. The kernel follows links in the path, and
// a user who can write to the export may create one at any time.
func verify(v volume.Volume, root *os.File, want identity) error {
	got, err := identify(root)
	if err != nil || got == want {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %s: its server mounts another directory under its path: check the path for a symbolic link; nothing was mounted", v.ID)
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

// source returns the location of a volume on its server. The pool need not be open. If only the ID
// is known, the source matches any path in the pool.
func (b *Backend) source(v volume.Volume) (*mount.NFSSource, error) {
	c, ok := b.Set.Config(v.ID.Pool)
	if !ok {
		c, ok = pool.DirectConfig(v.ID.Pool)
	}
	if !ok || c.NFS == nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: pool %q is not an nfs pool of this driver's configuration: is it in the configuration?", v.ID, v.ID.Pool)
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
