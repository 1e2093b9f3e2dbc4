package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/quota"
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

// limitOf is what a directory is limited to. btrfs counts what only snapshots and copies
// have any more with the volume that wrote it, which shall not have less because of that.
func (p *Pool) limitOf(v volume.Volume, kind quota.Kind) quota.Limit {
	l := quota.Limit{Bytes: v.Capacity, Inodes: max(minInodes, v.Capacity/inodeBytes)}
	if kind == quota.Btrfs {
		l.Bytes += p.ledger.keptOf(v.ID)
	}
	return l
}

// withQuota runs f with the filesystem of the pool. It is looked at each time: a
// remount may have changed what it can.
func (p *Pool) withQuota(f func(fs *quota.FS) error) error {
	fs, err := quota.Open(p.dir)
	if err != nil {
		return fmt.Errorf("pool %q: quota: %w", p.cfg.Name, err)
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
func (p *Pool) Enforces() (kind quota.Kind, err error) {
	if p.Shared() || p.cfg.Quota == QuotaOff {
		return quota.None, volume.Errorf(volume.ErrPrecondition, "pool %q has quota: %s", p.cfg.Name, QuotaOff)
	}
	err = p.withQuota(func(fs *quota.FS) error {
		kind = fs.Kind()
		if err := inForce(fs); err != nil {
			return volume.Errorf(volume.ErrPrecondition, "pool %q, at %s: %w", p.cfg.Name, p.cfg.place(), err)
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
func (p *Pool) Limits() (bool, error) {
	_, err := p.Enforces()
	if p.cfg.Quota != QuotaRequired && errors.Is(err, volume.ErrPrecondition) {
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
func (p *Pool) makeData(folder *os.Root, v volume.Volume, content *Content) (*os.File, error) {
	parent, err := folder.Open(".")
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	limits := false
	if !p.Shared() {
		if limits, err = p.Limits(); err != nil {
			return nil, err
		}
	}
	if !limits {
		return p.makePlain(parent, content)
	}
	var data *os.File
	err = p.withQuota(func(fs *quota.FS) error {
		data, err = p.makeLimited(fs, parent, v, content)
		return err
	})
	crashpoint.Here(crashpoint.CreateLimited)
	return data, err
}

// makePlain makes a directory without a limit. On btrfs it is a subvolume too, for the
// sake of its snapshots.
func (p *Pool) makePlain(parent *os.File, content *Content) (data *os.File, err error) {
	if p.Shared() {
		err = unix.Mkdirat(int(parent.Fd()), DataDir, 0o700)
	} else {
		err = p.withQuota(func(fs *quota.FS) error { return content.make(fs, parent) })
	}
	if err != nil {
		return nil, err
	}
	return openDirBeneath(parent, DataDir)
}

// makeLimited limits a copy to twice its size, until limitCopy: xfs shares a block only
// where there is room to copy it, which a full one has not. clone.Tree needs one directory
// more.
func (p *Pool) makeLimited(fs *quota.FS, parent *os.File, v volume.Volume, content *Content) (data *os.File, err error) {
	for range allocateTries {
		if err = content.make(fs, parent); err != nil {
			return nil, err
		}
		if data, err = openDirBeneath(parent, DataDir); err != nil {
			return nil, err
		}
		limit := p.limitOf(v, fs.Kind())
		if content != nil {
			limit.Bytes *= 2
			limit.Inodes++
		}
		id, failed := fs.Allocate(data, limit, p.ledger.hasQuota)
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
	return nil, fmt.Errorf("pool %q: limiting the directory: %w", p.cfg.Name, err)
}

// hasQuota tells whether a volume has an ID, also one in the trash.
func (l *ledger) hasQuota(id uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.stakes {
		if s.quota.ID == id {
			return true
		}
	}
	return false
}

// GrowDirectory is Grow for a directory, whose limit is raised.
func (p *Pool) GrowDirectory(ctx context.Context, v volume.Volume, capacity int64) error {
	recorded := func() {}
	defer func() { recorded() }()
	return p.Grow(ctx, v, capacity, func() error {
		p.limiting.Lock() // relimit goes by the record
		recorded = p.limiting.Unlock
		v.Capacity = capacity
		return p.setQuota(v)
	})
}

// setQuota limits a volume's directory to its capacity. It is durable when it returns.
// ErrPrecondition if the filesystem does not limit directories any more, or not this
// one: its ID may be another's by now.
func (p *Pool) setQuota(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return p.withQuota(func(fs *quota.FS) error {
		err := checkKind(fs, v)
		if err == nil {
			err = p.checkID(fs, v)
		}
		if err != nil {
			return volume.Errorf(volume.ErrPrecondition, "volume %s: %w", v.ID, err)
		}
		return fs.Set(v.Directory.Quota.ID, p.limitOf(v, fs.Kind()))
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
func (p *Pool) Relimit(volumes ...volume.ID) error {
	p.limiting.Lock()
	defer p.limiting.Unlock()
	return p.relimit(volumes)
}

func (p *Pool) relimit(volumes []volume.ID) error {
	if p.Shared() { // nothing is limited there
		return nil
	}
	for _, id := range volumes {
		v, err := p.Lookup(id.Name)
		if err != nil || v.ID != id || v.Directory == nil {
			continue
		}
		if err := p.checkQuota(v); errors.Is(err, ErrQuotaChanged) {
			if err := p.setQuota(v); err != nil {
				return err
			}
		}
	}
	return nil
}

// limitCopy limits a copy to its capacity, now that it is complete.
func (p *Pool) limitCopy(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return p.withQuota(func(fs *quota.FS) error {
		limit := p.limitOf(v, fs.Kind())
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

// CheckQuota makes sure that a volume is kept to its capacity as it was when it was
// made: ErrQuotaOff, ErrQuotaChanged, ErrQuotaLost. One that never was is as it was.
func (p *Pool) CheckQuota(v volume.Volume) error {
	p.limiting.RLock()
	defer p.limiting.RUnlock()
	return p.checkQuota(v)
}

func (p *Pool) checkQuota(v volume.Volume) error {
	if v.Directory.Quota == nil {
		return nil
	}
	return p.withQuota(func(fs *quota.FS) error {
		if err := checkKind(fs, v); err != nil {
			return err
		}
		if err := p.checkID(fs, v); err != nil {
			return err
		}
		u, err := fs.Usage(v.Directory.Quota.ID)
		if err != nil {
			return err
		}
		want := p.limitOf(v, fs.Kind())
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
func (p *Pool) checkID(fs *quota.FS, v volume.Volume) error {
	dir, err := openDirBeneath(p.dir, DirectoryPath(v))
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

// QuotaUsage is what a limited volume uses; ok is false for one that is not limited, or
// not now.
func (p *Pool) QuotaUsage(v volume.Volume) (u quota.Usage, ok bool, err error) {
	if v.Directory == nil || v.Directory.Quota == nil {
		return u, false, nil
	}
	err = p.withQuota(func(fs *quota.FS) error {
		if ok = checkKind(fs, v) == nil; ok {
			u, err = fs.Usage(v.Directory.Quota.ID)
		}
		return err
	})
	return u, ok && err == nil, err
}

// HasQuota tells whether the directory of a volume whose record cannot be read is
// limited, if it is in the volume's folder.
func (p *Pool) HasQuota(name string) bool {
	var id uint64
	dir, err := openDirBeneath(p.volumes, name+"/"+DataDir)
	if err != nil {
		return false
	}
	defer dir.Close()
	err = p.withQuota(func(fs *quota.FS) (err error) {
		id, err = fs.ID(dir)
		return err
	})
	return err == nil && id != 0
}

// removeLimited removes all but the records from a folder of the trash, directories as
// their filesystem does that best, and gives the volume's limit back when all of it is
// gone: until then it is quota.ErrBusy.
func (p *Pool) removeLimited(ctx context.Context, folder *os.File) error {
	return p.withQuota(func(fs *quota.FS) error {
		id, stays := p.quotaIn(fs, folder)
		if err := p.removeContent(ctx, fs, folder); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.ReapRemoved)
		if id == 0 || fs.Kind() == quota.None {
			return nil
		}
		err := fs.Release(id)
		if errors.Is(err, quota.ErrBusy) {
			if stays {
				return nil
			}
			p.shrinkStake(fs, folder, id)
		}
		return err
	})
}

func (p *Pool) removeContent(ctx context.Context, fs *quota.FS, folder *os.File) error {
	names, err := namesIn(folder, ".")
	if err != nil {
		return orGone(err)
	}
	var failed error
	for _, name := range names {
		if name != recordFile && name != snapshotFile && name != quotaFile {
			failed = errors.Join(failed, orGone(p.removeOne(ctx, fs, folder, name)))
		}
	}
	return failed
}

func (p *Pool) removeOne(ctx context.Context, fs *quota.FS, folder *os.File, name string) error {
	st, err := statBeneath(folder, name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if done, err := fs.RemoveDir(folder, name); done || err != nil {
			return err
		}
	}
	return p.removeFolder(ctx, folder, name)
}

// quotaIn is the ID of the volume in a folder of the trash; 0 for none. stays: what
// counts on it is kept, and so is its limit.
func (p *Pool) quotaIn(fs *quota.FS, folder *os.File) (id uint64, stays bool) {
	data, err := openDirBeneath(folder, DataDir)
	if err == nil {
		defer data.Close()
	}
	v, unread := p.recordIn(folder)
	if unread == nil && v.Directory != nil && v.Directory.Quota != nil {
		id = v.Directory.Quota.ID
		if v.Directory.Quota.Kind != string(fs.Kind()) { // a copy from another filesystem, or limits are off
			return 0, false
		}
		if err == nil {
			if has, err := fs.Has(data, id); err == nil && !has { // a copy, whose ID may be another's
				return 0, false
			}
		}
		return id, hasSubDir(v) && v.Directory.OnDelete == volume.OnDeleteRetain
	}
	// A call was killed before it wrote the record.
	if b, err := p.readBeneath(folder, quotaFile); err == nil {
		id, _ = strconv.ParseUint(string(b), 10, 64)
		return id, false
	}
	if err != nil {
		return 0, false
	}
	if id, err = fs.ID(data); err != nil || id == 0 {
		return 0, false
	}
	p.noteQuota(folder, id)
	return id, false
}

// quotaFile has the ID of a directory that is being removed, where no record has it.
const quotaFile = "quota"

// noteQuota keeps an ID for when the directory that has it is gone. Without it nothing
// is lost but an ID.
func (p *Pool) noteQuota(folder *os.File, id uint64) {
	f, err := p.openRegular(folder, quotaFile, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if _, err := f.WriteString(strconv.FormatUint(id, 10)); err == nil {
		_ = f.Sync()
	}
}

func (p *Pool) recordIn(folder *os.File) (volume.Volume, error) {
	b, err := p.readBeneath(folder, recordFile)
	if err != nil {
		return volume.Volume{}, err
	}
	return volume.ParseRecord(b)
}

// shrinkStake lets an entry of the trash promise no more than what is left of it.
func (p *Pool) shrinkStake(fs *quota.FS, folder *os.File, id uint64) {
	u, err := fs.Usage(id)
	if err != nil {
		return
	}
	dir := trashDir + folder.Name()[strings.LastIndex(folder.Name(), "/"):]
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if s, ok := p.ledger.stakes[dir]; ok {
		s.bytes = min(s.bytes, u.Bytes)
		p.ledger.set(dir, s)
	}
}

// hasDirectory tells whether an entry of tmp has a directory that may be limited, or had
// one that was placed among others'.
func (p *Pool) hasDirectory(entry string) bool {
	if _, err := statBeneath(p.tmp, entry+"/"+DataDir); err == nil {
		return true
	}
	_, err := statBeneath(p.tmp, entry+"/"+placingFile)
	return err == nil
}
