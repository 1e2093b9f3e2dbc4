// Package shared is a pool on an export that several processes write, of several nodes.
// None of them has the pool's lock:
//
//	.trivet/owners/<token>    held by a process that makes entries in .trivet/tmp
//	.trivet/ledger            held by a process that reserves bytes
//	.trivet/reaper            held by the process that empties the trash
//	.trivet/clients/<hash>    the node that an NFS client identity belongs to
//	volumes/<name>/lock       held by a call that grows, stages or copies the volume
//
// If two processes make the same volume, a rename or link of one succeeds. The locks only prevent
// useless attempts, and promising one byte twice. Over NFS a reply may be lost: whether a step was
// done is found out from its result, which has a unique name or token.
//
// This package does not read records: the pool does.
package shared

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// OwnersDir has a file for each process that makes entries in tmp. The name is the process's token,
// and the file is locked while the process lives.
const OwnersDir = ".trivet/owners"

// tmpDir has incomplete volumes and snapshots.
const tmpDir = ".trivet/tmp"

// Pool has the operations of a pool that its Export needs.
type Pool struct {
	// CheckMarker verifies that the export still has the pool's marker.
	CheckMarker func() error
	// Replaced is called when the export does not have the pool any more.
	Replaced func()
	// Refresh sets the ledger to what the folders contain. grown tells whether the record of a
	// known volume must be read again.
	Refresh func(ctx context.Context, grown func(volume string) bool) error
	// Discard removes an entry of tmp whose process has ended.
	Discard func(ctx context.Context, entry string) error
	// AwaitTrash waits a few seconds until the trash is empty, whichever process empties it.
	// It returns false if there was nothing to wait for.
	AwaitTrash func() bool
}

// Config describes a pool to its Export.
type Config struct {
	// Name and UUID are the pool's, and Place its server and path, for errors.
	Name, UUID, Place string
	Root              *os.Root
	// Dir, Volumes and Tmp are the pool's open folders. The caller closes them.
	Dir, Volumes, Tmp *os.File
	Files             beneath.Files
	Ledger            *ledger.Ledger
}

// Export is one process among those that write to a pool.
type Export struct {
	Config
	pool         Pool
	owner        owner
	transactions transactions
	trash        trashLock
}

// New makes this process one of a pool's writers. It does not write.
func New(c Config, p Pool) *Export {
	return &Export{Config: c, pool: p, owner: owner{growing: map[string]string{}}}
}

// Close ends this process's ownership.
func (e *Export) Close() {
	e.Disown()
	if f := e.transactions.file; f != nil {
		_ = f.Close()
	}
}

// Check verifies that the export still has the pool. If not, it calls Replaced.
func (e *Export) Check() error {
	err := e.pool.CheckMarker()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ESTALE):
		e.pool.Replaced()
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s was replaced or exported again (%w): it is being mounted again", e.Name, e.Place, err)
	case beneath.IsNotExist(err) || errors.Is(err, volume.ErrUnavailable) || errors.Is(err, volume.ErrDamaged):
		e.pool.Replaced()
		return volume.Errorf(volume.ErrUnavailable, "pool %q: the marker in %s is missing or belongs to another pool (%w): is the pool's disk mounted at the server? Restore its own pool.json (uuid %s)", e.Name, e.Place, err, e.UUID)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s cannot be read: %w", e.Name, e.Place, err)
}

// ConfirmAbsence is Check before a call answers that a volume does not exist: another
// export would have none of the pool's volumes.
func (e *Export) ConfirmAbsence() error { return e.Check() }

// Explain turns ESTALE into the error of a call: the server exports another directory, or another
// client removed a file that is open here.
func (e *Export) Explain(err error) error {
	if !errors.Is(err, unix.ESTALE) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	if err := e.Check(); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: it was changed by another process meanwhile: %w: try again", e.Name, err)
}

// ExplainWrite explains an error of writing to the export of a pool.
func ExplainWrite(pool, place string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is read-only: export it with rw: %w", pool, place, err)
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s does not let this node's root write: export it with no_root_squash: %w", pool, place, err)
	}
	return fmt.Errorf("pool %q: %s: %w", pool, place, err)
}

// ExplainWrite turns an error of writing to the export into the error of a call.
func (e *Export) ExplainWrite(err error) error { return ExplainWrite(e.Name, e.Place, err) }

// Recover is Sweep: NFS has made durable what can be read.
func (e *Export) Recover(ctx context.Context) error { return e.Sweep(ctx) }

// ID returns the ID of a volume: the export is the same on every node, so the ID does not
// contain the pool's UUID.
func (e *Export) ID(backend, name string) volume.ID {
	return volume.ID{Backend: backend, Pool: e.Name, Name: name}
}

// Unreadable turns an error that is Inconclusive into the error of a call.
func (e *Export) Unreadable(err error) error {
	if errors.Is(err, unix.ESTALE) {
		return e.Explain(err)
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s does not let this node's root read: export it with no_root_squash: %w", e.Name, e.Place, err)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s cannot be read: %w", e.Name, e.Place, err)
}

// Inconclusive tells whether an error of reading a file does not depend on the file: the server
// does not answer, or does not permit this node to read.
func (e *Export) Inconclusive(err error) bool {
	inconclusive := []error{unix.ESTALE, unix.EACCES, unix.EPERM, unix.EIO, unix.ETIMEDOUT, unix.EREMOTEIO, unix.ENOLCK}
	return slices.ContainsFunc(inconclusive, func(e error) bool { return errors.Is(err, e) })
}

// Space reads what the server shows of the export's filesystem.
func (e *Export) Space() (ledger.Space, error) {
	all, err := ledger.ExtentOf(e.Volumes.Fd())
	if err != nil {
		err = e.Explain(fmt.Errorf("pool %q: statfs: %w", e.Name, err))
	}
	return ledger.Space{Here: all, Whole: all}, err
}

// DirectIOAlign is the smallest sector of direct I/O: NFS requires no alignment.
func (e *Export) DirectIOAlign() int { return 512 }

// SyncNames does nothing: an NFS server makes names durable before it replies.
func (e *Export) SyncNames(*os.File) error { return nil }

// SyncFiles does nothing: an NFS client makes files durable when they are closed.
func (e *Export) SyncFiles(*os.Root, ...string) error { return nil }

// Link makes the file durable before the link, with which it becomes visible to other processes.
func (e *Export) Link(file, _ *os.File, link func() error) error {
	if err := file.Sync(); err != nil {
		return e.Explain(err)
	}
	return link()
}

// OpenLock opens the lock file of a volume: NFS has no locks of directories.
func (e *Export) OpenLock(name string) (*os.File, error) {
	const lock = "lock"
	f, err := e.Files.Open(e.Volumes, name+"/"+lock, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, beneath.ErrIrregular) {
		err = e.foreign("volumes/"+name+"/"+lock, err)
	}
	return f, err
}

// NoLocks tells whether an error of flock(2) means that the server has no locks (NFSv3 without its
// lock service).
func NoLocks(err error) bool {
	return errors.Is(err, unix.ENOLCK) || errors.Is(err, unix.EOPNOTSUPP)
}

// foreign is the error for a file of the pool that is not the one that the driver made.
func (e *Export) foreign(path string, err error) error {
	if errors.Is(err, beneath.ErrIrregular) || errors.Is(err, unix.EFBIG) || errors.Is(err, unix.ENOTDIR) {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s/%s: %w: remove that file", e.Name, e.Place, path, err)
	}
	return fmt.Errorf("pool %q: %w", e.Name, err)
}

const (
	// refreshInterval is the time between two refreshes of the ledger.
	refreshInterval = time.Minute
	// sweepEvery is the number of refreshes between two sweeps.
	sweepEvery = 10
)

// Maintain refreshes the ledger and sweeps periodically, until ctx ends.
func (e *Export) Maintain(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(refreshInterval)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := e.Explain(e.pool.Refresh(ctx, nothingGrew)); err != nil && ctx.Err() == nil {
			log.Error(err, "Reading the pool's volumes failed")
		}
		if n%sweepEvery != 0 {
			continue
		}
		if err := e.Explain(e.Sweep(ctx)); err != nil {
			log.Error(err, "Clearing what ended processes left failed")
		}
	}
}

// FolderMode gives access to the users of other clients, which the server may not map to root.
func (e *Export) FolderMode() uint32 { return 0o755 }
