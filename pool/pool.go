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

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	volumesDir = "volumes"
	tmpDir     = ".trivet/tmp"
	trashDir   = ".trivet/trash"
	lockFile   = ".trivet/lock"
)

// Pool is an open pool. Its methods, and those of its parts, are safe for concurrent use, except that
// two calls must not change the same volume at the same time.
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
	received *receiving

	base *os.File // root of the mounted export; nil for a directory pool
	// replaced happens when the process finds that the open directory is no longer the pool.
	replaced once
	stop     context.CancelFunc
	tasks    sync.WaitGroup
	// unmount unmounts the pool's directory; nil if this process did not mount it.
	unmount func()
	// locked is when this process took the pool's lock; zero if it has no lock.
	locked time.Time
}

// LockedSince returns when this process took the pool's lock. Since then, no other process has attached an image of the
// pool. ok is false if the process has no lock, as in a pool on an export.
func (p *Pool) LockedSince() (since time.Time, ok bool) { return p.locked, !p.locked.IsZero() }

// Open opens a pool: it makes the pool on its first use, takes its lock, removes the leftovers of a
// crash, rebuilds the ledger and starts to empty the trash. state is the node's state directory.
// claim, if not nil, is called with the pool's UUID before an existing pool is changed, and can
// refuse the pool.
//
// Open returns ErrPrecondition for a disk that is not mounted, a foreign or missing marker, a new
// pool's directory that is not empty, or a pool that another driver writes.
func Open(ctx context.Context, forms volume.Forms, c Config, state *os.Root, claim func(uuid string) error) (*Pool, error) {
	c = c.Within(state.Name())
	unmount, err := c.mountRecords(ctx)
	if err != nil {
		return nil, err
	}
	p, err := openOn(ctx, forms, c, state, ledger.New(), claim)
	if err != nil {
		unmount()
		return nil, err
	}
	p.unmount = unmount
	return p, nil
}

// openOn is Open with a given ledger.
func openOn(ctx context.Context, forms volume.Forms, c Config, state *os.Root, l *ledger.Ledger, claim func(uuid string) error) (*Pool, error) {
	if c.Section != nil {
		if err := os.MkdirAll(c.Directory.Path, 0o700); err != nil {
			return nil, fmt.Errorf("pool %q: %w", c.Name, err)
		}
	}
	if err := os.Mkdir(c.Directory.Path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, volume.Errorf(volume.ErrPrecondition, "pool %q: directory.path: %w: make its parent directory first", c.Name, err)
	}
	p, st, err := openRoot(forms, c, l)
	if err != nil {
		return nil, err
	}
	p.Trash.maintained = true
	known, err := recall(state.Name(), c.Name)
	if err == nil {
		err = p.open(ctx, &directoryOpener{Config: c, stat: st, write: true}, known, func(uuid string) error {
			if claim != nil {
				if err := claim(uuid); err != nil {
					return err
				}
			}
			return remember(state, c.Name, uuid)
		})
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openRoot opens the pool's directory, whatever it contains, and returns the directory's stat(2).
func openRoot(forms volume.Forms, c Config, l *ledger.Ledger) (p *Pool, st unix.Stat_t, err error) {
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
	return newPool(forms, c, account, root, l), st, nil
}

// newPool returns a pool whose root directory is open and was not read yet.
func newPool(forms volume.Forms, c Config, account ledger.Config, root *os.Root, l *ledger.Ledger) *Pool {
	s := &store{cfg: c, forms: forms, root: root, ledger: l}
	if c.Section != nil {
		s.storage = c.Section.Open(c)
	}
	if _, thin := s.storage.(ThinStorage); thin {
		account.Accounting = ledger.Estimated
	}
	quotas := &Quotas{store: s}
	trash := &Trash{store: s, quotas: quotas, reaper: newReaper()}
	b := &building{store: s, deleted: trash}
	snapshots := &Snapshots{store: s, deleted: trash, building: b}
	p := &Pool{
		store: s, Attachments: &Attachments{s}, Snapshots: snapshots, Images: &Images{s}, Quotas: quotas, Trash: trash, Jobs: newJobs(c.Name),
		building: b, accounts: &accounts{store: s, quotas: quotas, deleted: trash, snapshots: snapshots}, replaced: newOnce(),
		received: &receiving{idle: map[string]time.Time{}, running: map[string]bool{}},
	}
	l.Open(account, p.accounts)
	return p
}

// opener has the steps of opening a pool that differ between directories of this node
// (directoryOpener) and exports (exportOpener).
type opener interface {
	// checkName refuses a marker that has the name of another pool.
	checkName(m marker) error
	// mayCreate returns an error if no pool may be created in a directory without a marker.
	mayCreate() error
	// create makes the directory a pool. ErrPrecondition if it contains other files.
	create(root *os.Root) (uuid string, err error)
	// explainRead explains an error of reading the pool's directory.
	explainRead(err error) error
	// openMedium opens the pool's folders, and creates them first if this process maintains
	// the pool.
	openMedium(ctx context.Context, p *Pool) (Medium, error)
}

// open identifies the pool and opens its medium. accept is called with the UUID before an existing
// pool is changed. The process that maintains the pool then removes the leftovers of ended
// processes, reads the records and starts the background work.
func (p *Pool) open(ctx context.Context, o opener, known knownPool, accept func(uuid string) error) (err error) {
	if p.uuid, err = identify(p.root, p.cfg, o, known); err != nil {
		return err
	}
	if err := accept(p.uuid); err != nil {
		return err
	}
	if p.medium, err = o.openMedium(ctx, p); err != nil || !p.Trash.maintained {
		return err
	}
	if err := p.medium.Recover(ctx); err != nil {
		return p.medium.ExplainWrite(err)
	}
	if err := p.readRecords(ctx); err != nil {
		return err
	}
	return p.startTasks(ctx)
}

// readRecords reads the volumes and their attachments into the ledger.
func (p *Pool) readRecords(ctx context.Context) error {
	if err := p.accounts.rebuildLedger(ctx); err != nil {
		return err
	}
	return p.Attachments.count()
}

// directoryOpener opens a directory of this node.
type directoryOpener struct {
	Config
	stat unix.Stat_t
	// write means that this process makes the pool on its first use, and writes to it.
	write bool
}

func (*directoryOpener) checkName(marker) error { return nil }

func (*directoryOpener) explainRead(err error) error { return err }

func (o *directoryOpener) mayCreate() error {
	if o.write {
		return nil
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s is not a pool yet: the driver makes it one when it starts", o.Name, o.place())
}

func (o *directoryOpener) create(root *os.Root) (string, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if name := e.Name(); name != "lost+found" && name != markerFile+atomicfile.Temporary {
			return "", volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not a pool and not empty (it has %q): give the pool an empty directory", o.Name, root.Name(), name)
		}
	}
	m := newMarker(o.Name)
	if err := atomicfile.Write(root, markerFile, m.encode()); err != nil {
		return "", fmt.Errorf("pool %q: %w", o.Name, err)
	}
	return m.UUID, nil
}

// openMedium also takes the pool's lock if this process writes the pool.
func (o *directoryOpener) openMedium(ctx context.Context, p *Pool) (Medium, error) {
	if o.write {
		if err := p.makeFolders(volumesDir, snapshotsDir, tmpDir, trashDir); err != nil {
			return nil, fmt.Errorf("pool %q: %w", o.Name, err)
		}
	}
	err := p.openFolders()
	m := &localMedium{store: p.store, dev: o.stat.Dev, ino: o.stat.Ino, measure: p.accounts.measure, discard: p.building.Discard}
	if err == nil {
		m.file, err = p.files.Open(p.dir, markerFile, os.O_RDONLY, 0)
	}
	switch {
	case !o.write && err != nil:
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q is not complete: %w: the driver completes it when it starts", o.Name, err)
	case err != nil:
		return nil, err
	case !o.write:
		return m, nil
	}
	if err = m.takeLock(ctx); err == nil {
		p.locked = time.Now()
		err = p.restrictAccess()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// restrictAccess makes the pool's directory accessible only to its owner, because otherwise a user of
// the node could run set-user-ID files of a tenant.
func (p *Pool) restrictAccess() error {
	st, err := p.root.Stat(".")
	if err == nil && st.Mode().Perm()&0o077 != 0 {
		err = p.root.Chmod(".", st.Mode()&^0o077)
	}
	if err != nil {
		return fmt.Errorf("pool %q: directory.path: %w", p.cfg.Name, err)
	}
	return nil
}

// makeFolders makes the missing ones of some folders of the pool.
func (p *Pool) makeFolders(dirs ...string) error {
	for _, dir := range dirs {
		if err := p.root.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// openFolders opens the folders that stay open until Close.
func (p *Pool) openFolders() (err error) {
	for _, folder := range []struct {
		to   **os.File
		path string
	}{{&p.dir, "."}, {&p.volumes, volumesDir}, {&p.tmp, tmpDir}, {&p.snapshots, snapshotsDir}, {&p.trash, trashDir}} {
		if *folder.to, err = p.root.Open(folder.path); err != nil {
			return err
		}
	}
	return nil
}

// flockPatiently takes a lock, and waits up to a second for it, because a child process of a killed
// driver may keep the driver's locks for a moment.
func flockPatiently(ctx context.Context, f *os.File) error {
	return retry.For(ctx, time.Second, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
}

// Close ends the pool's background work and releases its lock.
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
	if p.unmount != nil {
		p.unmount()
	}
}

// DirectIOAlign is the smallest unit of direct I/O on files of this pool, in bytes.
func (p *Pool) DirectIOAlign() int { return p.medium.DirectIOAlign() }
