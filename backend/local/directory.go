package local

import (
	"context"
	"errors"
	"os"
	"path"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func create(ctx context.Context, p *pool.Pool, spec volume.Spec, asked volume.DirectoryParameters) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds)
	if err != nil {
		return volume.Volume{}, err
	}
	v := backend.DirectoryRecord(p.ID(Name, spec.Name()), spec, size, asked)
	err = p.CreateDirectory(ctx, v, nil, func(dir *os.File, made bool) error {
		return backend.PrepareDirectory(dir, made, asked, v.Directory)
	})
	return v, noRoom(p, err)
}

// noRoom explains that the pool's filesystem is full.
func noRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: its filesystem has no room for a directory now: %w: free space there, or make it larger", p.Name(), err)
}

// Attach implements backend.Backend. It restores a limit that was changed, if the filesystem has
// limits now. A volume without a limit can be attached; its health reports that.
func (b *Backend) Attach(ctx context.Context, v volume.Volume) (mount.Source, error) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	if errors.Is(p.Quotas.Check(v), pool.ErrQuotaChanged) {
		if err := p.Quotas.Relimit(v.ID); err != nil {
			return nil, err
		}
	}
	lock, err := p.LockVolume(ctx, v.ID.Name) // against a copy, until the volume is mounted
	if err != nil {
		return nil, err
	}
	dir, err := p.OpenDirectory(v)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	hold := closers{dir, lock}
	source, err := b.source(v)
	if err != nil {
		return nil, errors.Join(err, hold.Close())
	}
	source.Dir, source.Hold = dir, hold
	return source, nil
}

// Present implements backend.Backend: a directory is always present. If the record cannot be read or
// the pool is not open, the source suffices to identify the volume's mounts.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	source, err := b.source(v)
	return source, err == nil, err
}

// source returns the location of a volume.
func (b *Backend) source(v volume.Volume) (*mount.DirectorySource, error) {
	source := &mount.DirectorySource{Path: path.Dir(pool.DirectoryPath(withDirectory(v))), AnyPath: v.Directory == nil}
	if v.Directory != nil && v.Directory.SubDir != "" {
		source.Path = v.Directory.SubDir
	}
	p, err := b.Set.ByID(v.ID)
	if errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return source, err
	}
	source.Base = p.Dir()
	if source.AnyPath {
		return source, nil
	}
	dir, err := p.OpenDirectory(v)
	if errors.Is(err, volume.ErrDamaged) || errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return source, err
	}
	defer dir.Close()
	source.Dev, source.Ino, err = identify(dir)
	return source, err
}

// withDirectory assumes the default directory for a volume of which only the ID is known.
func withDirectory(v volume.Volume) volume.Volume {
	if v.Directory == nil {
		v.Directory = &volume.Directory{}
	}
	return v
}

func identify(dir *os.File) (dev, ino uint64, err error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, 0, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	return st.Dev, st.Ino, nil
}

// shared reports whether other volumes may use the same directory.
func shared(v volume.Volume) bool {
	return v.Directory != nil && v.Directory.SubDir != "" && v.Directory.OnDelete == volume.OnDeleteRetain
}

// unused refuses a volume that is mounted on this node. A directory that is retained may be mounted
// for another volume, and is not removed.
func (b *Backend) unused(v volume.Volume) error {
	if shared(v) {
		return nil
	}
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

// Detach implements backend.Backend. It only checks that the volume is not mounted.
func (b *Backend) Detach(_ context.Context, v volume.Volume) error { return b.unused(v) }
