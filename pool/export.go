package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// openShared opens a shared pool through its mount. Only a process that Cleans makes
// it and what it needs; others wait until that has happened (ErrUnavailable). known
// is the UUID that this process has seen there before; empty: none. Without creates an
// export that no configuration names is not made a pool.
func openShared(ctx context.Context, c Config, state *os.Root, s Shared, known string, creates bool) (*Pool, error) {
	base, version, err := s.Mount(ctx, c)
	if err != nil {
		return nil, err
	}
	p, err := openBase(c, base)
	if err != nil {
		return nil, errors.Join(err, base.Close())
	}
	p.version, p.cleans = version, s.Cleans
	_, _, direct := volume.ParseDirectPool(c.Name)
	if err := p.openExport(ctx, state, known, s.Cleans && (creates || !direct)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openBase takes over an open directory as a pool's root.
func openBase(c Config, base *os.File) (*Pool, error) {
	limits, err := c.limits()
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(base.Fd()), &st); err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q: %s: %w", c.Name, c.place(), err)
	}
	direct, err := directFor(base)
	if err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q: %s: statfs: %w", c.Name, c.place(), err)
	}
	root, err := openRootIn(base, ".")
	if err != nil {
		return nil, fmt.Errorf("pool %q: %s: %w", c.Name, c.place(), err)
	}
	p := newPool(c, limits, root, st, newLedger())
	p.base, p.direct = base, direct
	return p, nil
}

func (p *Pool) openExport(ctx context.Context, state *os.Root, seen string, create bool) (err error) {
	known := memory{uuid: seen, file: "what the driver remembers"}
	if state != nil {
		if known, err = recall(state.FS(), state.Name(), p.cfg.Name); err != nil {
			return err
		}
		if known.uuid == "" {
			known.uuid = seen
		}
	}
	if p.uuid, err = identify(p.root, p.cfg, known, create); err != nil {
		return err
	}
	if state != nil {
		if err := remember(state, p.cfg.Name, p.uuid); err != nil {
			return err
		}
	}
	if !p.cleans {
		return p.awaitFolders()
	}
	if err := p.makeFolders(); err != nil {
		return writing(p.cfg, err)
	}
	return p.beginShared(ctx)
}

// awaitFolders opens what another process makes.
func (p *Pool) awaitFolders() error {
	err := p.openFolders()
	if err == nil && p.snapshots == nil { // its controller's driver is of an older version
		if err = p.root.MkdirAll(snapshotsDir, 0o700); err == nil {
			err = p.openSnapshots()
		}
	}
	if err != nil {
		return volume.Errorf(volume.ErrUnavailable, "pool %q is not complete: %w: the driver that serves the controller completes it", p.cfg.Name, err)
	}
	return nil
}

// beginShared reads what is there, and begins the background work of a process that
// cleans.
func (p *Pool) beginShared(ctx context.Context) error {
	if err := p.sweep(ctx); err != nil {
		return writing(p.cfg, err)
	}
	if err := p.rebuildLedger(ctx); err != nil {
		return err
	}
	p.startSharedTasks(ctx)
	return nil
}

// InitShared makes the export that is mounted at root a pool, and returns its UUID.
// One that is a pool stays what it is. ErrPrecondition if it has anything else in
// it, or cannot be written to.
func InitShared(root *os.File, c Config) (uuid string, err error) {
	dir, err := openRootIn(root, ".")
	if err != nil {
		return "", fmt.Errorf("%s: %w", c.place(), err)
	}
	defer dir.Close()
	m, err := readMarker(dir, c.place())
	if errors.Is(err, fs.ErrNotExist) {
		return initialiseExport(dir, c)
	}
	return m.UUID, err
}

// initialiseExport makes a new pool. Of several processes one link decides, whose
// reply may be lost: what counts is the marker that is there then.
func initialiseExport(root *os.Root, c Config) (string, error) {
	refused := refuseForeignExport(root, c)
	if refused == nil {
		refused = linkMarker(root, c)
	}
	m, err := readMarker(root, c.place())
	if errors.Is(err, fs.ErrNotExist) && refused != nil {
		return "", refused
	}
	return m.UUID, err
}

// refuseForeignExport refuses an export that has something of others in it. A class
// that names its export itself may have been another driver's: there only what
// stands where the pool's own things go is refused.
func refuseForeignExport(root *os.Root, c Config) error {
	entries, err := sortedNames(root, ".")
	if err != nil {
		return fmt.Errorf("pool %q: %s: %w", c.Name, c.place(), err)
	}
	_, _, direct := volume.ParseDirectPool(c.Name)
	for _, e := range entries {
		ours := slices.Contains([]string{volumesDir, snapshotsDir, archivedDir, retainedDir, ".trivet"}, e)
		switch {
		case e == ".trivet":
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s has the folder %s of a pool and no %s: restore that from a backup", c.Name, c.place(), e, markerFile)
		case direct && ours:
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s has a %q that is not this driver's, and a pool needs that name: rename it, or share a directory of its own", c.Name, c.place(), e)
		case !direct && e != "lost+found" && !strings.HasPrefix(e, markerFile+"."):
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is no pool and not empty (it has %q): export an empty directory", c.Name, c.place(), e)
		}
	}
	return nil
}

// linkMarker puts a new marker in place, unless there is one.
func linkMarker(root *os.Root, c Config) error {
	m := marker{Version: markerVersion, UUID: NewUUID(), Name: c.Name}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	tmp := markerFile + "." + m.UUID
	defer func() { _ = root.Remove(tmp) }()
	if err = writeSynced(root, tmp, append(b, '\n')); err == nil {
		err = root.Link(tmp, markerFile)
	}
	return writing(c, err)
}

// writing explains why an export cannot be written to.
func writing(c Config, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is read-only: export it with rw: %w", c.Name, c.place(), err)
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s does not let this node's root write: export it with no_root_squash: %w", c.Name, c.place(), err)
	}
	return fmt.Errorf("pool %q: %s: %w", c.Name, c.place(), err)
}

// LookShared is Look for a shared pool whose export is mounted at root, which it
// takes over.
func LookShared(ctx context.Context, root *os.File, c Config, stateDir string) (*Pool, error) {
	p, err := openBase(c, root)
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	if err := p.look(ctx, stateDir); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// checkExport is Check for a shared pool.
func (p *Pool) checkExport() error {
	err := p.checkMarker()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ESTALE):
		p.gone.close()
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s was replaced or exported anew (%w): it is being mounted again", p.cfg.Name, p.cfg.place(), err)
	case isNotExist(err) || errors.Is(err, volume.ErrUnavailable) || errors.Is(err, volume.ErrDamaged):
		p.gone.close()
		return volume.Errorf(volume.ErrUnavailable, "pool %q: the marker in %s is gone or another's (%w): is the pool's disk mounted at the server? Put its own %s (uuid %s) back", p.cfg.Name, p.cfg.place(), err, markerFile, p.uuid)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s cannot be read: %w", p.cfg.Name, p.cfg.place(), err)
}

// explain makes of an error that tells of the export what a call answers: the
// server exports another directory, or another client removed what is open here.
func (p *Pool) explain(err error) error {
	if !p.Shared() || !errors.Is(err, unix.ESTALE) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	if err := p.checkExport(); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: it was changed by another process meanwhile: %w: try again", p.cfg.Name, err)
}

// unreadable is an error that says nothing of what was to be read.
func (p *Pool) unreadable(err error) error {
	if !p.Shared() {
		return err
	}
	if errors.Is(err, unix.ESTALE) {
		return p.explain(err)
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s does not let this node's root read: export it with no_root_squash: %w", p.cfg.Name, p.cfg.place(), err)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s cannot be read: %w", p.cfg.Name, p.cfg.place(), err)
}

// saysNothing tells whether an error of reading a file says nothing of the file.
func (p *Pool) saysNothing(err error) bool {
	if errors.Is(err, errIrregular) {
		return false
	}
	of := []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EBADF}
	if p.Shared() {
		of = append(of, unix.ESTALE, unix.EACCES, unix.EPERM, unix.EIO, unix.ETIMEDOUT, unix.EREMOTEIO, unix.ENOLCK)
	}
	return slices.ContainsFunc(of, func(e error) bool { return errors.Is(err, e) })
}

// retire ends the background work of a pool that is gone. Its descriptors are closed
// when no call has it any more, by the garbage collector: before, another file might
// get their numbers.
func (p *Pool) retire() {
	if p.stop != nil {
		p.stop()
	}
	p.disown()
}
