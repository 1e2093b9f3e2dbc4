package pool

import (
	"context"
	"errors"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// indexFile is the index of a directory that is being received (clone.Packed), in the folder of the new volume. When the index is
// verified, all entries of the directory are made, so that the data is written to the files of the volume.
const indexFile = "index"

// reservation is that of the volume while it is received.
func (x *Partial) reservation() ledger.Reservation {
	r := ledger.OfVolume(x.v)
	if x.content.Tree != nil {
		r.Bytes += x.content.Tree.IndexSize
	}
	return r
}

// continuesTree is continues for a directory.
func (x *Partial) continuesTree(had progress) bool {
	before, err := x.pool.receivedVolume(x.v.ID.Name)
	if err != nil || before.Directory == nil || before.Directory.SubDir != x.v.Directory.SubDir || before.Capacity != x.v.Capacity {
		return false
	}
	if !had.Made {
		return had.Verified <= x.content.Tree.IndexSize
	}
	x.v.Directory.Quota = before.Directory.Quota
	_, err = beneath.Stat(x.pool.dir, receivedPath(x.v.ID.Name)+"/"+DataDir)
	return err == nil && had.Verified >= x.content.Tree.IndexSize
}

// openTree opens the index, and the directory if all its entries were made.
func (x *Partial) openTree() (err error) {
	if err := x.pool.refuseAdoption(x.v); err != nil {
		return err
	}
	if x.Image, err = x.dir.OpenFile(indexFile, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return err
	}
	if x.Made {
		x.directory, err = x.openData()
		return err
	}
	if err := x.Image.Truncate(x.Verified); err != nil {
		return err
	}
	return x.discardTree()
}

// openData opens the directory.
func (x *Partial) openData() (*os.File, error) {
	folder, err := x.dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	return beneath.OpenDir(folder, DataDir)
}

// discardTree moves a directory of which only some entries were made to the trash, which then releases its quota ID.
func (x *Partial) discardTree() error {
	p := x.pool
	folder, err := x.dir.Open(".")
	if err != nil {
		return err
	}
	defer folder.Close()
	if _, err := beneath.Stat(folder, DataDir); err != nil {
		return beneath.IgnoreGone(err)
	}
	name := x.v.ID.Name + "." + uuid.NewString()[:8]
	if err := unix.Mkdirat(int(p.trash.Fd()), name, 0o700); err != nil {
		return &os.PathError{Op: "mkdirat", Path: trashDir + "/" + name, Err: err}
	}
	entry, err := beneath.OpenDir(p.trash, name)
	if err != nil {
		return err
	}
	defer entry.Close()
	err = beneath.Rename(folder, DataDir, entry, DataDir)
	p.ledger.Set(trashDir+"/"+name, ledger.Reservation{Backend: ledger.UnknownBackend})
	p.Trash.reaper.add(name)
	return err
}

// beginTree continues with the directory, or begins with its entries if the index is complete.
func (x *Partial) beginTree() error {
	size := x.content.Tree.IndexSize
	switch {
	case x.Made:
		var err error
		x.stored = x.Bytes - size
		x.tree, err = clone.OpenUnpacked(x.target(), x.Verified)
		return x.pool.medium.ExplainWrite(err)
	case x.Verified == size:
		return x.makeTree()
	}
	return x.pool.medium.ExplainWrite(x.Image.Truncate(size))
}

// target describes the directory.
func (x *Partial) target() clone.Target {
	t := x.content.Tree
	return clone.Target{Root: x.directory, Index: x.Image, IndexSize: t.IndexSize, Size: t.Size, Each: x.each}
}

// makeTree makes the directory, and all its entries without data. The record gets the quota ID of the directory.
func (x *Partial) makeTree() error {
	p := x.pool
	limits, err := p.Quotas.Limits()
	if err != nil {
		return err
	}
	if x.directory, err = p.Quotas.makeData(x.dir, x.v, &Content{}, limits); err != nil {
		return err
	}
	record, err := x.v.MarshalRecord()
	if err == nil {
		err = atomicfile.Write(x.dir, recordFile, record)
	}
	if err != nil {
		return err
	}
	p.ledger.Set(receivedPath(x.v.ID.Name), x.reservation())
	t := x.target()
	if kind := x.limited(); kind == quota.XFS || kind == quota.Ext4 {
		t.MaxInodes = p.Quotas.limitOf(x.v, kind).Inodes
	}
	x.tree, err = clone.Unpack(t)
	switch {
	case errors.Is(err, clone.ErrIndex):
		err = volume.Errorf(volume.ErrDamaged, "the other node has sent a directory that cannot be created: retry; the transfer begins again: %w", err)
		return errors.Join(err, x.restart(false))
	case errors.Is(err, clone.ErrTooMany):
		return volume.Errorf(volume.ErrOutOfRange, "capacity_range: a volume with %s may have %d files and directories, and its content has more: request more capacity", volume.ExactSize(x.v.Capacity), t.MaxInodes)
	case err != nil:
		return x.explainWrite(err)
	}
	crashpoint.Here(crashpoint.ReceiveMade)
	x.Made = true
	return nil
}

// limited is the kind of the limit of the directory.
func (x *Partial) limited() quota.Kind {
	if x.v.Directory.Quota == nil {
		return quota.None
	}
	return quota.Kind(x.v.Directory.Quota.Kind)
}

// writeTree is WriteAt for a directory. The driver itself limits the data to the capacity, because ext4 lets it exceed the limit of
// the directory, and other filesystems may have none. On btrfs, which counts compressed data, the limit suffices.
func (x *Partial) writeTree(b []byte, at int64) (n int, err error) {
	switch size := x.content.Tree.IndexSize; {
	case at+int64(len(b)) <= size:
		n, err = x.Image.WriteAt(b, at)
		return n, x.pool.medium.ExplainWrite(err)
	case x.tree == nil:
		return 0, volume.Errorf(volume.ErrDamaged, "the other node has sent no checksum of the index of a directory before the content of its files: check which driver runs there")
	}
	if x.stored += int64(len(b)); x.stored > x.v.Capacity && x.limited() != quota.Btrfs {
		return 0, x.tooLarge()
	}
	n, err = x.tree.WriteAt(b, at)
	return n, x.explainWrite(err)
}

func (x *Partial) tooLarge() error {
	return volume.Errorf(volume.ErrOutOfRange, "capacity_range: the volume would have %s, and its content takes more: request more capacity", volume.ExactSize(x.v.Capacity))
}

// explainWrite explains an error of writing to the directory, whose own limit can be the reason.
func (x *Partial) explainWrite(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		if u, ok, usageErr := x.pool.Quotas.Usage(x.v); ok && usageErr == nil && u.Bytes >= x.v.Capacity {
			return x.tooLarge()
		}
	}
	return x.pool.medium.ExplainWrite(CopyError(err))
}

// CommitDirectory is Commit for a directory. prepare sets its mode and owner. ErrOutOfRange if the content exceeds the limit of
// the volume.
func (x *Partial) CommitDirectory(ctx context.Context, prepare func(dir *os.File, empty bool) error) error {
	p, v := x.pool, x.v
	if err := x.tree.Finish(ctx); err != nil {
		return x.explainWrite(err)
	}
	complete := func(dir *os.Root) error {
		err := dir.Remove(indexFile)
		if err == nil {
			err = p.refuseAdoption(v)
		}
		if err == nil {
			err = p.Quotas.limitCopy(v)
		}
		if err == nil {
			err = prepare(x.directory, false)
		}
		if err == nil && !hasSubDir(v) { // a directory at a subDir can be changed by other volumes
			err = MarkReceived(dir, x.directory, x.content)
		}
		if err == nil {
			err = p.medium.SyncNames(x.directory)
		}
		return err
	}
	return x.commit(ctx, complete, func(entry string) error {
		if !hasSubDir(v) {
			return nil
		}
		return p.placeData(entry, v.Directory.SubDir)
	})
}
