package pool

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// indexFile is the index of a directory that is being received (clone.Packed), in the folder of the new volume. When the index is
// complete, the directory is made, so that all other data is written to the files of the volume.
const indexFile = "index"

// continuesTree is continues for a directory. A directory that was not made completely begins again.
func (x *Partial) continuesTree(had progress) bool {
	before, err := x.pool.receivedVolume(x.v.ID.Name)
	if err != nil || before.Directory == nil || before.Directory.SubDir != x.v.Directory.SubDir || before.Capacity != x.v.Capacity {
		return false
	}
	_, err = beneath.Stat(x.pool.dir, receivedPath(x.v.ID.Name)+"/"+DataDir)
	if made := err == nil; made != (had.Verified >= x.content.Tree.IndexSize) {
		return false
	}
	x.v.Directory.Quota = before.Directory.Quota
	return true
}

// openTree opens the index, and the directory if it was made.
func (x *Partial) openTree(ctx context.Context) (err error) {
	if err := x.pool.refuseAdoption(x.v); err != nil {
		return err
	}
	x.ctx = ctx
	if x.Image, err = x.dir.OpenFile(indexFile, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return err
	}
	size := x.content.Tree.IndexSize
	if x.Verified < size {
		return x.Image.Truncate(x.Verified)
	}
	if x.directory, err = x.openData(); err != nil {
		return err
	}
	x.tree, err = clone.OpenUnpacked(ctx, x.directory, x.Image, size, x.content.Tree.Size, x.Verified)
	return err
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

// makeTree makes the directory of the complete index, unless it was made. The record gets the quota ID of the directory.
func (x *Partial) makeTree() error {
	if x.tree != nil {
		return nil
	}
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
	p.ledger.Set(receivedPath(x.v.ID.Name), ledger.OfVolume(x.v))
	x.tree, err = clone.Unpack(x.ctx, x.directory, x.Image, x.content.Tree.IndexSize, x.content.Tree.Size)
	if errors.Is(err, clone.ErrIndex) {
		return volume.Errorf(volume.ErrDamaged, "the other node has sent a directory that cannot be created: %w", err)
	}
	return p.medium.ExplainWrite(err)
}

// writeTree is WriteAt for a directory.
func (x *Partial) writeTree(b []byte, at int64) (n int, err error) {
	if rest := x.content.Tree.IndexSize - at; rest > 0 {
		n, err = x.Image.WriteAt(b[:min(int64(len(b)), rest)], at)
		if err != nil || n == len(b) {
			return n, err
		}
	}
	if err := x.makeTree(); err != nil {
		return n, err
	}
	more, err := x.tree.WriteAt(b[n:], at+int64(n))
	return n + more, x.pool.medium.ExplainWrite(err)
}

// CommitDirectory is Commit for a directory. prepare sets its mode and owner. ErrOutOfRange if the content exceeds the limit of
// the volume.
func (x *Partial) CommitDirectory(ctx context.Context, prepare func(dir *os.File, empty bool) error) error {
	p, v := x.pool, x.v
	if err := x.tree.Finish(ctx); err != nil {
		return p.medium.ExplainWrite(err)
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
