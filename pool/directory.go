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

	"github.com/trivet-csi/trivet/clone"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/quota"
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
	if !p.Shared() {
		if _, err := p.Limits(); err != nil {
			return err
		}
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
		data, err := p.makeData(dir, v, content)
		if err != nil {
			return err
		}
		defer data.Close()
		if err := p.fillData(data, v, content); err != nil {
			return err
		}
		if err := prepare(data, content == nil); err != nil || p.Shared() {
			return err
		}
		return data.Sync()
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
	return p.limitCopy(v)
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
	return err
}

func (c *Content) fill(dir *os.File) error {
	if c.done {
		return nil
	}
	return c.Copy(dir)
}

// refuseAdoption is adopt for a volume that is to be a copy.
func (p *Pool) refuseAdoption(v volume.Volume) error {
	if !hasSubDir(v) {
		return nil
	}
	_, err := statBeneath(p.dir, v.Directory.SubDir)
	if isNotExist(err) {
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
	dir, err := openDirBeneath(p.dir, v.Directory.SubDir)
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
	from, err := openRootIn(p.tmp, entry)
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
	from, err := openDirBeneath(p.tmp, entry)
	if err != nil {
		return err
	}
	defer from.Close()
	err = renameat(from, DataDir, parent, path.Base(subDir))
	if err == nil && !p.Shared() { // NFS makes names durable before it answers
		err = parent.Sync()
	}
	if err == nil {
		crashpoint.Here(crashpoint.CreatePlaced)
		return nil
	}
	if _, left := statBeneath(from, DataDir); isNotExist(left) && p.Shared() { // the reply was lost
		return nil
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(subDir, err, "use another "+volume.ParamSubDir+", or make the directory there yourself, and it is adopted")
	}
	return misplaced(subDir, err)
}

// placingFile is in the folder of a volume that is being made when its data is moved
// to its place among others', and names that place.
const placingFile = "placing"

// takeBack removes the directory that a create which came to nothing has placed among
// others': if it is empty, and no volume but own, which is not there, has it. In a
// shared pool nobody else makes or removes such volumes meanwhile.
func (p *Pool) takeBack(entry, own string) error {
	subDir, err := p.readBeneath(p.tmp, entry+"/"+placingFile)
	if err != nil || volume.CheckSubDir(string(subDir)) != nil {
		return nil // it was not to be placed, or it is not this driver's
	}
	if _, err := statBeneath(p.tmp, entry+"/"+DataDir); !isNotExist(err) { // it was not placed
		return err
	}
	if _, err := p.Lookup(own); own != "" && !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if p.ledger.subDirFree(volumeDir(own), stake{subDir: string(subDir)}) != nil {
		return nil
	}
	return p.removeEmpty(string(subDir))
}

func (p *Pool) removeEmpty(dir string) error {
	parent, err := openDirBeneath(p.dir, path.Dir(dir))
	if err != nil {
		return ignoreGone(err)
	}
	defer parent.Close()
	err = unix.Unlinkat(int(parent.Fd()), path.Base(dir), unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return ignoreGone(err)
}

func ignoreGone(err error) error {
	if isGone(err) {
		return nil
	}
	return err
}

// makeParents opens a folder of the pool, and makes what is missing of its path. In a
// node-local pool only root may pass through it: a user of the node must not be able to run
// what a tenant has made set-user-ID.
func (p *Pool) makeParents(dir string) (*os.File, error) {
	mode := uint32(0o700)
	if p.Shared() {
		mode = 0o755
	}
	at, err := openDirBeneath(p.dir, ".")
	if err != nil || dir == "." {
		return at, err
	}
	for _, name := range strings.Split(dir, "/") {
		next, err := openOrMake(at, name, mode)
		if err == nil && !p.Shared() {
			err = at.Sync()
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
	parent, err = openDirBeneath(p.dir, path.Dir(subDir))
	return parent, path.Base(subDir), err
}

func openOrMake(at *os.File, name string, mode uint32) (*os.File, error) {
	next, err := openDirBeneath(at, name)
	if !errors.Is(err, unix.ENOENT) {
		return next, err
	}
	if err := unix.Mkdirat(int(at.Fd()), name, mode); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdir", Path: at.Name() + "/" + name, Err: err}
	}
	return openDirBeneath(at, name)
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

// OpenDirectory opens a directory volume's data, for stat and such (O_PATH). No part
// of its path may be a link or on another filesystem. ErrDamaged if it is missing, or
// that.
func (p *Pool) OpenDirectory(v volume.Volume) (*os.File, error) {
	where := DirectoryPath(v)
	f, err := openBeneath(p.dir, where, unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		if err := p.Check(); err != nil {
			return nil, err
		}
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its directory %s is missing: restore it", v.ID.Name, p.cfg.Name, where)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EXDEV):
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: a part of %s is not the directory that this driver made (%w): put that back", v.ID.Name, p.cfg.Name, where, err)
	case p.Shared() && p.saysNothing(err):
		return nil, p.unreadable(err)
	}
	return f, err
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

// subDirFree refuses a place among others' directories that a volume has or may have,
// or that is in one or around one. Volumes that outlive their records may share one.
func (l *ledger) subDirFree(dir string, want stake) error {
	if want.subDir == "" {
		return nil
	}
	for other, have := range l.stakes {
		switch {
		case other == dir || have.retain && want.retain:
		case have.unread && !want.retain:
			return volume.Errorf(volume.ErrPrecondition, "%s %q: it may be the directory of volume %q, whose record cannot be read: run the driver that wrote %s/%s, restore it from a backup, or, if there is no such volume any more, move its folder away",
				volume.ParamSubDir, want.subDir, path.Base(other), other, recordFile)
		case have.subDir != "" && overlap(have.subDir, want.subDir):
			return volume.Errorf(volume.ErrPrecondition, "%s %q: %s of volume %q is there: use another, or %s=%s for both",
				volume.ParamSubDir, want.subDir, have.subDir, path.Base(other), volume.ParamOnDelete, volume.OnDeleteRetain)
		}
	}
	return nil
}

// overlap tells whether two directories are one, or one is in the other.
func overlap(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
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
	defer p.ledger.begin(volumeDir(v.ID.Name))()
	if !hasSubDir(v) || v.Directory.OnDelete == volume.OnDeleteRetain {
		if err := p.Unpublished(v.ID); err != nil {
			return err
		}
		return p.explain(p.remove(v))
	}
	// No other volume may have that directory, or get it now.
	ctx = context.WithoutCancel(ctx)
	return p.explain(p.exclusively(ctx, func(r *round) error {
		if err := p.orReread(ctx, r, func() error { return p.ownsSubDir(v) }); err != nil {
			return err
		}
		if err := p.Unpublished(v.ID); err != nil {
			return err
		}
		if err := p.fetchData(v); err != nil {
			return err
		}
		return p.remove(v)
	}))
}

// exclusively runs f while nobody else makes or removes a volume of a shared pool
// whose data lies among others' directories. There is no round in other pools.
func (p *Pool) exclusively(ctx context.Context, f func(*round) error) error {
	if !p.Shared() {
		return f(nil)
	}
	return p.inRound(ctx, func(r *round) error {
		if err := p.refreshed(ctx, r); err != nil {
			return err
		}
		return f(r)
	})
}

// ownsSubDir refuses a volume in whose directory another one lies, or may lie.
func (p *Pool) ownsSubDir(v volume.Volume) error {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if err := p.ledger.subDirFree(volumeDir(v.ID.Name), stakeOf(v)); err != nil {
		return fmt.Errorf("volume %s is not deleted: %w", v.ID, err)
	}
	return nil
}

// fetchData moves a volume's data from among others' into its folder. A volume whose
// data is there already was being deleted.
func (p *Pool) fetchData(v volume.Volume) error {
	if _, err := statBeneath(p.volumes, v.ID.Name+"/"+DataDir); err == nil {
		return nil
	}
	parent, name, err := p.openParent(v.Directory.SubDir)
	if isNotExist(err) {
		return nil
	}
	if err != nil {
		return misplaced(v.Directory.SubDir, err)
	}
	defer parent.Close()
	folder, err := openDirBeneath(p.volumes, v.ID.Name)
	if err != nil {
		return orGone(err)
	}
	defer folder.Close()
	err = moveUnique(parent, name, folder, DataDir)
	if errors.Is(err, unix.EPERM) && !p.Shared() && release(parent, name) {
		err = moveUnique(parent, name, folder, DataDir)
	}
	if errors.Is(err, unix.EXDEV) {
		return unmovable(v.Directory.SubDir, err, "give it the project of the pool's folder "+volumesDir+", or remove it yourself")
	}
	if err != nil {
		return orGone(err)
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
	to, err := openDirBeneath(p.dir, keep)
	if err != nil {
		return err
	}
	defer to.Close()
	name := v.ID.Name + "." + time.Now().UTC().Format("20060102T150405Z") + "." + NewUUID()[:8]
	if err := p.takeOut(v.ID.Name, to, name); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	p.ledger.remove(volumeDir(v.ID.Name))
	p.ledger.mu.Unlock()
	return errors.Join(p.volumes.Sync(), to.Sync(), p.dir.Sync())
}

// takeOut is the rename that deletes a volume. In a shared pool another process may
// have done it already.
func (p *Pool) takeOut(name string, to *os.File, newName string) error {
	err := moveUnique(p.volumes, name, to, newName)
	if p.Shared() && isNotExist(err) {
		p.recount(name)
		return nil
	}
	return err
}
