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

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/pool/shared"
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
	p.version, p.Trash.cleans = version, s.Cleans
	_, _, direct := volume.ParseDirectPool(c.Name)
	if err := p.openExport(ctx, state, known, s.Cleans && (creates || !direct)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openBase takes over an open directory as a pool's root.
func openBase(c Config, base *os.File) (*Pool, error) {
	account, err := c.account()
	if err != nil {
		return nil, err
	}
	flags, err := shared.OpenFlags(base)
	if err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q: %s: statfs: %w", c.Name, c.place(), err)
	}
	root, err := beneath.OpenRoot(base, ".")
	if err != nil {
		return nil, fmt.Errorf("pool %q: %s: %w", c.Name, c.place(), err)
	}
	c.Quota = QuotaOff // the server limits what it does
	p := newPool(c, account, root, ledger.New())
	p.base, p.files.Flags = base, flags
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
	if !p.Trash.cleans {
		return p.awaitFolders()
	}
	if err := p.makeFolders(volumesDir, snapshotsDir, tmpDir, trashDir, shared.OwnersDir); err != nil {
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
	p.openShared()
	return nil
}

// beginShared reads what is there, and begins the background work of a process that
// cleans.
func (p *Pool) beginShared(ctx context.Context) error {
	e := p.openShared()
	if err := e.Sweep(ctx); err != nil {
		return writing(p.cfg, err)
	}
	if err := p.accounts.rebuildLedger(ctx); err != nil {
		return err
	}
	return p.startTasks(ctx)
}

// openShared makes this process one of the pool's writers.
func (p *Pool) openShared() *shared.Export {
	e := shared.New(shared.Config{
		Name: p.cfg.Name, UUID: p.uuid, Place: p.cfg.place(), Root: p.root,
		Dir: p.dir, Volumes: p.volumes, Tmp: p.tmp, Files: p.files, Ledger: p.ledger,
	}, shared.Pool{
		CheckMarker: p.CheckMarker, Gone: p.gone.close, Refresh: p.accounts.Refresh,
		Discard: p.building.Discard, AwaitTrash: p.Trash.AwaitTrash,
	})
	p.medium = e
	return e
}

// InitShared makes the export that is mounted at root a pool, and returns its UUID.
// One that is a pool stays what it is. ErrPrecondition if it has anything else in
// it, or cannot be written to.
func InitShared(root *os.File, c Config) (uuid string, err error) {
	dir, err := beneath.OpenRoot(root, ".")
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
	entries, err := beneath.RootNames(root, ".")
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
	if err := p.openToRead(ctx, stateDir, func() error { p.openShared(); return nil }); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Export is this process among the writers of a shared pool; nil for other pools.
func (p *Pool) Export() *shared.Export {
	e, _ := p.medium.(*shared.Export)
	return e
}

// retire ends the background work of a pool that is gone. Its descriptors are closed
// when no call has it any more, by the garbage collector: before, another file might
// get their numbers.
func (p *Pool) retire() {
	if p.stop != nil {
		p.stop()
	}
	if e := p.Export(); e != nil {
		e.Disown()
	}
}
