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
	// QuotaAuto limits directories if the filesystem supports it. It is the default.
	QuotaAuto = "auto"
	// QuotaRequired refuses to make a directory that cannot be limited.
	QuotaRequired = "required"
	// QuotaOff limits no directories.
	QuotaOff = "off"
)

const (
	// inodeBytes is the number of bytes of its capacity for which a volume may have one inode, like
	// the bytes-per-inode of mke2fs(8).
	inodeBytes = 16 << 10
	// minInodes is the smallest limit of inodes.
	minInodes = 1024
	// allocateTries is the number of attempts to make a directory with a quota ID.
	allocateTries = 3
)

// The errors of Quotas.Check.
var (
	// ErrQuotaOff means that the filesystem does not enforce the volume's limit now.
	ErrQuotaOff = errors.New("quota not in force")
	// ErrQuotaChanged means that the limit is not the one that the driver has set.
	ErrQuotaChanged = errors.New("quota changed")
	// ErrQuotaLost means that the directory no longer has its quota ID: it was copied, or a user of
	// the volume has changed the ID.
	ErrQuotaLost = errors.New("quota lost")
)

// Quotas limits the directories of a pool.
type Quotas struct {
	*store
	// limiting is locked by calls that change limits or the reservations on which limits depend, and
	// read-locked by Check, which compares the two.
	limiting sync.RWMutex
}

// limitOf is the limit of a directory. On btrfs, data that only snapshots and copies still contain
// counts as usage of the volume that wrote it, so the limit is raised by the size of such data.
func (q *Quotas) limitOf(v volume.Volume, kind quota.Kind) quota.Limit {
	l := quota.Limit{Bytes: v.Capacity, Inodes: max(minInodes, v.Capacity/inodeBytes)}
	if kind == quota.Btrfs {
		l.Bytes += q.ledger.SharedOf(v.ID)
	}
	return l
}

// withQuota calls f with the quota of the pool's filesystem. It opens the quota each time, because a
// remount may have switched quota on or off.
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

// Enforces returns the kind of quota that limits directories of the pool. It returns ErrPrecondition,
// with the remedy, if directories are not limited.
func (q *Quotas) Enforces() (kind quota.Kind, err error) {
	if q.cfg.Quota == QuotaOff {
		return quota.None, volume.Errorf(volume.ErrPrecondition, "pool %q has quota: %s", q.cfg.Name, QuotaOff)
	}
	err = q.withQuota(func(fs *quota.FS) error {
		kind = fs.Kind()
		if err := checkInForce(fs); err != nil {
			return volume.Errorf(volume.ErrPrecondition, "pool %q, at %s: %w", q.cfg.Name, q.cfg.place(), err)
		}
		return nil
	})
	return kind, err
}

// checkInForce returns nil if directories are limited now, and otherwise the reason why not.
func checkInForce(fs *quota.FS) error {
	if fs.Kind() == quota.None {
		return errors.New(fs.Why())
	}
	return fs.Check()
}

// Limits tells whether a new directory of the pool is limited to its size. ErrPrecondition if it
// cannot be limited although the configuration requires it.
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

// makeData makes a volume's directory in its folder in tmp, as a copy of content unless content is
// nil. If limits is set, it limits the directory, and sets v.Directory.Quota.
func (q *Quotas) makeData(folder *os.Root, v volume.Volume, content *Content, limits bool) (*os.File, error) {
	parent, err := folder.Open(".")
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if !limits { // on btrfs the directory is a subvolume nevertheless, so that snapshots can be made
		if err := q.withQuota(func(fs *quota.FS) error { return content.makeDir(fs, parent) }); err != nil {
			return nil, err
		}
		return beneath.OpenDir(parent, DataDir)
	}
	var data *os.File
	err = q.withQuota(func(fs *quota.FS) error {
		data, err = q.makeLimited(fs, parent, v, content)
		return err
	})
	crashpoint.Here(crashpoint.CreateLimited)
	return data, err
}

// makeLimited makes a directory with a limit. Until limitCopy, a copy has twice its limit of bytes,
// because XFS clones a block only if the quota has room for a copy of the block, and one inode
// more, for a temporary directory of clone.Tree.
func (q *Quotas) makeLimited(fs *quota.FS, parent *os.File, v volume.Volume, content *Content) (data *os.File, err error) {
	for range allocateTries {
		if err = content.makeDir(fs, parent); err != nil {
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
		id, allocateErr := fs.Allocate(data, limit, q.ledger.HasQuota)
		if allocateErr == nil {
			v.Directory.Quota = &volume.Quota{Kind: string(fs.Kind()), ID: id}
			return data, nil
		}
		done, removeErr := fs.RemoveDir(parent, DataDir)
		if !done {
			removeErr = errors.Join(removeErr, unix.Unlinkat(int(parent.Fd()), DataDir, unix.AT_REMOVEDIR))
		}
		err = errors.Join(allocateErr, data.Close(), removeErr)
	}
	return nil, fmt.Errorf("pool %q: limiting the directory: %w", q.cfg.Name, err)
}

// GrowDirectory is Grow for a directory volume. It raises the limit of the directory.
func (p *Pool) GrowDirectory(ctx context.Context, v volume.Volume, capacity int64) error {
	unlock := func() {}
	defer func() { unlock() }()
	return p.Grow(ctx, v, capacity, func() error {
		p.Quotas.limiting.Lock() // until the capacity is recorded: relimit reads the record
		unlock = p.Quotas.limiting.Unlock
		v.Capacity = capacity
		return p.Quotas.setQuota(v)
	})
}

// setQuota sets the limit of a volume's directory durably. ErrPrecondition if the filesystem no
// longer limits directories, or if the directory no longer has its quota ID, which another volume may
// have now.
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

// checkKind refuses a filesystem that does not have the kind of quota that the volume was made
// with.
func checkKind(fs *quota.FS, v volume.Volume) error {
	if err := checkInForce(fs); err != nil {
		return fmt.Errorf("%w: %w", ErrQuotaOff, err)
	}
	if kind := v.Directory.Quota.Kind; string(fs.Kind()) != kind {
		return fmt.Errorf("%w: its limit is a %s, the filesystem has %s now: copy the data to a new volume", ErrQuotaOff, kind, fs.Kind())
	}
	return nil
}

// Relimit sets the limits of volumes again, after their snapshots or copies were made or
// removed, or a limit was changed. It skips volumes that are not in this pool.
func (q *Quotas) Relimit(volumes ...volume.ID) error {
	q.limiting.Lock()
	defer q.limiting.Unlock()
	return q.relimit(volumes)
}

// relimit is Relimit for a caller that holds q.limiting.
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

// limitCopy sets the limit of a complete copy. ErrOutOfRange if the usage of the copy exceeds the
// limit. It does nothing for a directory without a limit.
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
			return volume.Errorf(volume.ErrOutOfRange, "capacity_range: the volume would have %s, and its content takes %s: request at least as much", volume.ExactSize(v.Capacity), volume.ExactSize(u.Bytes))
		}
		return fs.Set(v.Directory.Quota.ID, limit)
	})
}

// Check verifies the limit of a volume: ErrQuotaOff, ErrQuotaChanged or ErrQuotaLost. A volume
// that was made without a limit passes.
func (q *Quotas) Check(v volume.Volume) error {
	q.limiting.RLock()
	defer q.limiting.RUnlock()
	return q.check(v)
}

// check is Check for a caller that holds q.limiting.
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
		limit := q.limitOf(v, fs.Kind())
		if u.Limit.Inodes == 0 { // btrfs does not limit inodes
			limit.Inodes = 0
		}
		if u.Limit != limit {
			return fmt.Errorf("%w: the limit is %s, but it should be %s: staging or growing the volume restores the limit", ErrQuotaChanged, volume.ExactSize(u.Limit.Bytes), volume.ExactSize(limit.Bytes))
		}
		return nil
	})
}

// checkID verifies that a volume's directory has its quota ID, which the directory's owner can
// change.
func (q *Quotas) checkID(fs *quota.FS, v volume.Volume) error {
	dir, err := beneath.OpenDir(q.dir, DirectoryPath(v))
	if err != nil {
		return nil // another check reports that the directory is missing
	}
	defer dir.Close()
	has, err := fs.Has(dir, v.Directory.Quota.ID)
	if err == nil && !has {
		err = fmt.Errorf("%w: the directory does not have quota ID %d: it was copied, or a user of the volume has changed the ID; copy the data to a new volume", ErrQuotaLost, v.Directory.Quota.ID)
	}
	return err
}

// Usage is the usage of a limited volume; ok is false if the volume has no limit, or
// the filesystem does not enforce it now.
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

// Has tells whether the data directory in a volume's folder has a quota ID. It does not need the
// record.
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

// quotaFile is a file in an entry of the trash that has no record. It contains the quota ID of the
// entry's directory.
const quotaFile = "quota"
