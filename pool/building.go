package pool

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// building makes and clears the entries of tmp: what is not a volume or snapshot yet.
type building struct {
	*store
	deleted *Trash
}

// makeTmp makes the folder of a volume that is being made.
func (b *building) makeTmp(ctx context.Context, entry string) error {
	err := unix.Mkdirat(int(b.tmp.Fd()), entry, 0o700)
	if errors.Is(err, unix.EEXIST) { // a call that failed could not clean up
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

// Discard abandons an entry of tmp that nobody makes any more.
func (b *building) Discard(ctx context.Context, entry string) error {
	ctx = context.WithoutCancel(ctx)
	return b.medium.Exclusively(ctx, func(func(func() error) error) error { return b.abandon(ctx, entry, "") })
}

// abandon clears what was being made of the volume own, or of one that is not known. What
// another process may still commit goes to the trash, by a rename: that process commits all
// or nothing of it. So does what takes time to be removed.
//
// An entry whose directory could not be taken back stays for another try. Not so on an export
// when the create that made it fails: it would count as reserved while this process lives.
func (b *building) abandon(ctx context.Context, entry, own string) error {
	err := b.takeBack(entry, own)
	if err != nil && (own == "" || b.medium.SoleWriter()) {
		return err
	}
	return errors.Join(err, b.clear(ctx, entry))
}

// clear is abandon for what is still in the entry.
func (b *building) clear(ctx context.Context, entry string) error {
	onStorage, err := b.abandonOnStorage(entry)
	if err != nil {
		return err
	}
	// A limit has to be given back when the directory is gone, and snapshots may be large.
	later := onStorage || b.hasDirectory(entry) || strings.HasSuffix(entry, snapshotSuffix)
	if !later && b.medium.SoleWriter() {
		return b.deleted.removeTree(ctx, b.tmp, entry)
	}
	to := entry + "." + NewUUID()[:8]
	if err := beneath.Rename(b.tmp, entry, b.trash, to); err != nil {
		return beneath.IgnoreGone(err)
	}
	if onStorage { // which may have data of it
		b.ledger.Set(trashDir+"/"+to, b.deleted.readTrashReservation(to))
	}
	b.ledger.Remove(tmpDir + "/" + entry)
	b.deleted.reaper.add(to)
	return nil
}

// hasDirectory tells whether an entry of tmp has a directory that may be limited, or had one
// that was moved out of it.
func (b *building) hasDirectory(entry string) bool {
	if _, err := beneath.Stat(b.tmp, entry+"/"+DataDir); err == nil {
		return true
	}
	_, err := beneath.Stat(b.tmp, entry+"/"+placingFile)
	return err == nil
}

// takeBack removes the directory that a failed create has placed outside the volume's folder,
// if it is empty and belongs to no volume. own is the volume of that create, if it is known. In a
// shared pool nobody else makes or removes such volumes meanwhile.
func (b *building) takeBack(entry, own string) error {
	subDir, err := b.files.Read(b.tmp, entry+"/"+placingFile)
	if err != nil || volume.CheckSubDir(string(subDir)) != nil {
		return nil // nothing was to be placed, or the driver did not write this
	}
	if _, err := beneath.Stat(b.tmp, entry+"/"+DataDir); !beneath.IsNotExist(err) { // it was not placed
		return err
	}
	if _, err := b.Lookup(own); own != "" && !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	return b.ledger.IfSubDirFree(volumeDir(own), string(subDir), func() error { return b.removeEmpty(string(subDir)) })
}

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
