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
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	volumesDir = "volumes"
	tmpDir     = ".trivet/tmp"
	trashDir   = ".trivet/trash"
	lockFile   = ".trivet/lock"
)

// Pool is an open pool. Its methods, and those of its parts, may be called at once from many
// goroutines, but for one volume by one mutating call at a time.
type Pool struct {
	*store
	Attachments *Attachments
	Snapshots   *Snapshots
	Images      *Images
	Quotas      *Quotas
	Trash       *Trash
	Jobs        *Jobs

	building *building
	accounts *accounts

	base  *os.File // what an export's mount lives by; nil for a directory pool
	gone  once     // what is open is not the pool any more
	stop  context.CancelFunc
	tasks sync.WaitGroup
}

// Open opens a pool: it makes it on its first use, takes its lock, clears what a
// crash left behind, rebuilds the ledger and begins to empty the trash. state is the
// node's state directory. claim is asked, before anything is changed, whether the
// pool with a UUID may be opened; nil: it may.
//
// Errors: ErrPrecondition for a disk that is not mounted, a foreign or missing
// marker, a directory that is not empty, or a pool that another driver writes.
func Open(ctx context.Context, c Config, state *os.Root, claim func(uuid string) error) (*Pool, error) {
	return openOn(ctx, c.Within(state.Name()), state, ledger.New(), claim)
}

// openOn is Open for a pool that has its ledger on its filesystem already.
func openOn(ctx context.Context, c Config, state *os.Root, l *ledger.Ledger, claim func(uuid string) error) (*Pool, error) {
	if c.Section != nil {
		if err := os.MkdirAll(c.Directory.Path, 0o700); err != nil {
			return nil, fmt.Errorf("pool %q: %w", c.Name, err)
		}
	}
	if err := os.Mkdir(c.Directory.Path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, volume.Errorf(volume.ErrPrecondition, "pool %q: directory.path: %w: make its parent directory first", c.Name, err)
	}
	p, st, err := openRoot(c, l)
	if err != nil {
		return nil, err
	}
	if err := p.open(ctx, state, st, claim); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openRoot opens the pool's directory, whatever it has.
func openRoot(c Config, l *ledger.Ledger) (p *Pool, st unix.Stat_t, err error) {
	if c.RequireMount {
		err := requireMountPoint(c.Directory.Path)
		if err != nil && !errors.Is(err, volume.ErrPrecondition) {
			err = fmt.Errorf("directory.path: %w", &fs.PathError{Op: "statx", Path: c.Directory.Path, Err: err})
		}
		if err != nil {
			return nil, st, fmt.Errorf("pool %q: %w", c.Name, err)
		}
	}
	account, err := c.account()
	if err != nil {
		return nil, st, err
	}
	err = unix.Stat(c.Directory.Path, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, st, fmt.Errorf("pool %q: directory.path: %w", c.Name, &fs.PathError{Op: "stat", Path: c.Directory.Path, Err: err})
	}
	root, err := os.OpenRoot(c.Directory.Path)
	if err != nil {
		return nil, st, fmt.Errorf("pool %q: directory.path: %w", c.Name, err)
	}
	return newPool(c, account, root, l), st, nil
}

func newPool(c Config, account ledger.Config, root *os.Root, l *ledger.Ledger) *Pool {
	s := &store{cfg: c, root: root, ledger: l}
	if c.Section != nil {
		s.storage = c.Section.Open(c)
	}
	quotas := &Quotas{store: s}
	bin := &Trash{store: s, quotas: quotas, reaper: newReaper()}
	b := &building{store: s, bin: bin}
	snapshots := &Snapshots{store: s, bin: bin, building: b}
	p := &Pool{
		store: s, Attachments: &Attachments{s}, Snapshots: snapshots, Images: &Images{s}, Quotas: quotas, Trash: bin, Jobs: newJobs(c.Name),
		building: b, accounts: &accounts{store: s, quotas: quotas, bin: bin, snapshots: snapshots}, gone: newOnce(),
	}
	l.Open(account, p.accounts)
	return p
}

func (p *Pool) open(ctx context.Context, state *os.Root, st unix.Stat_t, claim func(uuid string) error) error {
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
	if err := p.makeFolders(volumesDir, snapshotsDir, tmpDir, trashDir); err != nil {
		return err
	}
	m, err := p.openLocal(st)
	if err != nil {
		return err
	}
	p.medium = m
	if err := m.takeLock(ctx); err != nil {
		return err
	}
	if err := p.seclude(); err != nil {
		return err
	}
	return p.begin(ctx)
}

// seclude removes the access of all users but the owner to the pool's directory: through it a
// user of the node could run what a tenant has made set-user-ID.
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

// begin clears what a killed driver left, reads the records and starts the background work.
func (p *Pool) begin(ctx context.Context) error {
	// What a killed driver left may be visible and not yet durable. After this, whatever can
	// be read is durable.
	if err := unix.Syncfs(int(p.volumes.Fd())); err != nil {
		return fmt.Errorf("pool %q: syncfs: %w", p.cfg.Name, err)
	}
	if err := p.clearTmp(ctx); err != nil {
		return err
	}
	if err := p.accounts.rebuildLedger(ctx); err != nil {
		return err
	}
	if err := p.Attachments.count(); err != nil {
		return err
	}
	return p.startTasks(ctx)
}

func (p *Pool) makeFolders(dirs ...string) error {
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

// flockPatiently takes a lock, and waits up to a second for it: a driver that was killed while
// it started a program leaves a child for a moment, which has all its descriptors and locks.
func flockPatiently(ctx context.Context, f *os.File) error {
	return retry.For(ctx, time.Second, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
}

// clearTmp discards what was being made when a driver died. This process has the lock, so
// nobody makes it any more.
func (p *Pool) clearTmp(ctx context.Context) error {
	names, err := beneath.Names(p.tmp, ".")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := p.building.Discard(ctx, name); err != nil {
			return fmt.Errorf("pool %q: clearing leftovers: %w", p.cfg.Name, err)
		}
	}
	return nil
}

// Close ends the pool's background work and lets go of its lock.
func (p *Pool) Close() {
	p.Jobs.close()
	if p.stop != nil {
		p.stop()
		p.tasks.Wait()
	}
	if p.medium != nil {
		p.medium.Close()
	}
	p.ledger.Leave()
	for _, f := range []*os.File{p.dir, p.volumes, p.snapshots, p.tmp, p.trash, p.base} {
		if f != nil {
			_ = f.Close()
		}
	}
	_ = p.root.Close()
}

// DirectIOAlign is the smallest sector of direct I/O on files of this pool, in bytes.
func (p *Pool) DirectIOAlign() int { return p.medium.DirectIOAlign() }
