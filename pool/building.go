package pool

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// building makes and clears the entries of tmp: folders that become volumes or sets of
// snapshots.
type building struct {
	*store
	deleted *Trash
}

// makeTmp makes the folder of a volume or set in tmp.
func (b *building) makeTmp(ctx context.Context, entry string) error {
	err := unix.Mkdirat(int(b.tmp.Fd()), entry, 0o700)
	if errors.Is(err, unix.EEXIST) { // an earlier call failed, and could not remove the entry
		if err = b.abandon(ctx, entry, ""); err == nil {
			err = unix.Mkdirat(int(b.tmp.Fd()), entry, 0o700)
		}
	}
	if err != nil {
		return b.medium.ExplainWrite(&fs.PathError{Op: "mkdir", Path: tmpDir + "/" + entry, Err: err})
	}
	crashpoint.Here(crashpoint.CreateReserved)
	return nil
}

// commit gives an entry of tmp its name among the volumes or snapshots. If the rename fails, the
// record with that name shows whether it was done nevertheless, because the reply may have been lost.
// read reads the token in that record. ErrExists if the record has another token.
func (b *building) commit(entry string, to *os.File, name, token string, read func() (string, error)) error {
	failed := beneath.Rename(b.tmp, entry, to, name)
	if failed == nil {
		return nil
	}
	kind := "volume"
	if to == b.snapshots {
		kind = "snapshot"
	}
	existing, err := read()
	switch {
	case err == nil && existing == token:
		return nil
	case err == nil:
		return volume.Errorf(ErrExists, "%s %q in pool %q was made by another process meanwhile: retry", kind, name, b.cfg.Name)
	case !errors.Is(err, volume.ErrNotFound):
		return err
	case beneath.IsNotExist(failed):
		return volume.Errorf(volume.ErrUnavailable, "%s %q in pool %q: another process has removed its incomplete folder: retry", kind, name, b.cfg.Name)
	case errors.Is(failed, fs.ErrExist): // EEXIST, ENOTEMPTY: another process is deleting it
		return volume.Errorf(ErrExists, "%s %q in pool %q is being deleted by another process: retry", kind, name, b.cfg.Name)
	}
	return failed
}

// Discard abandons an entry of tmp whose process has ended.
func (b *building) Discard(ctx context.Context, entry string) error {
	ctx = context.WithoutCancel(ctx)
	return b.medium.Exclusively(ctx, func(func(func() error) error) error { return b.abandon(ctx, entry, "") })
}

// abandon removes an entry of tmp. own is the name of the volume that the entry was made for; an empty
// name means that it is not known, or that the entry is a set of snapshots. An entry that another
// process could still commit is moved to the trash by one rename, so that a commit finds all of it or
// nothing. An entry that takes time to be removed is moved to the trash too.
//
// If the directory in the subDir of the volume cannot be removed, the entry stays, for another attempt.
// On an export the entry of a failed create is removed nevertheless, because its capacity would count as
// reserved until this process ends.
func (b *building) abandon(ctx context.Context, entry, own string) error {
	err := b.removePlaced(entry, own)
	if err != nil && (own == "" || b.medium.SoleWriter()) {
		return err
	}
	return errors.Join(err, b.removeEntry(ctx, entry))
}

// removeEntry removes an entry of tmp, or moves it to the trash; see abandon.
func (b *building) removeEntry(ctx context.Context, entry string) error {
	onStorage, err := b.abandonOnStorage(b.tmp, entry)
	if err != nil {
		return err
	}
	// The quota ID of a directory is released after the directory is removed, and snapshots may
	// be large.
	later := onStorage || b.hasDirectory(entry) || strings.HasSuffix(entry, snapshotSuffix)
	if !later && b.medium.SoleWriter() {
		return b.deleted.removeTree(ctx, b.tmp, entry)
	}
	to := entry + "." + uuid.NewString()[:8]
	if err := beneath.Rename(b.tmp, entry, b.trash, to); err != nil {
		return beneath.IgnoreGone(err)
	}
	r, counted := b.ledger.Remove(tmpDir + "/" + entry)
	if onStorage { // the volume's data takes space until it is reclaimed
		b.ledger.Set(trashDir+"/"+to, b.deleted.entryReservation(to))
	} else if counted && b.medium.SoleWriter() { // Temporary
		b.ledger.Set(trashDir+"/"+to, r.InTrash())
	}
	b.deleted.reaper.add(to)
	return nil
}

// hasDirectory tells whether an entry of tmp contains a volume's directory, which may have a quota
// ID, or contained one that was moved to its subDir.
func (b *building) hasDirectory(entry string) bool {
	if _, err := beneath.Stat(b.tmp, entry+"/"+DataDir); err == nil {
		return true
	}
	_, err := beneath.Stat(b.tmp, entry+"/"+placingFile)
	return err == nil
}

// removePlaced removes the directory that a failed create has moved to its subDir outside the
// volume's folder, if the directory is empty and belongs to no volume. own is the volume's name; an
// empty name means that it is not known. In a shared pool the caller prevents other processes from
// making or removing volumes with a subDir meanwhile.
func (b *building) removePlaced(entry, own string) error {
	subDir, err := b.files.Read(b.tmp, entry+"/"+placingFile)
	if err != nil || volume.CheckSubDir(string(subDir)) != nil {
		return nil //nolint:nilerr // there was nothing to place, or the driver did not write the file
	}
	if _, err := beneath.Stat(b.tmp, entry+"/"+DataDir); !beneath.IsNotExist(err) { // the directory was not moved
		return err
	}
	if _, err := b.Lookup(own); own != "" && !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	return b.ledger.IfSubDirFree(FolderPath(own), string(subDir), func() error { return b.removeEmpty(string(subDir)) })
}

// removeEmpty removes a directory below the pool, if it is an empty directory.
func (b *building) removeEmpty(dir string) error {
	parent, err := beneath.OpenDir(b.dir, path.Dir(dir))
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	defer parent.Close()
	err = unix.Unlinkat(int(parent.Fd()), path.Base(dir), unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return beneath.IgnoreGone(err)
}
