package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

const (
	volumesDir = "volumes"
	tmpDir     = ".trivet/tmp"
	trashDir   = ".trivet/trash"
	lockFile   = ".trivet/lock"
)

// Pool is an open pool. Its methods may be called at once from many
// goroutines, but for one volume by one mutating call at a time.
type Pool struct {
	cfg    Config
	limits limits
	uuid   string
	// version is of the protocol; empty for a directory pool.
	version string
	direct  int // see Undelegated
	root    *os.Root
	dev     uint64
	ino     uint64
	// These stay open: their fsync is on every commit, and look-ups start there.
	dir     *os.File
	file    *os.File // any regular file of a node-local pool; see space
	volumes *os.File
	tmp     *os.File
	// snapshots is nil for a pool of an older version that is only looked at.
	snapshots *os.File
	trash     *os.File
	lock      *os.File // nil for a shared pool, and one that is only looked at
	base      *os.File // what an export's mount lives by; nil for a directory pool

	cleans bool // see Shared
	owner  owner
	rounds rounds
	gone   once // what is open is not the pool any more

	ledger *ledger
	jobs   jobs
	// limiting is held by who changes limits that depend on the ledger.
	limiting sync.RWMutex
	disks    disks // of a pool of disks
	reaper   *reaper
	// trashLock is of a shared pool.
	trashLock trashLock
	marker    markerSeen
	stop      context.CancelFunc
	tasks     sync.WaitGroup
}

// Open opens a pool: it makes it on its first use, takes its lock, clears what a
// crash left behind, rebuilds the ledger and begins to empty the trash. state is the
// node's state directory. claim is asked, before anything is changed, whether the
// pool with a UUID may be opened; nil: it may.
//
// Errors: ErrPrecondition for a disk that is not mounted, a foreign or missing
// marker, a directory that is not empty, or a pool that another driver writes.
func Open(ctx context.Context, c Config, state *os.Root, claim func(uuid string) error) (*Pool, error) {
	return openOn(ctx, c.within(state.Name()), state, newLedger(), claim)
}

// openOn is Open for a pool that has its ledger on its filesystem already.
func openOn(ctx context.Context, c Config, state *os.Root, l *ledger, claim func(uuid string) error) (*Pool, error) {
	if c.Disks != nil {
		if err := state.MkdirAll(disksDir, 0o700); err != nil {
			return nil, fmt.Errorf("pool %q: %w", c.Name, err)
		}
	}
	if err := os.Mkdir(c.Directory.Path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, volume.Errorf(volume.ErrPrecondition, "pool %q: directory.path: %w: make its parent directory first", c.Name, err)
	}
	p, err := openRoot(c, l)
	if err != nil {
		return nil, err
	}
	if err := p.open(ctx, state, claim); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openRoot opens the pool's directory, whatever it has.
func openRoot(c Config, l *ledger) (*Pool, error) {
	if c.RequireMount {
		err := requireMountPoint(c.Directory.Path)
		if err != nil && !errors.Is(err, volume.ErrPrecondition) {
			err = fmt.Errorf("directory.path: %w", &fs.PathError{Op: "statx", Path: c.Directory.Path, Err: err})
		}
		if err != nil {
			return nil, fmt.Errorf("pool %q: %w", c.Name, err)
		}
	}
	limits, err := c.limits()
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	err = unix.Stat(c.Directory.Path, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, fmt.Errorf("pool %q: directory.path: %w", c.Name, &fs.PathError{Op: "stat", Path: c.Directory.Path, Err: err})
	}
	root, err := os.OpenRoot(c.Directory.Path)
	if err != nil {
		return nil, fmt.Errorf("pool %q: directory.path: %w", c.Name, err)
	}
	return newPool(c, limits, root, st, l), nil
}

func newPool(c Config, l limits, root *os.Root, st unix.Stat_t, own *ledger) *Pool {
	p := &Pool{
		cfg: c, limits: l, root: root, dev: st.Dev, ino: st.Ino, reaper: newReaper(), ledger: own, jobs: newJobs(),
		disks: disks{claiming: make(chan struct{}, 1)}, gone: newOnce(), owner: owner{growing: map[string]string{}},
	}
	own.begins(p)
	return p
}

func (p *Pool) open(ctx context.Context, state *os.Root, claim func(uuid string) error) error {
	known, err := recall(state.FS(), state.Name(), p.cfg.Name)
	if err != nil {
		return err
	}
	const create = true
	if p.uuid, err = identify(p.root, p.cfg, known, create); err != nil {
		return err
	}
	if claim != nil {
		if err := claim(p.uuid); err != nil {
			return err
		}
	}
	if err := remember(state, p.cfg.Name, p.uuid); err != nil {
		return err
	}
	if err := p.makeFolders(); err != nil {
		return err
	}
	if p.lock, err = p.takeLock(ctx); err != nil {
		return err
	}
	if err := p.seclude(); err != nil {
		return err
	}
	return p.begin(ctx)
}

// seclude keeps all but the owner out of the pool's directory, which the driver has for
// itself: with its path a user of the node could run what a tenant has made set-user-ID.
func (p *Pool) seclude() error {
	st, err := p.root.Stat(".")
	if err == nil && st.Mode().Perm()&0o077 != 0 {
		err = p.root.Chmod(".", st.Mode()&^0o077)
	}
	if err != nil {
		return fmt.Errorf("pool %q: directory.path: %w", p.cfg.Name, err)
	}
	return nil
}

// begin reads what is there, and puts it in order.
func (p *Pool) begin(ctx context.Context) error {
	// What a killed driver left may be visible and not yet durable. After this
	// whatever can be read is.
	if err := unix.Syncfs(int(p.volumes.Fd())); err != nil {
		return fmt.Errorf("pool %q: syncfs: %w", p.cfg.Name, err)
	}
	if err := p.clearTmp(ctx); err != nil {
		return err
	}
	if err := p.rebuildLedger(ctx); err != nil {
		return err
	}
	return p.startTasks(ctx)
}

func (p *Pool) makeFolders() error {
	dirs := []string{volumesDir, snapshotsDir, tmpDir, trashDir}
	if p.Shared() {
		dirs = append(dirs, ownersDir)
	}
	for _, dir := range dirs {
		if err := p.root.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("pool %q: %w", p.cfg.Name, err)
		}
	}
	return p.openFolders()
}

func (p *Pool) openFolders() (err error) {
	if p.dir, err = p.root.Open("."); err != nil {
		return err
	}
	if !p.Shared() {
		if p.file, err = p.openRegular(p.dir, markerFile, os.O_RDONLY, 0); err != nil {
			return err
		}
	}
	if p.volumes, err = p.root.Open(volumesDir); err != nil {
		return err
	}
	if p.tmp, err = p.root.Open(tmpDir); err != nil {
		return err
	}
	if err = p.openSnapshots(); err != nil {
		return err
	}
	p.trash, err = p.root.Open(trashDir)
	return err
}

func (p *Pool) takeLock(ctx context.Context) (*os.File, error) {
	f, err := p.root.OpenFile(lockFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flockPatiently(ctx, f); err != nil {
		_ = f.Close()
		return nil, volume.Errorf(volume.ErrPrecondition, "pool %q: %s is in use by another driver (%w): give each driver its own pools", p.cfg.Name, p.cfg.Directory.Path, err)
	}
	return f, nil
}

// flockPatiently takes a lock, waiting up to a second: a driver that was killed
// while it started a program leaves a child behind for a moment, with all its
// descriptors and so its locks.
func flockPatiently(ctx context.Context, f *os.File) error {
	return retry.For(ctx, time.Second, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
}

// clearTmp removes volumes that were being made when a driver died; the lock
// is ours, so nobody makes them any more.
func (p *Pool) clearTmp(ctx context.Context) error {
	names, err := namesIn(p.tmp, ".")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := p.clearEntry(ctx, name); err != nil {
			return fmt.Errorf("pool %q: clearing leftovers: %w", p.cfg.Name, err)
		}
	}
	return nil
}

// Close ends the pool's background work and lets go of its lock.
func (p *Pool) Close() {
	p.jobs.close()
	if p.stop != nil {
		p.stop()
		p.tasks.Wait()
	}
	p.disown()
	p.ledger.leave()
	for _, f := range []*os.File{p.dir, p.file, p.volumes, p.snapshots, p.tmp, p.trash, p.lock, p.rounds.file, p.base} {
		if f != nil {
			_ = f.Close()
		}
	}
	_ = p.root.Close()
}

// Name is the pool's name in the configuration.
func (p *Pool) Name() string { return p.cfg.Name }

// ShortUUID is what volume IDs carry: the first 8 hex digits of the UUID.
func (p *Pool) ShortUUID() string { return p.uuid[:8] }

// ID makes the ID of the volume name of a backend in this pool.
func (p *Pool) ID(backend, name string) volume.ID {
	if p.Shared() {
		return volume.ID{Backend: backend, Pool: p.cfg.Name, Name: name}
	}
	return volume.ID{Backend: backend, Pool: p.cfg.Name, PoolUUID: p.ShortUUID(), Name: name}
}

// ImagePath is the path of a volume's image, for programs that want a path; in a
// shared pool it is the server's, for people.
func (p *Pool) ImagePath(name string) string {
	return p.cfg.place() + "/" + volumePath(name, ImageFile)
}

// DirectIOAlign is the smallest sector, in bytes, that files of this pool take
// direct I/O in (statx(2), STATX_DIOALIGN); 4096 where the kernel does not say. NFS
// takes it in any.
func (p *Pool) DirectIOAlign() int {
	if p.Shared() {
		return 512
	}
	f, err := p.root.Open(lockFile)
	if err != nil {
		return 4096
	}
	defer f.Close()
	var st unix.Statx_t
	err = unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 || st.Dio_offset_align == 0 {
		return 4096
	}
	return int(st.Dio_offset_align)
}
