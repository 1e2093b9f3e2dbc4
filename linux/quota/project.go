package quota

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// The range of project IDs. It is above the IDs that administrators use and /etc/projid contains.
const (
	minProject = 1 << 24
	maxProject = 1<<31 - 1
)

// projects limits directories by project quota. ext4 supports the commands of XFS (fs/quota/quota.c in
// the kernel), so both use the same calls.
type projects struct {
	kind Kind
	dir  *os.File
	// choosing is locked while an ID is chosen and until the limit of the ID is set.
	choosing *sync.Mutex
	pick     func() uint32 // returns a random ID
}

// locks maps the st_dev of each filesystem to the lock projects.choosing.
var locks sync.Map

// newProjects returns the projects of the filesystem that contains dir.
func newProjects(kind Kind, dir *os.File) (*projects, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	mu, _ := locks.LoadOrStore(st.Dev, new(sync.Mutex))
	pick := func() uint32 { return minProject + rand.Uint32N(maxProject-minProject) }
	return &projects{kind: kind, dir: dir, choosing: mu.(*sync.Mutex), pick: pick}, nil
}

func (p *projects) check() error {
	flags, err := sys.ProjectQuotaState(p.dir)
	switch {
	case errors.Is(err, unix.ENOSYS) && !sys.HasQuotactl():
		return errors.New("the kernel has no quotactl_fd(2): run Linux 5.14 or newer with CONFIG_QUOTA")
	case err != nil && !errors.Is(err, unix.ENOSYS): // ENOSYS: all quotas are off
		return err
	case flags&sys.ProjectQuotaCounted == 0:
		return p.errOff()
	case flags&sys.ProjectQuotaEnforced == 0:
		return p.errNotEnforced()
	}
	return nil
}

func (p *projects) errOff() error {
	if p.kind == XFS {
		return errors.New("this XFS has project quota switched off: unmount it and mount it with the option prjquota (if it is the root filesystem, boot with rootflags=prjquota); if it is already mounted with that option, the kernel could not read its quotas: unmount it and run xfs_repair on its device")
	}
	return errors.New("this ext4 has no project quota: unmount it, run tune2fs -O project,quota -Q prjquota on its device, and mount it with the option prjquota")
}

func (p *projects) errNotEnforced() error {
	if p.kind == XFS {
		return errors.New("this XFS counts what projects use, but enforces no limit: run xfs_quota -x -c 'enable -p' on it, and mount it with the option prjquota, not pqnoenforce")
	}
	return errors.New("this ext4 counts what projects use, but enforces no limit: mount it with the option prjquota")
}

// allocate gives a directory an unused project ID. If two processes choose the same ID at the same time, each
// finds that another directory has the ID, too, and chooses another ID before it sets a limit.
func (p *projects) allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error) {
	id, err := p.chooseLimited(dir, l, taken)
	if err != nil {
		return 0, err
	}
	if err := syncQuota(dir); err != nil {
		return 0, errors.Join(err, p.limit(id, Limit{}))
	}
	return uint64(id), nil
}

// chooseLimited gives a directory an unused ID, and sets the limit of the ID.
func (p *projects) chooseLimited(dir *os.File, l Limit, taken func(id uint64) bool) (uint32, error) {
	p.choosing.Lock()
	defer p.choosing.Unlock()
	id, err := p.choose(dir, taken)
	if err == nil {
		err = p.limit(id, l)
	}
	return id, err
}

// choose gives a directory an unused ID, which has no limit yet.
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
	return 0, fmt.Errorf("found no free project ID between %d and %d in %d tries: remove unused projects", minProject, maxProject, tries)
}

// tryID gives a directory an ID if the ID is unused. alone means that the directory has the ID, and no other
// file has it.
func (p *projects) tryID(dir *os.File, id uint32) (alone bool, err error) {
	before, err := p.get(id)
	if err != nil || before.Blocks|before.Inodes != 0 || hasLimit(before) {
		return false, err
	}
	if err := setProject(dir, id); err != nil {
		return false, err
	}
	now, err := p.get(id)
	return err == nil && now.Inodes == 1 && !hasLimit(now), err
}

// setProject gives a directory a project ID, which new files in the directory inherit.
func setProject(dir *os.File, id uint32) error {
	_, err := sys.ChangeAttributes(dir, func(a *sys.Attributes) {
		a.Project = id
		a.Flags |= sys.AttrProjectInherit
	})
	return err
}

// hasLimit reports whether a project has a hard or soft limit.
func hasLimit(q sys.ProjectQuota) bool {
	return q.BlockHard|q.BlockSoft|q.InodeHard|q.InodeSoft != 0
}

// get reads the usage and the limits of an ID. They are zero if the filesystem has no record of the ID.
func (p *projects) get(id uint32) (sys.ProjectQuota, error) {
	q, err := sys.GetProjectQuota(p.dir, id)
	if errors.Is(err, unix.ENOENT) {
		return sys.ProjectQuota{}, nil
	}
	return q, p.explain(err)
}

// explain adds ErrDamaged and the remedy to an error that means that quotas cannot be read.
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

// limit sets the limits of an ID. Zero means no limit.
func (p *projects) limit(id uint32, l Limit) error {
	return p.explain(sys.SetProjectLimits(p.dir, id, quotaBlocks(l.Bytes), uint64(l.Inodes)))
}

// quotaBlocks converts bytes to the unit sys.QuotaBlock. It rounds up to 1 KiB, the unit in which ext4 stores limits.
// XFS rounds up to its own blocks.
func quotaBlocks(bytes int64) uint64 {
	const block = 1024
	return (uint64(bytes) + block - 1) / block * (block / sys.QuotaBlock)
}

func (p *projects) set(id uint64, l Limit) error {
	project, err := project(id)
	if err != nil {
		return err
	}
	if err := p.limit(project, l); err != nil {
		return err
	}
	return syncQuota(p.dir)
}

// inRange reports whether an ID can be a result of allocate.
func inRange(id uint64) bool { return id >= minProject && id <= maxProject }

// project converts an ID. It rejects IDs that allocate does not choose, because setting the limits of ID 0
// would set the default limits.
func project(id uint64) (uint32, error) {
	if !inRange(id) {
		return 0, fmt.Errorf("project ID %d is not between %d and %d, the range that this driver uses", id, minProject, maxProject)
	}
	return uint32(id), nil
}

// syncQuota makes earlier changes of quotas durable. fsync(2) needs a file, and no file represents a limit.
// The journals of XFS and ext4 are ordered, so syncing a later change of a directory makes the limit durable,
// too.
func syncQuota(dir *os.File) error {
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
		Bytes: int64(q.Blocks) * sys.QuotaBlock, Inodes: int64(q.Inodes),
		Limit: Limit{Bytes: int64(q.BlockHard) * sys.QuotaBlock, Inodes: int64(q.InodeHard)},
	}, err
}

// id returns 0 for an ID outside the range, because a directory can inherit the ID of a project that the
// administrator uses for a parent directory.
func (p *projects) id(dir *os.File) (uint64, error) {
	a, err := sys.GetAttributes(dir)
	if id := uint64(a.Project); inRange(id) {
		return id, err
	}
	return 0, err
}

// release need not be durable. If the limit is back after a crash, allocate does not choose the ID.
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
	if q.Blocks|q.Inodes != 0 {
		return ErrBusy
	}
	if !hasLimit(q) {
		return nil
	}
	return p.limit(project, Limit{})
}
