package backend

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// SnapshotCopy describes the creation of a set of snapshots as copies of volumes.
type SnapshotCopy struct {
	Pool *pool.Pool
	// Volumes are the source volumes. Record.Snapshots and Folders have one element for each volume,
	// in the same order. The backend creates the data of each snapshot in its folder, and writes the
	// result to Record.
	Volumes []volume.Volume
	Record  *volume.SnapshotSet
	Folders []*os.Root
	Spec    volume.SnapshotSpec
	// Writable means that the device of the snapshot must be writable. It is set only for temporary snapshots.
	Writable bool
	Job      *pool.Job
}

// Take implements Snapshotter.Snapshot. expect returns the expected record of a snapshot, with the
// expected number of bytes. copyData creates the data of all snapshots of the set.
func (ps *Pools) Take(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec,
	expect func(*pool.Pool, volume.Volume) (volume.Snapshot, error), copyData func(context.Context, *SnapshotCopy) error,
) (volume.SnapshotSet, error) {
	p, err := ps.Set.ByID(volumes[0].ID)
	if err != nil {
		return volume.SnapshotSet{}, err
	}
	id := p.ID(ps.Backend, spec.Name())
	have, err := existingSet(p, id, volumes, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, ps.Explain(p, err)
	}
	err = p.Jobs.Do(ctx, pool.SnapshotJob(id.Name), func(ctx context.Context, j *pool.Job) error {
		set := volume.SnapshotSet{Version: volume.RecordVersion, ID: id, CoName: spec.CoName, Created: time.Now().UTC()}
		for i, v := range volumes {
			s, err := expect(p, v)
			if err != nil {
				return err
			}
			s.ID, s.Source, s.Size = id, v.ID, v.Capacity
			if spec.Group {
				s.ID.Name = volume.MemberName(id.Name, i)
			}
			set.Snapshots = append(set.Snapshots, s)
		}
		return p.Snapshots.Create(ctx, &set, func(folders []*os.Root) error {
			return copyData(ctx, &SnapshotCopy{Pool: p, Volumes: volumes, Record: &set, Folders: folders, Spec: spec, Job: j})
		})
	})
	if err != nil && !errors.Is(err, pool.ErrExists) {
		return volume.SnapshotSet{}, ps.Explain(p, err)
	}
	have, err = existingSet(p, id, volumes, spec)
	return have, ps.Explain(p, err)
}

// TakeTemporary does the same as Take for one volume, but the snapshot exists only until release is called. If this process ends
// before, the next one removes it. purpose begins its name.
func (ps *Pools) TakeTemporary(ctx context.Context, p *pool.Pool, v volume.Volume, purpose string,
	expect func(*pool.Pool, volume.Volume) (volume.Snapshot, error), copyData func(context.Context, *SnapshotCopy) error,
) (s volume.Snapshot, release func() error, err error) {
	if s, err = expect(p, v); err != nil {
		return s, nil, err
	}
	name := purpose + "-" + uuid.NewString()
	s.ID, s.Source, s.Size = p.ID(ps.Backend, name), v.ID, v.Capacity
	set := volume.SnapshotSet{Version: volume.RecordVersion, ID: s.ID, CoName: name, Created: time.Now().UTC(), Snapshots: []volume.Snapshot{s}}
	release, err = p.Snapshots.Temporary(ctx, &set, func(folders []*os.Root) error {
		return copyData(ctx, &SnapshotCopy{Pool: p, Volumes: []volume.Volume{v}, Record: &set, Folders: folders})
	})
	return set.Snapshots[0], release, err
}

// existingSet returns the existing set for spec. It returns ErrNotFound if no set has this ID, and
// ErrIncompatible if the set has another name or other source volumes.
func existingSet(p *pool.Pool, id volume.ID, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	set, err := p.Snapshots.Set(id)
	if err != nil {
		return set, err
	}
	if set.CoName != spec.CoName {
		return set, volume.Errorf(volume.ErrIncompatible, "snapshot %s belongs to the name %q, which shares its hash with %q: use another name", set.ID, set.CoName, spec.CoName)
	}
	var sources []volume.ID
	for _, s := range set.Snapshots {
		sources = append(sources, s.Source)
	}
	for _, v := range volumes {
		if !slices.Contains(sources, v.ID) || len(volumes) != len(sources) {
			return set, volume.Errorf(volume.ErrIncompatible, "snapshot %q exists with the source volumes %v: use another name, or delete it", spec.CoName, sources)
		}
	}
	return set, p.Snapshots.Sync()
}

// DeleteSnapshots implements Snapshotter.
func (ps *Pools) DeleteSnapshots(_ context.Context, id volume.ID) error {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return err
	}
	p.Jobs.Cancel(pool.SnapshotJob(id.Name))
	set, err := p.Snapshots.Set(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.Snapshots.Sync()
	}
	if err != nil {
		return err
	}
	return ps.Explain(p, p.Snapshots.Remove(set))
}

// Snapshots implements Snapshotter.
func (ps *Pools) Snapshots(_ context.Context, id volume.ID) (volume.SnapshotSet, error) {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return volume.SnapshotSet{}, err
	}
	return p.Snapshots.Set(id)
}

// ListSnapshots implements Snapshotter, in the order of List.
func (ps *Pools) ListSnapshots(_ context.Context, after volume.ID, limit int) ([]volume.Snapshot, bool, error) {
	return listPools(ps, after, limit, func(p *pool.Pool, backend, after string, limit int) ([]volume.Snapshot, bool, error) {
		return p.Snapshots.List(backend, after, limit)
	})
}

// Origin is the snapshot or the volume from which a new volume is copied.
type Origin struct {
	Pool *pool.Pool
	// Snapshot is nil if the origin is a volume. Otherwise only the capacity and the fields of the
	// device are set in Volume.
	Snapshot *volume.Snapshot
	Volume   volume.Volume
}

// Origin finds the source in spec of a new volume in pool p. It returns ErrNotFound if the source
// does not exist, and ErrInvalid if this backend cannot copy the source to pool p.
func (ps *Pools) Origin(p *pool.Pool, spec volume.Spec) (*Origin, error) {
	id := spec.Source.ID
	if id.Backend != ps.Backend {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is of backend %s, the requested volume is of backend %s: use a class of the source's backend", spec.Source, id.Backend, ps.Backend)
	}
	from, err := ps.Set.ByID(id)
	if errors.Is(err, volume.ErrUnavailable) && (id.Shared() != p.Shared() || id.Shared() && id.Pool != p.Name()) {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is in pool %q, the requested volume is in pool %q, and nothing is copied between these pools: use a class of the source's pool", spec.Source, id.Pool, p.Name())
	}
	if err != nil {
		return nil, err
	}
	o := &Origin{Pool: from}
	if !spec.Source.Snapshot {
		o.Volume, err = from.ByID(id)
		return o, err
	}
	s, err := from.Snapshots.Get(id)
	o.Snapshot = &s
	o.Volume = volume.Volume{Capacity: s.Size, Block: s.Block, FSType: s.FSType, SectorSize: s.SectorSize, Encryption: s.Encryption}
	return o, err
}

// CheckDevice returns ErrInvalid if spec requests another filesystem than the origin has, or a clone with another
// volume mode. A volume from a snapshot can have another mode. Kubernetes allows that only for snapshots that the
// administrator has annotated.
func (o *Origin) CheckDevice(spec volume.Spec) error {
	switch {
	case spec.Block() != o.Volume.Block && spec.Source.Snapshot:
	case spec.Block() != o.Volume.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capabilities request block %t, %v has block %t: request the same", spec.Block(), spec.Source, o.Volume.Block)
	case spec.NamesFSType() && spec.FSType() != o.Volume.FSType:
		return volume.Errorf(volume.ErrInvalid, "volume_capabilities or parameter %s request filesystem %s, %v has %s: request that, or none", volume.ParamFSType, spec.FSType(), spec.Source, o.Volume.FSType)
	}
	return o.Volume.Encryption.SameEncryption(spec.Parameters, spec.Source)
}

// SetDevice sets the volume mode, the filesystem, the sector size and the encryption of a new volume with the content
// of the origin.
func (o *Origin) SetDevice(v *volume.Volume, spec volume.Spec) {
	v.Block, v.FSType = o.Volume.Block, o.Volume.FSType
	v.SectorSize, v.Encryption = o.Volume.SectorSize, o.Volume.Encryption
	if spec.Block() != v.Block {
		v.Block, v.FSType = spec.Block(), spec.FSType()
	}
}

// MarkCopied records in the folder of a new volume in tmp that its filesystem is a copy (pool.MarkCloned). formatted
// reports whether the origin is a complete filesystem. The content of a raw origin is never formatted.
func MarkCopied(dir *os.Root, v, origin volume.Volume, formatted bool) error {
	if v.Block || !formatted && !origin.Block {
		return nil
	}
	return pool.MarkCloned(dir)
}

// Choose returns the capacity of the new volume (volume.Range.Choose). It returns ErrOutOfRange if the
// result is below the origin's capacity. It rounds the required capacity up before the comparison, so
// that the capacity that was requested for the origin is enough for its copy.
func (o *Origin) Choose(spec volume.Spec, b volume.Bounds) (int64, error) {
	if err := o.CheckLimit(spec); err != nil {
		return 0, err
	}
	r := spec.Capacity
	if r.Required == 0 {
		r.Required = o.Volume.Capacity
	}
	size, err := r.Choose(b)
	if err == nil && size < o.Volume.Capacity {
		err = o.tooSmall(spec)
	}
	return size, err
}

// CheckLimit returns ErrOutOfRange if the capacity limit in spec is below the origin's capacity.
func (o *Origin) CheckLimit(spec volume.Spec) error {
	if limit := spec.Capacity.Limit; limit > 0 && limit < o.Volume.Capacity {
		return o.tooSmall(spec)
	}
	return nil
}

func (o *Origin) tooSmall(spec volume.Spec) error {
	return volume.Errorf(volume.ErrOutOfRange, "capacity_range (required %d, limit %d): %v needs at least %s: request that size", spec.Capacity.Required, spec.Capacity.Limit, spec.Source, volume.ExactSize(o.Volume.Capacity))
}

// Directory opens the directory of the origin for reading.
func (o *Origin) Directory() (*os.File, error) {
	if o.Snapshot != nil {
		return o.Pool.Snapshots.OpenDirectory(*o.Snapshot)
	}
	return o.Pool.OpenData(o.Volume)
}

// CopyDirectories locks all volumes, and then calls copyOne with the index and the open directory of each
// volume.
func (c *SnapshotCopy) CopyDirectories(lock func(volume.Volume) (io.Closer, error), copyOne func(i int, from *os.File) error) error {
	for _, v := range c.Volumes {
		l, err := lock(v)
		if err != nil {
			return err
		}
		defer l.Close()
	}
	c.Record.Created = time.Now().UTC()
	for i, v := range c.Volumes {
		from, err := c.Pool.OpenData(v)
		if err == nil {
			err = errors.Join(copyOne(i, from), from.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// CopyDirectory copies a directory to the snapshot with index i. The directory must not change during
// the copy.
func (c *SnapshotCopy) CopyDirectory(ctx context.Context, i int, from *os.File) error {
	if err := c.Folders[i].Mkdir(pool.DataDir, 0o700); err != nil {
		return err
	}
	to, err := c.Folders[i].Open(pool.DataDir)
	if err != nil {
		return err
	}
	defer to.Close()
	result, err := clone.Tree(ctx, to, from, clone.Options{Progress: c.Job.Progress, Budget: c.Pool.Background(to, from)})
	c.Record.Snapshots[i].Bytes, c.Record.Snapshots[i].Shared = result.Bytes, result.Shared
	return pool.CopyError(err)
}
