package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// QuotaAuto limits directories where the filesystem can, and is the default.
	QuotaAuto = "auto"
	// QuotaRequired makes no directory that nothing keeps to its size.
	QuotaRequired = "required"
	// QuotaOff limits none.
	QuotaOff = "off"
)

const (
	// inodeBytes is how much of its capacity a volume may have for each inode; it is
	// what mke2fs(8) gives a filesystem.
	inodeBytes = 16 << 10
	// minInodes lets a small volume have more than a few files.
	minInodes = 1024
	// allocateTries bounds how often a directory is made anew because another volume
	// has its ID.
	allocateTries = 3
)

// What CheckQuota finds wrong.
var (
	// ErrQuotaOff means: nothing keeps the volume to its limit now.
	ErrQuotaOff = errors.New("quota not in force")
	// ErrQuotaChanged means: the limit is not the one that the driver has set.
	ErrQuotaChanged = errors.New("quota changed")
	// ErrQuotaLost means: the directory is not what the driver has limited. It was copied,
	// or somebody in it has taken it out.
	ErrQuotaLost = errors.New("quota lost")
)

// Quotas limits the directories of a pool.
type Quotas struct {
	*store
	// limiting is held by a call that changes limits that depend on the ledger.
	limiting sync.RWMutex
}

// limitOf is what a directory is limited to. btrfs counts what only snapshots and copies
// have any more with the volume that wrote it, which shall not have less because of that.
func (q *Quotas) limitOf(v volume.Volume, kind quota.Kind) quota.Limit {
	l := quota.Limit{Bytes: v.Capacity, Inodes: max(minInodes, v.Capacity/inodeBytes)}
	if kind == quota.Btrfs {
		l.Bytes += q.ledger.KeptOf(v.ID)
	}
	return l
}

// withQuota runs f with the filesystem of the pool. It is looked at each time: a
// remount may have changed what it can.
func (q *Quotas) withQuota(f func(fs *quota.FS) error) error {
	fs, err := quota.Open(q.dir)
	if err != nil {
		return fmt.Errorf("pool %q: quota: %w", q.cfg.Name, err)
	}
	defer fs.Close() //nolint:errcheck // nothing was written through it
	err = f(fs)
	if errors.Is(err, quota.ErrDamaged) {
		return volume.Errorf(volume.ErrPrecondition, "%w", err)
	}
	return err
}

// Enforces tells what keeps directories of the pool to their size, and if that is
// nothing why (ErrPrecondition, with the remedy).
func (q *Quotas) Enforces() (kind quota.Kind, err error) {
	if q.cfg.Quota == QuotaOff {
		return quota.None, volume.Errorf(volume.ErrPrecondition, "pool %q has quota: %s", q.cfg.Name, QuotaOff)
	}
	err = q.withQuota(func(fs *quota.FS) error {
		kind = fs.Kind()
		if err := inForce(fs); err != nil {
			return volume.Errorf(volume.ErrPrecondition, "pool %q, at %s: %w", q.cfg.Name, q.cfg.place(), err)
		}
		return nil
	})
	return kind, err
}

// inForce says why directories are not limited now.
func inForce(fs *quota.FS) error {
	if fs.Kind() == quota.None {
		return errors.New(fs.Why())
	}
	return fs.Check()
}

// Limits tells whether a new directory of the pool is kept to its size. Where the
// configuration wants that and it cannot be, it is ErrPrecondition.
func (q *Quotas) Limits() (bool, error) {
	_, err := q.Enforces()
	if q.cfg.Quota != QuotaRequired && errors.Is(err, volume.ErrPrecondition) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w; or set quota: %s, for directories without a limit", err, QuotaAuto)
	}
	return true, nil
}

// makeData makes a volume's directory in the folder that is being made, and limits it
// if the pool can; v.Directory says how. With content it is a copy of that (see
// Content).
func (q *Quotas) makeData(folder *os.Root, v volume.Volume, content *Content) (*os.File, error) {
	parent, err := folder.Open(".")
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	limits, err := q.Limits()
	if err != nil {
		return nil, err
	}
	if !limits {
		return q.makePlain(parent, content)
	}
	var data *os.File
	err = q.withQuota(func(fs *quota.FS) error {
		data, err = q.makeLimited(fs, parent, v, content)
		return err
	})
	crashpoint.Here(crashpoint.CreateLimited)
	return data, err
}

// makePlain makes a directory without a limit. On btrfs it is a subvolume too, for the
// sake of its snapshots.
func (q *Quotas) makePlain(parent *os.File, content *Content) (data *os.File, err error) {
	if err := q.withQuota(func(fs *quota.FS) error { return content.make(fs, parent) }); err != nil {
		return nil, err
	}
	return beneath.OpenDir(parent, DataDir)
}

// makeLimited limits a copy to twice its size, until limitCopy: xfs shares a block only
// where there is room to copy it, which a full one has not. clone.Tree needs one directory
// more.
func (q *Quotas) makeLimited(fs *quota.FS, parent *os.File, v volume.Volume, content *Content) (data *os.File, err error) {
	for range allocateTries {
		if err = content.make(fs, parent); err != nil {
			return nil, err
		}
		if data, err = beneath.OpenDir(parent, DataDir); err != nil {
			return nil, err
		}
		limit := q.limitOf(v, fs.Kind())
		if content != nil {
			limit.Bytes *= 2
			limit.Inodes++
		}
		id, failed := fs.Allocate(data, limit, q.ledger.HasQuota)
		if failed == nil {
			v.Directory.Quota = &volume.Quota{Kind: string(fs.Kind()), ID: id}
			return data, nil
		}
		done, removed := fs.RemoveDir(parent, DataDir)
		if !done {
			removed = errors.Join(removed, unix.Unlinkat(int(parent.Fd()), DataDir, unix.AT_REMOVEDIR))
		}
		err = errors.Join(failed, data.Close(), removed)
	}
	return nil, fmt.Errorf("pool %q: limiting the directory: %w", q.cfg.Name, err)
}

// GrowDirectory is Grow for a directory, whose limit is raised.
func (p *Pool) GrowDirectory(ctx context.Context, v volume.Volume, capacity int64) error {
	recorded := func() {}
	defer func() { recorded() }()
	return p.Grow(ctx, v, capacity, func() error {
		p.Quotas.limiting.Lock() // relimit goes by the record
		recorded = p.Quotas.limiting.Unlock
		v.Capacity = capacity
		return p.Quotas.setQuota(v)
	})
}

// setQuota limits a volume's directory to its capacity. It is durable when it returns.
// ErrPrecondition if the filesystem does not limit directories any more, or not this
// one: its ID may be another's by now.
func (q *Quotas) setQuota(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return q.withQuota(func(fs *quota.FS) error {
		err := checkKind(fs, v)
		if err == nil {
			err = q.checkID(fs, v)
		}
		if err != nil {
			return volume.Errorf(volume.ErrPrecondition, "volume %s: %w", v.ID, err)
		}
		return fs.Set(v.Directory.Quota.ID, q.limitOf(v, fs.Kind()))
	})
}

// checkKind refuses a filesystem that does not limit as it did when the volume was made.
func checkKind(fs *quota.FS, v volume.Volume) error {
	if err := inForce(fs); err != nil {
		return fmt.Errorf("%w: %w", ErrQuotaOff, err)
	}
	if want := v.Directory.Quota.Kind; string(fs.Kind()) != want {
		return fmt.Errorf("%w: its limit is a %s, the filesystem has %s now: copy the data to a new volume", ErrQuotaOff, want, fs.Kind())
	}
	return nil
}

// Relimit sets the limits of volumes anew of which snapshots or copies came or went, or
// that somebody changed. What is no volume of this pool any more has none.
func (q *Quotas) Relimit(volumes ...volume.ID) error {
	q.limiting.Lock()
	defer q.limiting.Unlock()
	return q.relimit(volumes)
}

func (q *Quotas) relimit(volumes []volume.ID) error {
	for _, id := range volumes {
		v, err := q.Lookup(id.Name)
		if err != nil || v.ID != id || v.Directory == nil {
			continue
		}
		if err := q.check(v); errors.Is(err, ErrQuotaChanged) {
			if err := q.setQuota(v); err != nil {
				return err
			}
		}
	}
	return nil
}

// limitCopy limits a copy to its capacity, now that it is complete.
func (q *Quotas) limitCopy(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return q.withQuota(func(fs *quota.FS) error {
		limit := q.limitOf(v, fs.Kind())
		u, err := fs.Usage(v.Directory.Quota.ID)
		if err != nil {
			return err
		}
		if u.Bytes > limit.Bytes {
			return volume.Errorf(volume.ErrOutOfRange, "capacity_range: the volume is to have %d bytes, what is copied into it takes %d: ask for as much", v.Capacity, u.Bytes)
		}
		return fs.Set(v.Directory.Quota.ID, limit)
	})
}

// Check makes sure that a volume is kept to its capacity as it was when it was
// made: ErrQuotaOff, ErrQuotaChanged, ErrQuotaLost. One that never was is as it was.
func (q *Quotas) Check(v volume.Volume) error {
	q.limiting.RLock()
	defer q.limiting.RUnlock()
	return q.check(v)
}

func (q *Quotas) check(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return q.withQuota(func(fs *quota.FS) error {
		if err := checkKind(fs, v); err != nil {
			return err
		}
		if err := q.checkID(fs, v); err != nil {
			return err
		}
		u, err := fs.Usage(v.Directory.Quota.ID)
		if err != nil {
			return err
		}
		want := q.limitOf(v, fs.Kind())
		if u.Limit.Inodes == 0 { // btrfs limits none
			want.Inodes = 0
		}
		if u.Limit != want {
			return fmt.Errorf("%w: the limit is %d bytes, the volume has %d: it is put back when the volume is staged anew or grows", ErrQuotaChanged, u.Limit.Bytes, want.Bytes)
		}
		return nil
	})
}

// checkID makes sure that a volume's directory still counts on its ID: whoever owns it
// may have changed that.
func (q *Quotas) checkID(fs *quota.FS, v volume.Volume) error {
	dir, err := beneath.OpenDir(q.dir, DirectoryPath(v))
	if err != nil {
		return nil // that it is missing is another condition
	}
	defer dir.Close()
	has, err := fs.Has(dir, v.Directory.Quota.ID)
	if err == nil && !has {
		err = fmt.Errorf("%w: the directory does not count on ID %d, which limits it: it was copied, or somebody in the volume has changed that; copy the data to a new volume", ErrQuotaLost, v.Directory.Quota.ID)
	}
	return err
}

// Usage is what a limited volume uses; ok is false for one that is not limited, or
// not now.
func (q *Quotas) Usage(v volume.Volume) (u quota.Usage, ok bool, err error) {
	if v.Directory == nil || v.Directory.Quota == nil {
		return u, false, nil
	}
	err = q.withQuota(func(fs *quota.FS) error {
		if ok = checkKind(fs, v) == nil; ok {
			u, err = fs.Usage(v.Directory.Quota.ID)
		}
		return err
	})
	return u, ok && err == nil, err
}

// Has tells whether the directory of a volume whose record cannot be read is
// limited, if it is in the volume's folder.
func (q *Quotas) Has(name string) bool {
	var id uint64
	dir, err := beneath.OpenDir(q.volumes, name+"/"+DataDir)
	if err != nil {
		return false
	}
	defer dir.Close()
	err = q.withQuota(func(fs *quota.FS) (err error) {
		id, err = fs.ID(dir)
		return err
	})
	return err == nil && id != 0
}

// quotaFile has the ID of a directory that is being removed, where no record has it.
const quotaFile = "quota"
