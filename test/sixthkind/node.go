package sixthkind

import (
	"context"
	"errors"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Attach implements backend.Backend. The source keeps the directory open until it is mounted.
func (b *Backend) Attach(_ context.Context, v volume.Volume) (mount.Source, error) {
	p, err := b.Set.ByID(v.ID)
	if err == nil {
		err = p.Check()
	}
	if err != nil {
		return nil, err
	}
	source, err := b.source(v)
	if err == nil {
		source.Dir, err = p.OpenDirectory(v)
	}
	if err != nil {
		return nil, err
	}
	source.Hold = source.Dir
	return source, nil
}

// Present implements backend.Backend: a directory is always present.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	source, err := b.source(v)
	return source, err == nil, err
}

// Detach implements backend.Backend: it refuses a volume that is still mounted.
func (b *Backend) Detach(_ context.Context, v volume.Volume) error {
	source, err := b.source(v)
	if err != nil {
		return err
	}
	mounts, err := mount.Of(source)
	if err == nil && len(mounts) > 0 {
		err = volume.Errorf(volume.ErrInUse, "volume %s is in use: it is mounted at %s: unpublish and unstage it first", v.ID, mounts[0].Mountpoint)
	}
	return err
}

// source describes the volume's directory. The path is known from the ID, so that mounts
// of a volume can be found without its record and while its pool is not open.
func (b *Backend) source(v volume.Volume) (*mount.DirectorySource, error) {
	source := &mount.DirectorySource{Path: pool.FolderPath(v.ID.Name)}
	p, err := b.Set.ByID(v.ID)
	if errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return nil, err
	}
	source.Base = p.Dir()
	if v.Directory == nil { // the record cannot be read
		return source, nil
	}
	dir, err := p.OpenDirectory(v)
	if errors.Is(err, volume.ErrDamaged) || errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var st syscall.Stat_t
	err = syscall.Fstat(int(dir.Fd()), &st)
	source.Dev, source.Ino = st.Dev, st.Ino
	return source, err
}

// Health implements backend.HealthChecker. StorageHealth is that of the pools.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	p, broken := b.Reach(v)
	if broken != nil {
		return backend.Found(broken)
	}
	dir, err := p.OpenDirectory(v)
	if err != nil {
		return []backend.Condition{{Severity: backend.DataLoss, Reason: backend.ReasonDirectoryMissing, Message: err.Error()}}
	}
	dir.Close()
	return backend.Found(backend.AlmostFull(p))
}
