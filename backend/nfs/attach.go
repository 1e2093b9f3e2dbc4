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

// ownSuperblock keeps a volume's mount apart from all others of the server, so that
// one can be given up without the others.
const ownSuperblock = "nosharecache"

// Attach implements backend.Backend. The directory is looked at through the pool,
// where no link is followed; what is mounted by its path has to be the same.
func (b *Backend) Attach(_ context.Context, v volume.Volume) (mount.Source, error) {
	source, err := b.source(v)
	if err != nil || isStatic(v) {
		return source, err
	}
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	if err := p.Check(); err != nil {
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

// identity is what a directory is known by through every mount of its server. Its
// device is not: each mount has one of its own.
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

// verify makes sure that a mounted directory is the volume's. The kernel follows the
// links that it meets on the way to it, and who can write to the export may put one
// there at any time.
func verify(v volume.Volume, root *os.File, want identity) error {
	got, err := identify(root)
	if err != nil || got == want {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %s: what its server mounts as its directory is another one: look for a symbolic link on the way to it; nothing was mounted", v.ID)
}

// Present implements backend.Backend.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	source, err := b.source(v)
	return source, err == nil, err
}

// StaticAt implements backend.StaticProvider.
func (b *Backend) StaticAt(path string) (mount.Source, error) {
	source, err := mount.NFSAt(path)
	if err != nil || source == nil {
		return nil, err
	}
	return source, nil
}

// Detach implements backend.Backend: what is mounted nowhere is not here.
func (b *Backend) Detach(context.Context, volume.Volume) error { return nil }

// source is where a volume lies on its server. Its pool need not be open. Of a volume
// known by its ID alone it is anywhere in the pool.
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
