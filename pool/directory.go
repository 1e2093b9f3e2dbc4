package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// DataDir is the name of a directory volume's data in its folder.
	DataDir = "data"
	// archivedDir and retainedDir have the folders of deleted volumes whose data is
	// kept (see volume.OnDelete).
	archivedDir = "archived"
	retainedDir = "retained"
)

// DirectoryPath is where a directory volume's data lies, below its pool.
func DirectoryPath(v volume.Volume) string {
	if v.Directory.SubDir != "" {
		return v.Directory.SubDir
	}
	return volumePath(v.ID.Name, DataDir)
}

// hasSubDir tells whether a volume's data lies outside its folder.
func hasSubDir(v volume.Volume) bool { return v.Directory != nil && v.Directory.SubDir != "" }

// CreateDirectory is Create for a volume that is a directory. prepare sets the
// directory's mode and owner; made is false for one that was there and is adopted.
// ErrPrecondition if its place is not free, or reached through a link.
//
// In a node-local pool the directory is limited to the volume's capacity, if it is made
// and the pool can; see Limits.
func (p *Pool) CreateDirectory(ctx context.Context, v volume.Volume, prepare func(dir *os.File, made bool) error) error {
	return p.CreateDirectoryOf(ctx, v, nil, prepare)
}

// CreateDirectoryOf is CreateDirectory for one that is made of content; prepare gets it
// as one that was there.
func (p *Pool) CreateDirectoryOf(ctx context.Context, v volume.Volume, content *Content, prepare func(dir *os.File, made bool) error) error {
	if _, err := p.Quotas.Limits(); err != nil {
		return err
	}
	adopted := false
	build := func(dir *os.Root) (err error) {
		if content == nil {
			adopted, err = p.adopt(v, prepare)
		} else {
			err = p.refuseAdoption(v)
		}
		if adopted || err != nil {
			return err
		}
		data, err := p.Quotas.makeData(dir, v, content)
		if err != nil {
			return err
		}
		defer data.Close()
		if err := p.fillData(data, v, content); err != nil {
			return err
		}
		if err := prepare(data, content == nil); err != nil {
			return err
		}
		return p.medium.SyncNames(data)
	}
	place := func(entry string) error {
		if adopted || !hasSubDir(v) {
			return nil
		}
		return p.placeData(entry, v.Directory.SubDir)
	}
	return p.make(ctx, v, build, place)
}

func (p *Pool) fillData(data *os.File, v volume.Volume, content *Content) error {
	if content == nil {
		return nil
	}
	if err := content.fill(data); err != nil {
		return err
	}
	return p.Quotas.limitCopy(v)
}

// Content is what a directory is made of; nil: it is empty.
type Content struct {
	// Dir is to be copied, and open.
	Dir *os.File
	// Copy copies it into an empty directory. It is not called where the filesystem has
	// made the whole of it at once.
	Copy func(to *os.File) error
	// done: there is nothing to be copied any more.
	done bool
}

// make makes the directory DataDir, with its content if the filesystem can.
func (c *Content) make(fs *quota.FS, parent *os.File) error {
	if c == nil {
		return fs.MakeDir(parent, DataDir)
	}
	err := clone.Subvolume(parent, DataDir, c.Dir, false)
	if errors.Is(err, clone.ErrNotSubvolume) || errors.Is(err, unix.EXDEV) {
		return fs.MakeDir(parent, DataDir)
	}
	c.done = err == nil
	return CopyError(err)
}

func (c *Content) fill(dir *os.File) error {
	if c.done {
		return nil
	}
	return CopyError(c.Copy(dir))
}

// CopyError translates the errors of linux/clone that a caller can resolve.
func CopyError(err error) error {
	switch {
	case errors.Is(err, clone.ErrUncopyable):
		return volume.Errorf(volume.ErrPrecondition, "%w", err)
	case errors.Is(err, clone.ErrTooSmall):
		return volume.Errorf(volume.ErrOutOfRange, "%w", err)
	}
	return err
}

// refuseAdoption is adopt for a volume that is to be a copy.
func (p *Pool) refuseAdoption(v volume.Volume) error {
	if !hasSubDir(v) {
		return nil
	}
	_, err := beneath.Stat(p.dir, v.Directory.SubDir)
	if beneath.IsNotExist(err) {
		return nil
	}
	if err == nil {
		err = volume.Errorf(volume.ErrPrecondition, "%s %q: there is something already, where a copy of volume_content_source is to be: remove it, or use another %[1]s", volume.ParamSubDir, v.Directory.SubDir)
	}
	return err
}

// adopt prepares the directory that is where the volume's is to be; false if there
// is none.
func (p *Pool) adopt(v volume.Volume, prepare func(dir *os.File, made bool) error) (bool, error) {
	if !hasSubDir(v) {
		return false, nil
	}
	dir, err := beneath.OpenDir(p.dir, v.Directory.SubDir)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, misplaced(v.Directory.SubDir, err)
	}
	defer dir.Close()
	if p.cfg.Quota == QuotaRequired {
		return false, volume.Errorf(volume.ErrPrecondition, "%s %q: there is a directory already, which cannot be limited, and pool %q has quota: %s: use another %[1]s, or a pool without that",
			volume.ParamSubDir, v.Directory.SubDir, p.cfg.Name, QuotaRequired)
	}
	return true, prepare(dir, false)
}

// placeData moves a prepared directory from the folder that is being made to its
// place among others', so that it is never seen half prepared.
func (p *Pool) placeData(entry, subDir string) error {
	parent, err := p.makeParents(path.Dir(subDir))
	if err != nil {
		return misplaced(subDir, err)
	}
	defer parent.Close()
	from, err := beneath.OpenRoot(p.tmp, entry)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := writeSynced(from, placingFile, []byte(subDir)); err != nil {
		return err
	}
	return p.moveData(entry, parent, subDir)
}

func (p *Pool) moveData(entry string, parent *os.File, subDir string) error {
	from, err := beneath.OpenDir(p.tmp, entry)
	if err != nil {
		return err
	}
	defer from.Close()
	err = beneath.Rename(from, DataDir, parent, path.Base(subDir))
	if err != nil {
		if _, left := beneath.Stat(from, DataDir); beneath.IsNotExist(left) { // the reply was lost
			err = nil
		}
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(subDir, err, "use another "+volume.ParamSubDir+", or make the directory there yourself, and it is adopted")
	}
	if err == nil {
		err = p.medium.SyncNames(parent)
	}
	if err != nil {
		return misplaced(subDir, err)
	}
	crashpoint.Here(crashpoint.CreatePlaced)
	return nil
}

// placingFile is in the folder of a volume that is being made when its data is moved
// to its place among others', and names that place.
const placingFile = "placing"

// makeParents opens a folder of the pool, and makes what is missing of its path.
func (p *Pool) makeParents(dir string) (*os.File, error) {
	at, err := beneath.OpenDir(p.dir, ".")
	if err != nil || dir == "." {
		return at, err
	}
	for _, name := range strings.Split(dir, "/") {
		next, err := openOrMake(at, name, p.medium.FolderMode())
		if err == nil {
			err = p.medium.SyncNames(at)
		}
		_ = at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	return at, nil
}

// openParent opens the folder that a volume's directory among others' is in.
func (p *Pool) openParent(subDir string) (parent *os.File, name string, err error) {
	parent, err = beneath.OpenDir(p.dir, path.Dir(subDir))
	return parent, path.Base(subDir), err
}

func openOrMake(at *os.File, name string, mode uint32) (*os.File, error) {
	next, err := beneath.OpenDir(at, name)
	if !errors.Is(err, unix.ENOENT) {
		return next, err
	}
	if err := unix.Mkdirat(int(at.Fd()), name, mode); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: at.Name() + "/" + name, Err: err}
	}
	return beneath.OpenDir(at, name)
}

// misplaced explains why a volume's directory cannot be where it is to be.
func misplaced(subDir string, err error) error {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return volume.Errorf(volume.ErrPrecondition, "%s %q: a part of it is a link or no directory: remove that, or use another %[1]s: %[3]w", volume.ParamSubDir, subDir, err)
	}
	return fmt.Errorf("%s %q: %w", volume.ParamSubDir, subDir, err)
}

// unmovable explains an EXDEV of a rename on one filesystem.
func unmovable(subDir string, err error, remedy string) error {
	return volume.Errorf(volume.ErrPrecondition, "%s %q: no directory can be moved between there and elsewhere in the pool (%w), as where one above gives its quota to all that is in it (a project's, inherited): %s",
		volume.ParamSubDir, subDir, err, remedy)
}

// Status is fstat(2) of a directory that this process has just opened or changed: a
// server, which has told with that what there is to know, is not asked again.
func Status(dir *os.File) (mode, uid, gid uint32, err error) {
	var st unix.Statx_t
	err = unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &st)
	if err != nil {
		err = &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	return uint32(st.Mode), st.Uid, st.Gid, err
}

// Remove deletes a volume: one rename out of the volumes, durable when it returns.
// What is not kept goes into the trash: its space comes back in the background and is
// promised again only then. What is kept goes, record and all, to
// archived/<name>.<time>.<random> or retained/<the same>; a subDir that is retained
// stays. ErrPrecondition for a volume that is published, or in whose directory another
// one lies. The caller holds the volume's image lock.
func (p *Pool) Remove(ctx context.Context, v volume.Volume) error {
	if err := p.Check(); err != nil {
		return err
	}
	defer p.ledger.Begin(volumeDir(v.ID.Name))()
	if !hasSubDir(v) || v.Directory.OnDelete == volume.OnDeleteRetain {
		if err := p.Attachments.Unpublished(v.ID); err != nil {
			return err
		}
		return p.medium.Explain(p.remove(v))
	}
	// No other volume may have that directory, or get it now.
	ctx = context.WithoutCancel(ctx)
	return p.medium.Explain(p.medium.Exclusively(ctx, func(recheck func(func() error) error) error {
		if err := recheck(func() error { return p.ownsSubDir(v) }); err != nil {
			return err
		}
		if err := p.Attachments.Unpublished(v.ID); err != nil {
			return err
		}
		if err := p.fetchData(v); err != nil {
			return err
		}
		return p.remove(v)
	}))
}

// ownsSubDir refuses a volume in whose directory another one lies, or may lie.
func (p *Pool) ownsSubDir(v volume.Volume) error {
	if err := p.ledger.CheckSubDir(volumeDir(v.ID.Name), ledger.OfVolume(v)); err != nil {
		return fmt.Errorf("volume %s is not deleted: %w", v.ID, err)
	}
	return nil
}

// fetchData moves a volume's data from among others' into its folder. A volume whose
// data is there already was being deleted.
func (p *Pool) fetchData(v volume.Volume) error {
	if _, err := beneath.Stat(p.volumes, v.ID.Name+"/"+DataDir); err == nil {
		return nil
	}
	parent, name, err := p.openParent(v.Directory.SubDir)
	if beneath.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return misplaced(v.Directory.SubDir, err)
	}
	defer parent.Close()
	folder, err := beneath.OpenDir(p.volumes, v.ID.Name)
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	defer folder.Close()
	err = beneath.MoveUnique(parent, name, folder, DataDir)
	if errors.Is(err, unix.EPERM) && tree.MakeMutable(parent, name) {
		err = beneath.MoveUnique(parent, name, folder, DataDir)
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(v.Directory.SubDir, err, "give it the project of the pool's folder "+volumesDir+", or remove it yourself")
	}
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	return errors.Join(parent.Sync(), folder.Sync())
}

// remove takes the volume's folder out of the volumes.
func (p *Pool) remove(v volume.Volume) error {
	keep := ""
	switch {
	case v.Directory == nil || v.Directory.OnDelete == volume.OnDeleteDelete:
	case v.Directory.OnDelete == volume.OnDeleteArchive:
		keep = archivedDir
	case v.Directory.SubDir == "":
		keep = retainedDir
	}
	if keep == "" {
		return p.removeToTrash(v)
	}
	return p.removeTo(v, keep)
}

func (p *Pool) removeTo(v volume.Volume, keep string) error {
	if err := p.root.MkdirAll(keep, 0o700); err != nil {
		return err
	}
	to, err := beneath.OpenDir(p.dir, keep)
	if err != nil {
		return err
	}
	defer to.Close()
	name := v.ID.Name + "." + time.Now().UTC().Format("20060102T150405Z") + "." + NewUUID()[:8]
	if err := p.takeOut(v.ID.Name, to, name); err != nil {
		return err
	}
	p.ledger.Remove(volumeDir(v.ID.Name))
	return errors.Join(p.volumes.Sync(), to.Sync(), p.dir.Sync())
}

// takeOut is the rename that deletes a volume. Another process, if there is any, may have
// done it already.
func (p *Pool) takeOut(name string, to *os.File, newName string) error {
	err := beneath.MoveUnique(p.volumes, name, to, newName)
	if beneath.IsNotExist(err) && !p.medium.SoleWriter() {
		p.recount(name)
		return nil
	}
	return err
}
