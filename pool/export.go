package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/pool/shared"
	"github.com/trivet-csi/trivet/volume"
)

// exportOpener opens an export.
type exportOpener struct {
	Config
	// canCreate means that this process may make a pool on an export that has none.
	canCreate bool
}

// openShared mounts an export and opens its pool. Only a process that maintains the pool makes the
// pool and its folders; other processes get ErrUnavailable until then. On an export that no
// configuration names, the pool is made only if creates is set. Without state (nil) the pool's UUID is
// neither checked nor recorded.
func openShared(ctx context.Context, forms volume.Forms, c Config, state *os.Root, s Shared, creates bool) (*Pool, error) {
	base, version, err := s.Mount(ctx, c)
	if err != nil {
		return nil, err
	}
	p, err := openBase(forms, c, base)
	if err != nil {
		return nil, errors.Join(err, base.Close())
	}
	p.version, p.Trash.maintained = version, s.Maintains
	if err := p.openExport(ctx, state, s.Maintains && (creates || !volume.IsDirectPool(c.Name))); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openExport opens the pool of openBase. create allows this process to make the pool.
func (p *Pool) openExport(ctx context.Context, state *os.Root, create bool) error {
	o := &exportOpener{p.cfg, create}
	if state == nil {
		return p.open(ctx, o, knownPool{}, func(string) error { return nil })
	}
	known, err := recall(state.Name(), p.cfg.Name)
	if err != nil {
		return err
	}
	return p.open(ctx, o, known, func(uuid string) error { return remember(state, p.cfg.Name, uuid) })
}

// openBase returns the pool, not yet open, of an export whose root directory is base. The pool closes
// base.
func openBase(forms volume.Forms, c Config, base *os.File) (*Pool, error) {
	account, err := c.account()
	if err != nil {
		return nil, err
	}
	flags, err := sys.NoDelegation(base)
	if err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q: %s: %w", c.Name, c.place(), err)
	}
	root, err := beneath.OpenRoot(base, ".")
	if err != nil {
		return nil, (&exportOpener{Config: c}).explainRead(err)
	}
	c.Quota = QuotaOff // only the server could limit directories
	p := newPool(forms, c, account, root, ledger.New())
	p.base, p.files.Flags = base, flags
	return p, nil
}

// checkName refuses a pool that was made under another name, which the IDs of its volumes
// contain. An export that no configuration names has one name for each name of its server.
func (o *exportOpener) checkName(m marker) error {
	direct, madeDirect := volume.IsDirectPool(o.Name), volume.IsDirectPool(m.Name)
	switch {
	case m.Name == o.Name || m.Name == "" || direct && madeDirect:
		return nil
	case direct:
		return volume.Errorf(volume.ErrPrecondition, "%s is the pool %q of a configuration: set %s: %[2]s in the StorageClass in place of %[4]s and %[5]s", o.place(), m.Name, volume.ParamPool, volume.ParamServer, volume.ParamShare)
	case madeDirect:
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s has the volumes of StorageClasses that name it by %s and %s: use those parameters, or export another directory for this pool", o.Name, o.place(), volume.ParamServer, volume.ParamShare)
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is the pool %q, and the IDs of its volumes contain that name: use that name in the configuration, or export another directory for this pool", o.Name, o.place(), m.Name)
}

func (o *exportOpener) explainRead(err error) error {
	return shared.ExplainRead(o.Name, o.place(), err)
}

// errNotMade means that an export that no configuration names has no pool yet.
var errNotMade = fmt.Errorf("%w: no pool", volume.ErrUnavailable)

// mayCreate returns the error for an export that is not a pool and that this process must not make one.
func (o *exportOpener) mayCreate() error {
	switch {
	case !o.canCreate && volume.IsDirectPool(o.Name):
		return volume.Errorf(errNotMade, "pool %q: %s is not a pool, so it contains no volumes: the first volume of a StorageClass creates the pool", o.Name, o.place())
	case !o.NFS.Init:
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not a pool: if it is the right export, make it one with `trivet pool init`, or set nfs.init: true in the configuration", o.Name, o.place())
	case !o.canCreate:
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s is not a pool yet: the driver that serves the controller makes it one", o.Name, o.place())
	}
	return nil
}

// openMedium makes this process one of the pool's writers.
func (o *exportOpener) openMedium(_ context.Context, p *Pool) (Medium, error) {
	if p.Trash.maintained {
		if err := p.makeFolders(volumesDir, snapshotsDir, tmpDir, trashDir, shared.OwnersDir); err != nil {
			return nil, shared.ExplainWrite(o.Name, o.place(), err)
		}
	}
	if err := p.openFolders(); err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q is not complete: %w: the driver that serves the controller completes it", o.Name, err)
	}
	return shared.New(shared.Config{
		Name: o.Name, UUID: p.uuid, Place: o.place(), Root: p.root,
		Dir: p.dir, Volumes: p.volumes, Tmp: p.tmp, Files: p.files, Ledger: p.ledger,
	}, shared.Pool{
		CheckMarker: p.CheckMarker, Replaced: p.replaced.close, Refresh: p.accounts.Refresh,
		Discard: p.building.Discard, AwaitTrash: p.Trash.AwaitTrash,
	}), nil
}

// InitShared creates a pool on the export that is mounted at root, and returns the pool's UUID. It does
// not change an existing pool. ErrPrecondition if the export contains other files, or cannot be
// written to.
func InitShared(root *os.File, c Config) (uuid string, err error) {
	dir, err := beneath.OpenRoot(root, ".")
	if err != nil {
		return "", fmt.Errorf("%s: %w", c.place(), err)
	}
	defer dir.Close()
	m, err := readMarker(dir, c.place())
	o := &exportOpener{Config: c}
	if errors.Is(err, fs.ErrNotExist) {
		return o.create(dir)
	}
	return m.UUID, o.explainRead(err)
}

// create makes a new pool. If several processes do that at once, only one links its marker. The reply
// to the link may be lost, so create then reads the marker that exists.
func (o *exportOpener) create(root *os.Root) (string, error) {
	failed := o.refuseForeignFiles(root)
	if failed == nil {
		failed = o.linkMarker(root)
	}
	m, err := readMarker(root, o.place())
	if errors.Is(err, fs.ErrNotExist) && failed != nil {
		return "", failed
	}
	return m.UUID, err
}

// refuseForeignFiles refuses an export that contains foreign files. An export that a StorageClass
// names may contain the files of another driver, except files with the names of the pool's own
// folders.
func (o *exportOpener) refuseForeignFiles(root *os.Root) error {
	c := o.Config
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return fmt.Errorf("pool %q: %s: %w", c.Name, c.place(), err)
	}
	direct := volume.IsDirectPool(c.Name)
	for _, entry := range entries {
		e := entry.Name()
		poolFolder := slices.Contains([]string{volumesDir, snapshotsDir, archivedDir, retainedDir, ".trivet"}, e)
		switch {
		case e == ".trivet":
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s has the folder %s of a pool and no %s: restore that from a backup", c.Name, c.place(), e, markerFile)
		case direct && poolFolder:
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s contains %q, which this driver did not create, and a pool needs that name: rename it, or share another directory", c.Name, c.place(), e)
		case !direct && e != "lost+found" && !strings.HasPrefix(e, markerFile+"."):
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not a pool and not empty (it has %q): export an empty directory", c.Name, c.place(), e)
		}
	}
	return nil
}

// linkMarker creates the marker, unless there is one.
func (o *exportOpener) linkMarker(root *os.Root) error {
	m := newMarker(o.Name)
	tmp := markerFile + "." + m.UUID
	defer func() { _ = root.Remove(tmp) }()
	err := atomicfile.Create(root, tmp, m.encode())
	if err == nil {
		err = root.Link(tmp, markerFile)
	}
	return shared.ExplainWrite(o.Name, o.place(), err)
}

// OpenExportReadOnly is OpenReadOnly for an export that is mounted at root, which the pool
// takes over.
func OpenExportReadOnly(ctx context.Context, forms volume.Forms, root *os.File, c Config, stateDir string) (*Pool, error) {
	p, err := openBase(forms, c, root)
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return p.openReadOnly(ctx, &exportOpener{Config: c}, stateDir)
}

// Export is this process's access to a shared pool; nil for other pools.
func (p *Pool) Export() *shared.Export {
	e, _ := p.medium.(*shared.Export)
	return e
}

// retire ends the background work of a pool whose directory was replaced. It does not close the
// pool's descriptors, because calls may still use their numbers: the garbage collector closes them
// after the last call.
func (p *Pool) retire() {
	if p.stop != nil {
		p.stop()
	}
	if e := p.Export(); e != nil {
		e.Disown()
	}
}
