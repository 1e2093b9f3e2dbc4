package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
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
	// archivedDir and retainedDir contain the folders of deleted volumes whose data is not
	// deleted (see volume.OnDelete).
	archivedDir = "archived"
	retainedDir = "retained"
)

// DirectoryPath is the path of a directory volume's data below its pool.
func DirectoryPath(v volume.Volume) string {
	if v.Directory.SubDir != "" {
		return v.Directory.SubDir
	}
	return volumePath(v.ID.Name, DataDir)
}

// hasSubDir tells whether a volume's data is outside its folder.
func hasSubDir(v volume.Volume) bool { return v.Directory != nil && v.Directory.SubDir != "" }

// CreateDirectory is Create for a directory volume. The directory is a copy of content, or empty if
// content is nil. prepare sets its mode and owner; empty is false for a copy, and for an existing
// directory that is adopted. ErrPrecondition if the directory's path is in use, or contains a link.
//
// In a node-local pool the directory is limited to the volume's capacity, unless it is adopted
// or the filesystem cannot limit it; see Limits.
func (p *Pool) CreateDirectory(ctx context.Context, v volume.Volume, content *Content, prepare func(dir *os.File, empty bool) error) error {
	limits, err := p.Quotas.Limits()
	if err != nil {
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
		data, err := p.Quotas.makeData(dir, v, content, limits)
		if err != nil {
			return err
		}
		defer data.Close()
		if content != nil {
			if err := content.fill(data); err != nil {
				return err
			}
			if err := p.Quotas.limitCopy(v); err != nil {
				return err
			}
		}
		if err := prepare(data, content == nil); err != nil {
			return err
		}
		return p.medium.SyncNames(data)
	}
	return p.create(ctx, v, ledger.OfVolume(v), build, func(entry string) error {
		if adopted || !hasSubDir(v) {
			return nil
		}
		return p.placeData(entry, v.Directory.SubDir)
	})
}

// Content is the source of a new directory's data. A nil Content means that the directory is empty.
type Content struct {
	// Dir is the open directory that is copied; nil if the content is received from another node.
	Dir *os.File
	// Copy copies Dir into an empty directory. It is not called if the filesystem has cloned
	// the whole directory.
	Copy func(to *os.File) error
	// cloned is true after the filesystem has cloned the whole directory.
	cloned bool
}

// makeDir makes the directory DataDir, with its content if the filesystem can clone the content.
func (c *Content) makeDir(fs *quota.FS, parent *os.File) error {
	if c == nil || c.Dir == nil {
		return fs.MakeDir(parent, DataDir)
	}
	err := clone.Subvolume(parent, DataDir, c.Dir, false)
	if errors.Is(err, clone.ErrNotSubvolume) || errors.Is(err, unix.EXDEV) {
		return fs.MakeDir(parent, DataDir)
	}
	c.cloned = err == nil
	return CopyError(err)
}

// fill copies the content into a directory that makeDir has made, unless it was cloned.
func (c *Content) fill(dir *os.File) error {
	if c.cloned {
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

// refuseAdoption refuses a copy whose directory exists already.
func (p *Pool) refuseAdoption(v volume.Volume) error {
	if !hasSubDir(v) {
		return nil
	}
	_, err := beneath.Stat(p.dir, v.Directory.SubDir)
	if beneath.IsNotExist(err) {
		return nil
	}
	if err == nil {
		err = volume.Errorf(volume.ErrPrecondition, "%s %q: this path exists already, so volume_content_source cannot be copied there: remove it, or use another %[1]s", volume.ParamSubDir, v.Directory.SubDir)
	}
	return err
}

// adopt prepares the directory that already exists at the volume's subDir. It returns false if there
// is none.
func (p *Pool) adopt(v volume.Volume, prepare func(dir *os.File, empty bool) error) (bool, error) {
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
		return false, volume.Errorf(volume.ErrPrecondition, "%s %q: this directory exists already, so it cannot be limited, and pool %q has quota: %s: use another %[1]s, or a pool without that setting",
			volume.ParamSubDir, v.Directory.SubDir, p.cfg.Name, QuotaRequired)
	}
	return true, prepare(dir, false)
}

// placeData moves a prepared directory from an entry of tmp to its subDir outside the volume's
// folder, so that subDir is never incomplete.
func (p *Pool) placeData(entry, subDir string) error {
	parent, err := p.makeParents(path.Dir(subDir))
	if err != nil {
		return misplaced(subDir, err)
	}
	defer parent.Close()
	root, err := beneath.OpenRoot(p.tmp, entry)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := atomicfile.Create(root, placingFile, []byte(subDir)); err != nil {
		return err
	}
	from, err := root.Open(".")
	if err != nil {
		return err
	}
	defer from.Close()
	err = beneath.Rename(from, DataDir, parent, path.Base(subDir))
	if err != nil {
		if _, statErr := beneath.Stat(from, DataDir); beneath.IsNotExist(statErr) { // the reply was lost
			err = nil
		}
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(subDir, err, "use another "+volume.ParamSubDir+", or create the directory there and use "+volume.ParamOnDelete+": "+string(volume.OnDeleteRetain))
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

// placingFile is a file in an entry of tmp. It is written before the entry's data is moved to a
// subDir outside the volume's folder, and contains that subDir.
const placingFile = "placing"

// makeParents opens a folder of the pool, and makes the missing folders of its path.
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

// openOrMake opens a directory in an open one, and makes it if it does not exist.
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

// misplaced explains why a volume's directory cannot be opened or made at its subDir.
func misplaced(subDir string, err error) error {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return volume.Errorf(volume.ErrPrecondition, "%s %q: a part of this path is a link or not a directory: remove that part, or use another %[1]s: %[3]w", volume.ParamSubDir, subDir, err)
	}
	if errors.Is(err, tree.ErrMounted) {
		return volume.Errorf(volume.ErrPrecondition, "%s %q: a part of this path is on another filesystem than the pool (%w): use another %[1]s; for a filesystem of an NFS server, use a static volume", volume.ParamSubDir, subDir, err)
	}
	return fmt.Errorf("%s %q: %w", volume.ParamSubDir, subDir, err)
}

// unmovable explains an EXDEV of a rename on what looks like one filesystem.
func unmovable(subDir string, err error, remedy string) error {
	return volume.Errorf(volume.ErrPrecondition, "%s %q: no directory can be moved between this path and the rest of the pool (%w): one of them is in a subvolume, or in a directory that passes its quota project on to its content: %s",
		volume.ParamSubDir, subDir, err, remedy)
}

// Status returns the mode, owner and group of a directory that this process has just opened or changed.
// Its statx(2) sends no request to an NFS server, because the reply to the open or change contained the
// attributes.
func Status(dir *os.File) (mode, uid, gid uint32, err error) {
	var st unix.Statx_t
	err = unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &st)
	if err != nil {
		err = &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	return uint32(st.Mode), st.Uid, st.Gid, err
}

// Remove deletes a volume by one rename of its folder, durable when it returns. It moves the folder
// to the trash: its space is freed in the background, and counts as promised until then. With
// onDelete archive or retain it moves the folder, with the record, to archived/<name>.<time>.<random>
// or retained/<name>.<time>.<random>; a retained subDir is not moved. ErrPrecondition for a volume
// that is published, or whose directory contains the directory of another volume. If the volume has an
// image, the caller holds the lock of the image. The header of an encrypted volume is erased when Remove returns, or in the
// background if that fails.
func (p *Pool) Remove(ctx context.Context, v volume.Volume) error {
	if err := p.Check(); err != nil {
		return err
	}
	dir := FolderPath(v.ID.Name)
	defer p.ledger.Begin(dir)()
	if !hasSubDir(v) || v.Directory.OnDelete == volume.OnDeleteRetain {
		if err := p.Attachments.CheckUnpublished(v.ID); err != nil {
			return err
		}
		return p.medium.Explain(p.moveOut(ctx, v))
	}
	// No other process may make a volume with this subDir during the removal.
	ctx = context.WithoutCancel(ctx)
	return p.medium.Explain(p.medium.Exclusively(ctx, func(recheck func(func() error) error) error {
		err := recheck(func() error { return p.ledger.CheckSubDir(dir, ledger.OfVolume(v)) })
		if err != nil {
			return fmt.Errorf("volume %s is not deleted: %w", v.ID, err)
		}
		if err := p.Attachments.CheckUnpublished(v.ID); err != nil {
			return err
		}
		if err := p.fetchData(v); err != nil {
			return err
		}
		return p.moveOut(ctx, v)
	}))
}

// fetchData moves a volume's data from its subDir into its folder, unless an earlier call to delete
// the volume has done that.
func (p *Pool) fetchData(v volume.Volume) error {
	if _, err := beneath.Stat(p.volumes, v.ID.Name+"/"+DataDir); err == nil {
		return nil
	}
	name := path.Base(v.Directory.SubDir)
	parent, err := beneath.OpenDir(p.dir, path.Dir(v.Directory.SubDir))
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
	if errors.Is(err, unix.EPERM) && tree.MakeMutable(parent, name) { // a user of the volume made it immutable
		err = beneath.MoveUnique(parent, name, folder, DataDir)
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(v.Directory.SubDir, err, "move the directory elsewhere, or remove it, and the volume can be deleted; or set its quota project to that of the pool's folder "+volumesDir)
	}
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	return errors.Join(parent.Sync(), folder.Sync())
}

// moveOut moves the volume's folder to the trash, or to archivedDir or retainedDir.
func (p *Pool) moveOut(ctx context.Context, v volume.Volume) error {
	switch {
	case v.Directory == nil || v.Directory.OnDelete == volume.OnDeleteDelete:
	case v.Directory.OnDelete == volume.OnDeleteArchive:
		return p.keepIn(v, archivedDir)
	case v.Directory.SubDir == "":
		return p.keepIn(v, retainedDir)
	}
	// The folder of a volume with a retained subDir contains no data, so it also goes to the trash.
	entry := v.ID.Name + "." + uuid.NewString()[:8]
	if err := p.takeOut(v.ID.Name, p.trash, entry); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteRenamed)
	p.ledger.Move(FolderPath(v.ID.Name), trashDir+"/"+entry, ledger.OfVolume(v))
	defer p.Trash.reaper.add(entry)
	if err := errors.Join(p.volumes.Sync(), p.trash.Sync()); err != nil {
		return err
	}
	if v.Encryption != nil {
		p.Trash.eraseNow(ctx, entry)
	}
	crashpoint.Here(crashpoint.DeleteDone)
	return nil
}

// keepIn moves the folder of a deleted volume to archivedDir or retainedDir.
func (p *Pool) keepIn(v volume.Volume, dir string) error {
	if err := p.root.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	to, err := beneath.OpenDir(p.dir, dir)
	if err != nil {
		return err
	}
	defer to.Close()
	name := v.ID.Name + "." + time.Now().UTC().Format("20060102T150405Z") + "." + uuid.NewString()[:8]
	if err := p.takeOut(v.ID.Name, to, name); err != nil {
		return err
	}
	p.ledger.Remove(FolderPath(v.ID.Name))
	return errors.Join(p.volumes.Sync(), to.Sync(), p.dir.Sync())
}

// takeOut moves the folder of the volume name to newName in the folder to, which deletes the volume. It
// succeeds if another process has deleted the volume.
func (p *Pool) takeOut(name string, to *os.File, newName string) error {
	err := beneath.MoveUnique(p.volumes, name, to, newName)
	if beneath.IsNotExist(err) && !p.medium.SoleWriter() {
		p.recount(name)
		return nil
	}
	return err
}
