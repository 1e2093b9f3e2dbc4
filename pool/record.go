package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/pool/shared"
	"github.com/trivet-csi/trivet/volume"
)

const (
	recordFile = "volume.json"
	// ImageFile is the name of a volume's image in its folder.
	ImageFile = "image"
)

// FolderPath is the path of a volume's folder below the pool.
func FolderPath(name string) string { return volumesDir + "/" + name }

func volumePath(name, file string) string { return volumesDir + "/" + name + "/" + file }

// ErrExists means that another process has made the volume. The caller reads its record and compares
// it with the request.
var ErrExists = fmt.Errorf("%w: it exists", volume.ErrPending)

// Create makes a volume: build fills its folder, then one rename commits folder and record. So other
// calls find the complete volume, or none. It is durable when Create returns. The caller must have
// checked that the volume does not exist; ErrExists if another process has made it since.
//
// Create, and all other calls that change a pool, continue when ctx ends.
func (p *Pool) Create(ctx context.Context, v volume.Volume, build func(dir *os.Root) error) error {
	return p.create(ctx, v, ledger.OfVolume(v), build, func(string) error { return nil })
}

// TakeOver is Create for a volume whose data exists on the storage, and already takes its space. It is counted even if the
// pool has no room for it.
func (p *Pool) TakeOver(ctx context.Context, v volume.Volume, build func(dir *os.Root) error) error {
	r := ledger.OfVolume(v)
	r.Exists = true
	return p.create(ctx, v, r, build, func(string) error { return nil })
}

// create is Create with the reservation of the volume and a function place, which moves data from the entry of tmp to a
// place outside the volume's folder.
func (p *Pool) create(ctx context.Context, v volume.Volume, r ledger.Reservation, build func(dir *os.Root) error, place func(entry string) error) error {
	if err := p.Check(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	defer p.ledger.Begin(FolderPath(v.ID.Name))()
	v.CreationID = uuid.NewString()
	entry, err := p.medium.Entry(v.ID.Name, v.StorageSize(), "")
	if err == nil {
		err = p.medium.Reserve(ctx, FolderPath(v.ID.Name), r, func() error {
			err := p.building.makeTmp(ctx, entry)
			if err == nil && hasSubDir(v) { // until the commit no other process may make a volume with the same subDir
				err = p.buildAndCommit(ctx, v, entry, build, place)
			}
			return err
		})
	}
	if err == nil && !hasSubDir(v) {
		err = p.buildAndCommit(ctx, v, entry, build, place)
	}
	if err == nil {
		err = p.SyncVolumes()
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.medium.Explain(err)
}

// buildAndCommit fills an entry of tmp and commits it as the volume v. After an error it removes the entry.
func (p *Pool) buildAndCommit(ctx context.Context, v volume.Volume, entry string, build func(dir *os.Root) error, place func(entry string) error) error {
	err := p.buildEntry(entry, v, build)
	if err == nil {
		err = place(entry)
	}
	if err == nil {
		crashpoint.Here(crashpoint.CreateBuilt)
		err = p.building.commit(entry, p.volumes, v.ID.Name, v.CreationID, func() (string, error) {
			existing, err := p.Lookup(v.ID.Name)
			return existing.CreationID, err
		})
	}
	if err != nil {
		return errors.Join(err, p.building.abandon(ctx, entry, v.ID.Name))
	}
	if v.Directory != nil { // build has set the quota ID in v.Directory
		p.ledger.Set(FolderPath(v.ID.Name), ledger.OfVolume(v))
	}
	crashpoint.Here(crashpoint.CreateCommitted)
	return nil
}

// buildEntry fills the folder of a volume in tmp. It is durable when buildEntry returns.
func (p *Pool) buildEntry(entry string, v volume.Volume, build func(dir *os.Root) error) error {
	dir, err := beneath.OpenRoot(p.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	if p.storage != nil {
		record, err := v.MarshalRecord()
		if err != nil {
			return err
		}
		return p.building.buildOnStorage(dir, record, func(dir *os.Root) error {
			if err := build(dir); err != nil {
				return err
			}
			return completeRecord(dir, v, record)
		})
	}
	if err := build(dir); err != nil {
		return err
	}
	record, err := v.MarshalRecord() // build may have set v.Directory.Quota
	if err != nil {
		return err
	}
	// The folder for attachments is made now, so that the sync of the volume's folder makes it durable.
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.Create(dir, recordFile, record); err != nil {
		return err
	}
	if v.Directory == nil {
		return p.medium.SyncFiles(dir, ImageFile, ".")
	}
	return p.medium.SyncFiles(dir, ".")
}

// completeRecord writes the record again if build has changed v.Section.
func completeRecord(dir *os.Root, v volume.Volume, before []byte) error {
	record, err := v.MarshalRecord()
	if err != nil || bytes.Equal(record, before) {
		return err
	}
	return atomicfile.Write(dir, recordFile, record)
}

// Grow reserves the new, larger capacity of a volume, calls apply to grow the data, and records
// the capacity. If apply fails, the reservation is withdrawn. The caller holds LockVolume.
func (p *Pool) Grow(ctx context.Context, v volume.Volume, capacity int64, apply func() error) error {
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.medium.CompleteGrowth(ctx, v.ID.Name); err != nil {
		return p.medium.Explain(err)
	}
	defer p.ledger.Begin(FolderPath(v.ID.Name))()
	more := capacity - v.Capacity
	v.Capacity = capacity
	err := p.medium.Reserve(context.WithoutCancel(ctx), FolderPath(v.ID.Name), ledger.OfVolume(v), func() error { return p.medium.AnnounceGrowth(v.ID.Name, more) })
	if err == nil && p.storage != nil { // an image that has grown has another modification time
		err = p.Images.BeginChange(v.ID.Name)
	}
	if err == nil {
		err = apply()
	}
	if err == nil {
		err = p.recordGrowth(ctx, v)
	} else {
		err = errors.Join(err, p.medium.WithdrawGrowth(v.ID.Name))
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.medium.Explain(err)
}

// CompleteGrowth ends the announcement of a volume's growth if an earlier call of this process has recorded the
// new capacity but could not end the announcement. The caller holds LockVolume.
func (p *Pool) CompleteGrowth(ctx context.Context, name string) error {
	return p.medium.CompleteGrowth(ctx, name)
}

// RaiseCapacity records that a volume is larger than its record says: a call was interrupted after it
// had grown the image, or the record was restored from a backup. The bytes exist, so they are
// counted even if the pool has no room for them. The caller holds LockVolume.
func (p *Pool) RaiseCapacity(ctx context.Context, v volume.Volume, capacity int64) error {
	err := p.medium.AnnounceGrowth(v.ID.Name, capacity-v.Capacity)
	if err == nil {
		v.Capacity = capacity
		err = p.recordGrowth(ctx, v)
	}
	return p.medium.Explain(err)
}

// recordGrowth records the capacity of v, whose data already has that size, and ends the announcement.
func (p *Pool) recordGrowth(ctx context.Context, v volume.Volume) error {
	crashpoint.Here(crashpoint.GrowImage)
	if err := p.rewrite(v); err != nil {
		return err
	}
	p.recount(v.ID.Name)
	crashpoint.Here(crashpoint.GrowRecord)
	return p.medium.CompleteGrowth(ctx, v.ID.Name)
}

// SetNamespace records the namespace whose pods alone may mount the volume. The caller holds
// LockVolume.
func (p *Pool) SetNamespace(v volume.Volume, namespace string) error {
	if err := p.Check(); err != nil {
		return err
	}
	v.Namespace = namespace
	return p.rewrite(v)
}

// SetIOLimits records the limits of a volume's I/O. They are durable when SetIOLimits returns. The caller holds LockVolume.
func (p *Pool) SetIOLimits(v volume.Volume, limits volume.IOLimits) error {
	if err := p.Check(); err != nil {
		return err
	}
	v.IOLimits = &limits
	if err := p.rewrite(v); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ModifyRecorded)
	return nil
}

// LockVolume locks the volume until the result is closed. Meanwhile no other call can grow, stage, copy or delete it. ErrPending if another call holds the lock for more than a
// second. On an export whose server does not support locks, LockVolume locks nothing.
func (p *Pool) LockVolume(ctx context.Context, name string) (io.Closer, error) {
	return p.lockVolume(name, func(f *os.File) error { return flockPatiently(ctx, f) })
}

// TryLockVolume does the same as LockVolume without waiting.
func (p *Pool) TryLockVolume(name string) (io.Closer, error) { return p.lockVolume(name, flock) }

// lockVolume locks the volume by a function, which returns EWOULDBLOCK if another call holds the lock.
func (p *Pool) lockVolume(name string, lock func(*os.File) error) (io.Closer, error) {
	f, path, err := p.medium.OpenLock(name)
	if beneath.IsNotExist(err) {
		return nil, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
	}
	if err != nil {
		return nil, p.medium.Explain(err)
	}
	switch err = lock(f); {
	case err == nil:
		err = p.checkCurrent(name, path, f)
	case errors.Is(err, unix.EWOULDBLOCK):
		err = volume.Errorf(volume.ErrPending, "volume %q is being grown, staged, copied or deleted by another call: retry", name)
	case shared.NoLocks(err):
		err = nil
	}
	if err != nil {
		return nil, errors.Join(p.medium.Explain(err), f.Close())
	}
	return f, nil
}

// flock locks a file without waiting. EWOULDBLOCK if it is locked.
func flock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
