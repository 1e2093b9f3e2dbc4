package pool

import (
	"context"
	"errors"
	"fmt"
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
	size := x.content.Tree.IndexSize
	if had.Made {
		_, err = beneath.Stat(x.pool.dir, receivedPath(x.v.ID.Name)+"/"+DataDir)
	}
	if err != nil || had.Made && had.Verified < size || !had.Made && had.Verified > size {
		return false
	}
	x.v.Source = before.Source // discardTree needs the owners, too
	if had.Made {
		x.v.Directory.Quota = before.Directory.Quota
	}
	return true
}

// openTree opens the index, and the directory if all its entries were made.
func (x *Partial) openTree(ctx context.Context) (err error) {
	if err := x.pool.refuseAdoption(x.v); err != nil {
		return err
	}
	if x.Image, err = x.dir.OpenFile(indexFile, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return err
	}
	if x.Made {
		if x.directory, err = x.openData(); err != nil || x.Base == "" {
			return err
		}
		t := x.target()
		t.Each = ctx.Err
		aligned, err := t.Aligned(x.Verified, baseAlignment)
		if err != nil {
			return err
		}
		x.Bytes -= min(x.Bytes, x.Verified-aligned) // they are received again
		x.Verified = aligned
		return nil
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

// discardTree moves a directory of which only some entries were made to the trash, which then releases its quota ID, and sets the
// limits of the owners of its shared data.
func (x *Partial) discardTree() error {
	p := x.pool
	folder, err := x.dir.Open(".")
	if err != nil {
		return err
	}
	defer folder.Close()
	if _, err := beneath.Stat(folder, DataDir); beneath.IsGone(err) { // an earlier call may have ended after the rename
		r, err := x.forgetShared()
		return errors.Join(err, p.Quotas.Relimit(r.Owners...))
	} else if err != nil {
		return err
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
	if err := beneath.Rename(folder, DataDir, entry, DataDir); err != nil {
		return errors.Join(err, unix.Unlinkat(int(p.trash.Fd()), name, unix.AT_REMOVEDIR))
	}
	r, err := x.forgetShared()
	p.ledger.Set(trashDir+"/"+name, r.InTrash())
	p.Trash.reaper.add(name)
	return err
}

// forgetShared removes the shared data from the record, so that a later call does not reserve it, and returns its reservation.
func (x *Partial) forgetShared() (ledger.Reservation, error) {
	r := ledger.Reservation{Backend: ledger.UnknownBackend}
	s := x.v.Source
	if s == nil || len(s.Owners) == 0 {
		return r, nil
	}
	r.Bytes, r.Shared, r.Owners = s.Shared, s.Shared, s.Owners
	s.Shared, s.Owners = 0, nil
	x.pool.ledger.Set(receivedPath(x.v.ID.Name), x.reservation())
	return r, x.writeRecord()
}

// beginTree continues with the directory, or begins with its entries if the index is complete.
func (x *Partial) beginTree() error {
	size := x.content.Tree.IndexSize
	switch {
	case x.Made:
		x.stored = max(0, x.Bytes-size) // zeros at the end of the index are not received
		err := x.withBase(func(base *os.File, _ volume.Volume) (err error) {
			t := x.target()
			t.Base = base
			x.tree, err = clone.OpenUnpacked(t, x.Verified)
			return err
		})
		return x.pool.medium.ExplainWrite(err)
	case x.Verified == size:
		return x.makeTree()
	}
	return x.pool.medium.ExplainWrite(x.Image.Truncate(size))
}

// target describes the directory.
func (x *Partial) target() clone.Target {
	t := x.content.Tree
	return clone.Target{Root: x.directory, Index: x.Image, IndexSize: t.IndexSize, Size: t.Size, Each: x.each, WriteOut: true}
}

// makeTree makes the directory, and all its entries without data, or with that of the base. The record gets the quota ID of the
// directory.
func (x *Partial) makeTree() error {
	p := x.pool
	limits, err := p.Quotas.Limits()
	if err != nil {
		return err
	}
	if x.directory, err = p.Quotas.makeData(x.dir, x.v, &Content{}, limits); err != nil {
		return err
	}
	if err := x.writeRecord(); err != nil {
		return err
	}
	p.ledger.Set(receivedPath(x.v.ID.Name), x.reservation())
	t := x.target()
	if kind := x.limited(); kind == quota.XFS || kind == quota.Ext4 {
		t.MaxInodes = p.Quotas.limitOf(x.v, kind).Inodes
	}
	err = x.withBase(func(base *os.File, v volume.Volume) (err error) {
		t.Base, t.MaxShared = base, x.v.Capacity
		x.tree, err = clone.Unpack(t)
		if err == nil && base != nil {
			err = x.recordShared(v)
		}
		return err
	})
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

func (x *Partial) writeRecord() error {
	record, err := x.v.MarshalRecord()
	if err == nil {
		err = atomicfile.Write(x.dir, recordFile, record)
	}
	return err
}

// useBase implements withBase. If the base is lost, the next call begins again, and if it cannot be used, without a base.
func (x *Partial) useBase(ctx context.Context, use func(*os.File, volume.Volume) error) error {
	if x.Base == "" {
		return use(nil, volume.Volume{})
	}
	p := x.pool
	err := p.useUnchanged(ctx, x.content.Lineage, x.Base, func(name string) error {
		v, err := p.Lookup(name)
		if err != nil {
			return err
		}
		base, err := p.OpenData(v)
		if err != nil {
			return err
		}
		defer base.Close()
		return use(base, v)
	})
	unusable := false
	for _, reason := range []error{clone.ErrNotShared, clone.ErrBase, clone.ErrTooLarge, errNoRoomToShare} {
		unusable = unusable || errors.Is(err, reason)
	}
	if unusable {
		err = volume.Errorf(volume.ErrUnavailable, "the content %q cannot be the base of the directory: %w: retry; the transfer begins again", x.Base, err)
	}
	if unusable || errors.Is(err, volume.ErrUnavailable) || errors.Is(err, volume.ErrNotFound) {
		return errors.Join(err, x.restart(unusable))
	}
	return err
}

// errNoRoomToShare means that the pool has no room for the higher limits of the volumes that have written shared data.
var errNoRoomToShare = errors.New("no room to share data")

// recordShared records which data the directory shares with that of a volume, because btrfs counts a block as usage of the volume
// that wrote it. It raises the limits of such volumes.
func (x *Partial) recordShared(base volume.Volume) error {
	if x.limited() != quota.Btrfs || x.tree.SharedBytes == 0 {
		return nil
	}
	p := x.pool
	x.v.Source.Shared, x.v.Source.Owners = x.tree.SharedBytes, []volume.ID{base.ID}
	if base.Source != nil {
		for _, id := range base.Source.Owners { // most of the earlier bases were deleted
			if _, err := p.ByID(id); err == nil {
				x.v.Source.Owners = append(x.v.Source.Owners, id)
			}
		}
	}
	if err := p.ledger.Reserve(receivedPath(x.v.ID.Name), x.reservation()); err != nil {
		return fmt.Errorf("%w: %w", errNoRoomToShare, err)
	}
	if err := x.writeRecord(); err != nil {
		return err
	}
	return p.Quotas.Relimit(x.v.Source.Owners...)
}

// punchTree is PunchHole for the content of a directory.
func (x *Partial) punchTree(r clone.Range) error {
	if x.tree == nil {
		return errNoIndex
	}
	return x.explainWrite(x.tree.PunchHole(r))
}

// limited is the kind of the limit of the directory.
func (x *Partial) limited() quota.Kind {
	if x.v.Directory.Quota == nil {
		return quota.None
	}
	return quota.Kind(x.v.Directory.Quota.Kind)
}

var errNoIndex = volume.Errorf(volume.ErrDamaged, "the other node has sent no checksum of the index of a directory before the content of its files: check which driver runs there")

// writeTree is WriteAt for a directory. The driver itself limits the data to the capacity, because ext4 lets it exceed the limit of
// the directory, and other filesystems may have none. On btrfs, which counts compressed data, the limit suffices.
func (x *Partial) writeTree(ctx context.Context, b []byte, at int64) (n int, err error) {
	switch size := x.content.Tree.IndexSize; {
	case at+int64(len(b)) <= size:
		n, err = x.to.Budget.WriteAt(ctx, x.to, b, at)
		return n, x.pool.medium.ExplainWrite(err)
	case x.tree == nil:
		return 0, errNoIndex
	}
	if x.stored += int64(len(b)); x.stored > x.v.Capacity && x.limited() != quota.Btrfs {
		return 0, x.tooLarge()
	}
	n, err = x.to.Budget.WriteAt(ctx, x.tree, b, at)
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
