package quota

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Project IDs are chosen from where neither people nor /etc/projid have theirs.
const (
	minProject = 1 << 24
	maxProject = 1<<31 - 1
)

// projects limits directories by project quota. ext4 answers the commands of XFS
// (fs/quota/quota.c in the kernel), so both are asked the same.
type projects struct {
	kind Kind
	dir  *os.File
	// choosing is held from choosing an ID until it has its limit.
	choosing *sync.Mutex
	pick     func() uint32
}

// locks has a lock for each filesystem, by its st_dev.
var locks sync.Map

func newProjects(kind Kind, dir *os.File) (*projects, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	mu, _ := locks.LoadOrStore(st.Dev, new(sync.Mutex))
	return &projects{kind: kind, dir: dir, choosing: mu.(*sync.Mutex), pick: pickProject}, nil
}

func pickProject() uint32 { return minProject + rand.Uint32N(maxProject-minProject) }

func (p *projects) check() error {
	s := quotaState{version: statVer1}
	err := quotactl(p.dir, qXGetStatV, 0, unsafe.Pointer(&s))
	switch {
	case errors.Is(err, unix.ENOSYS) && !hasQuotactl():
		return errors.New("the kernel has no quotactl_fd(2): run Linux 5.14 or newer with CONFIG_QUOTA")
	case err != nil && !errors.Is(err, unix.ENOSYS): // ENOSYS: all is off
		return os.NewSyscallError("quotactl_fd Q_XGETQSTATV", err)
	case s.flags&accounted == 0:
		return p.errOff()
	case s.flags&enforced == 0:
		return p.errNotEnforced()
	}
	return nil
}

func (p *projects) errOff() error {
	if p.kind == XFS {
		return errors.New("this XFS has project quota switched off: unmount it and mount it with the option prjquota (a root filesystem: boot with rootflags=prjquota); if it has that option already, the kernel could not read its quotas: unmount it and run xfs_repair on its device")
	}
	return errors.New("this ext4 has no project quota: unmount it, run tune2fs -O project,quota -Q prjquota on its device, and mount it with the option prjquota")
}

func (p *projects) errNotEnforced() error {
	if p.kind == XFS {
		return errors.New("this XFS counts what projects use, and holds them to nothing: run xfs_quota -x -c 'enable -p' on it, and mount it with the option prjquota, not pqnoenforce")
	}
	return errors.New("this ext4 counts what projects use, and holds them to nothing: mount it with the option prjquota")
}

// allocate gives a directory a project ID that nobody uses. Whoever else chose the same
// at the same moment, in another process, is seen once both directories carry it:
// before any limit is set both give it up.
func (p *projects) allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error) {
	id, err := p.take(dir, l, taken)
	if err != nil {
		return 0, err
	}
	if err := settle(dir); err != nil {
		return 0, errors.Join(err, p.limit(id, Limit{}))
	}
	return uint64(id), nil
}

func (p *projects) take(dir *os.File, l Limit, taken func(id uint64) bool) (uint32, error) {
	p.choosing.Lock()
	defer p.choosing.Unlock()
	id, err := p.choose(dir, taken)
	if err == nil {
		err = p.limit(id, l)
	}
	return id, err
}

func (p *projects) choose(dir *os.File, taken func(id uint64) bool) (uint32, error) {
	const tries = 1000
	for range tries {
		id := p.pick()
		if taken(uint64(id)) {
			continue
		}
		alone, err := p.tryID(dir, id)
		if alone || err != nil {
			return id, err
		}
	}
	return 0, fmt.Errorf("no free project ID in %d tries between %d and %d", tries, minProject, maxProject)
}

// tryID tells whether the directory is now all that has the ID.
func (p *projects) tryID(dir *os.File, id uint32) (alone bool, err error) {
	before, err := p.get(id)
	if err != nil || !before.unused() {
		return false, err
	}
	if err := setProject(dir, id); err != nil {
		return false, err
	}
	now, err := p.get(id)
	return err == nil && now.inodes == 1 && !now.limited(), err
}

func setProject(dir *os.File, id uint32) error {
	return changeXattr(dir, func(x *fsXattr) {
		x.project = id
		x.flags |= flagInherit
	})
}

func (q diskQuota) limited() bool {
	return q.blockHard|q.blockSoft|q.inodeHard|q.inodeSoft != 0
}

func (q diskQuota) unused() bool { return q.blocks|q.inodes == 0 && !q.limited() }

// get reads what the kernel has of an ID: all zero if it has none.
func (p *projects) get(id uint32) (q diskQuota, err error) {
	err = quotactl(p.dir, qXGetQuota, id, unsafe.Pointer(&q))
	if errors.Is(err, unix.ENOENT) {
		return diskQuota{}, nil
	}
	return q, p.explain(os.NewSyscallError("quotactl_fd Q_XGETQUOTA", err))
}

// explain tells what to do about quotas that cannot be read.
func (p *projects) explain(err error) error {
	if !errors.Is(err, unix.EUCLEAN) && !errors.Is(err, unix.EIO) {
		return err
	}
	check := "e2fsck -f"
	if p.kind == XFS {
		check = "xfs_repair"
	}
	return fmt.Errorf("%w: %w: unmount the filesystem and run %s on its device", ErrDamaged, err, check)
}

// limit sets the limits of an ID; zero is none.
func (p *projects) limit(id uint32, l Limit) error {
	q := diskQuota{
		version: dquotVer, flags: projQuota, fields: allLimits, id: id,
		blockHard: basicBlocks(l.Bytes), inodeHard: uint64(l.Inodes),
	}
	return p.explain(os.NewSyscallError("quotactl_fd Q_XSETQLIM", quotactl(p.dir, qXSetQLim, id, unsafe.Pointer(&q))))
}

// basicBlocks rounds up to the blocks of 1 KiB that ext4 keeps limits in. XFS rounds
// up to its own.
func basicBlocks(bytes int64) uint64 {
	const block = 1024
	return (uint64(bytes) + block - 1) / block * (block / basicBlock)
}

func (p *projects) set(id uint64, l Limit) error {
	project, err := project(id)
	if err != nil {
		return err
	}
	if err := p.limit(project, l); err != nil {
		return err
	}
	return settle(p.dir)
}

func ours(id uint64) bool { return id >= minProject && id <= maxProject }

// project refuses IDs that allocate does not choose; 0 would be the limits of all.
func project(id uint64) (uint32, error) {
	if !ours(id) {
		return 0, fmt.Errorf("project ID %d is not between %d and %d, where this driver has its own", id, minProject, maxProject)
	}
	return uint32(id), nil
}

// settle makes durable what was changed on the filesystem before. A limit has no file
// that fsync(2) could be asked for; but the journals of XFS and ext4 are in order, so a
// change of a directory that comes later takes it along.
func settle(dir *os.File) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}
	if err := unix.UtimesNanoAt(int(dir.Fd()), ".", times, 0); err != nil {
		return &os.PathError{Op: "utimensat", Path: dir.Name(), Err: err}
	}
	return dir.Sync()
}

func (p *projects) usage(id uint64) (Usage, error) {
	project, err := project(id)
	if err != nil {
		return Usage{}, err
	}
	q, err := p.get(project)
	return Usage{
		Bytes: int64(q.blocks) * basicBlock, Inodes: int64(q.inodes),
		Limit: Limit{Bytes: int64(q.blockHard) * basicBlock, Inodes: int64(q.inodeHard)},
	}, err
}

// id leaves out what others chose: a directory inherits it where the pool is in a
// project of its own.
func (p *projects) id(dir *os.File) (uint64, error) {
	var x fsXattr
	if err := ioctl(dir, fsIocGetXattr, unsafe.Pointer(&x)); err != nil {
		return 0, os.NewSyscallError("FS_IOC_FSGETXATTR", err)
	}
	if id := uint64(x.project); ours(id) {
		return id, nil
	}
	return 0, nil
}

// release needs no settling: an ID whose limit came back after a crash is not chosen
// again.
func (p *projects) release(id uint64) error {
	project, err := project(id)
	if err != nil {
		return err
	}
	q, err := p.get(project)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ESRCH) { // quota was switched off
		return nil
	}
	if err != nil {
		return err
	}
	if q.blocks|q.inodes != 0 {
		return ErrBusy
	}
	if !q.limited() {
		return nil
	}
	return p.limit(project, Limit{})
}
