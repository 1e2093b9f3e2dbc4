// Package shared implements a pool on an NFS export to which processes on several nodes write. No
// process locks the whole pool. These files coordinate the processes:
//
//	.trivet/owners/<token>    locked by a process that makes entries in .trivet/tmp
//	.trivet/ledger            locked by a process that reserves bytes
//	.trivet/reaper            locked by the process that empties the trash
//	.trivet/clients/<hash>    names the node that has an NFS client identity
//	volumes/<name>/lock       locked by a call that grows, stages or copies the volume
//
// If two processes make the same volume, the rename or link of only one succeeds. The locks only
// prevent useless attempts, and double promises of a byte. An NFS reply may be lost, so the
// result of each step has a unique name or token, which shows whether the step was done.
//
// This package does not read records: package pool does.
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

// OwnersDir contains a file for each process that makes entries in tmp. The name is the process's token,
// and the file is locked while the process lives.
const OwnersDir = ".trivet/owners"

// tmpDir contains incomplete volumes and snapshots.
const tmpDir = ".trivet/tmp"

// Pool has the operations of a pool that its Export needs.
type Pool struct {
	// CheckMarker verifies that the export still contains the pool's marker.
	CheckMarker func() error
	// Replaced is called when the export no longer contains the pool.
	Replaced func()
	// Refresh updates the ledger from the pool's folders. grown tells whether the record of a
	// known volume must be read again.
	Refresh func(ctx context.Context, grown func(volume string) bool) error
	// Discard removes an entry of tmp whose process has ended.
	Discard func(ctx context.Context, entry string) error
	// AwaitTrash waits a few seconds until this process or another one has emptied the trash. It
	// returns false if there was nothing to wait for.
	AwaitTrash func() bool
}

// Config describes a pool to its Export.
type Config struct {
	// Name and UUID are those of the pool. Place is its server and path, for errors.
	Name, UUID, Place string
	Root              *os.Root
	// Dir, Volumes and Tmp are the pool's open folders. The caller closes them.
	Dir, Volumes, Tmp *os.File
	Files             beneath.Files
	Ledger            *ledger.Ledger
}

// Export is this process's access to a pool to which other processes also write.
type Export struct {
	Config
	pool         Pool
	owner        owner
	transactions transactions
	trash        trashLock
}

// New returns the Export of a pool. It does not write to the pool.
func New(c Config, p Pool) *Export {
	return &Export{Config: c, pool: p, owner: owner{growing: map[string]string{}}}
}

// Close removes this process from the owners, and closes the ledger file.
func (e *Export) Close() {
	e.Disown()
	if f := e.transactions.file; f != nil {
		_ = f.Close()
	}
}

// Check verifies that the export still contains the pool. If not, it calls Replaced.
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

// ConfirmAbsence calls Check before a call answers that a volume does not exist: a wrong export
// contains none of the pool's volumes.
func (e *Export) ConfirmAbsence() error { return e.Check() }

// Explain turns ESTALE into the error of a call. ESTALE means that the server exports another
// directory, or that another client removed a file that this process has open.
func (e *Export) Explain(err error) error {
	if !errors.Is(err, unix.ESTALE) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	if err := e.Check(); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q was changed by another process meanwhile: %w: retry", e.Name, err)
}

// deniedRemedy is the remedy for an error for which isDenied returns true.
const deniedRemedy = "export it with no_root_squash, and with Kerberos map the principal of the node to root, and check rpc.gssd and the ticket of this node"

// isDenied reports whether an error means that the server denies access, or that this node has no valid Kerberos ticket.
func isDenied(err error) bool {
	return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EKEYEXPIRED)
}

// ExplainWrite explains an error of writing to the export of a pool.
func ExplainWrite(pool, place string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is read-only: export it with rw: %w", pool, place, err)
	case isDenied(err):
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s does not let this node's root write: %s: %w", pool, place, deniedRemedy, err)
	}
	return fmt.Errorf("pool %q: %s: %w", pool, place, err)
}

// ExplainRead explains an error of reading from the export of a pool, which it returns unchanged unless the server denies access.
func ExplainRead(pool, place string, err error) error {
	if isDenied(err) {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s does not let this node's root read: %s: %w", pool, place, deniedRemedy, err)
	}
	return err
}

// ExplainWrite turns an error of writing to the export into the error of a call.
func (e *Export) ExplainWrite(err error) error { return ExplainWrite(e.Name, e.Place, err) }

// Recover is Sweep: over NFS, all that can be read is already durable.
func (e *Export) Recover(ctx context.Context) error { return e.Sweep(ctx) }

// ID returns the ID of a volume. The export is the same on every node, so the ID does not contain the
// pool's UUID.
func (e *Export) ID(backend, name string) volume.ID {
	return volume.ID{Backend: backend, Pool: e.Name, Name: name}
}

// Unreadable turns an error that is Inconclusive into the error of a call.
func (e *Export) Unreadable(err error) error {
	if errors.Is(err, unix.ESTALE) {
		return e.Explain(err)
	}
	if isDenied(err) {
		return ExplainRead(e.Name, e.Place, err)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: %s cannot be read: %w", e.Name, e.Place, err)
}

// Inconclusive tells whether an error of reading a file says nothing about the file: the server
// does not answer, or does not permit this node to read.
func (e *Export) Inconclusive(err error) bool {
	inconclusive := []error{unix.ESTALE, unix.EIO, unix.ETIMEDOUT, unix.EREMOTEIO, unix.ENOLCK}
	return isDenied(err) || slices.ContainsFunc(inconclusive, func(e error) bool { return errors.Is(err, e) })
}

// Space reads the size and the free space of the export's filesystem, as the server reports them.
func (e *Export) Space() (ledger.Space, error) {
	extent, err := ledger.ExtentOf(e.Volumes.Fd())
	if err != nil {
		err = e.Explain(fmt.Errorf("pool %q: statfs: %w", e.Name, err))
	}
	return ledger.Space{Directory: extent, Filesystem: extent}, err
}

// DirectIOAlign is the smallest unit of direct I/O, in bytes. NFS requires no alignment, so it is that
// of a disk sector.
func (e *Export) DirectIOAlign() int { return 512 }

// SyncNames does nothing, because an NFS server makes names durable before it replies.
func (e *Export) SyncNames(*os.File) error { return nil }

// SyncFiles does nothing, because an NFS client makes files durable when they are closed.
func (e *Export) SyncFiles(*os.Root, ...string) error { return nil }

// Link makes the file durable before it calls link, which makes the file visible to other processes.
func (e *Export) Link(file, _ *os.File, link func() error) error {
	if err := file.Sync(); err != nil {
		return e.Explain(err)
	}
	return link()
}

// OpenLock opens the lock file of a volume, because NFS cannot lock directories.
func (e *Export) OpenLock(name string) (f *os.File, path string, err error) {
	path = name + "/lock"
	f, err = e.Files.Open(e.Volumes, path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, beneath.ErrIrregular) {
		err = e.foreign("volumes/"+path, err)
	}
	return f, path, err
}

// NoLocks tells whether an error of flock(2) means that the server does not support locks
// (NFSv3 without its lock service).
func NoLocks(err error) bool {
	return errors.Is(err, unix.ENOLCK) || errors.Is(err, unix.EOPNOTSUPP)
}

// foreign returns the error for a file that is in the place of one of the driver's files.
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
			log.Error(err, "Removing the entries of ended processes failed")
		}
	}
}

// FolderMode allows access to all users, because root of another client may be another user on the
// server.
func (e *Export) FolderMode() uint32 { return 0o755 }
