package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Medium is a directory of this node, to which only the process with the pool's lock writes
// (localMedium), or an export, to which several processes write (shared.Export).
type Medium interface {
	// Check verifies that the open directory is still the pool: ErrUnavailable if not. Every
	// call that changes the pool begins with it.
	Check() error
	// ConfirmAbsence verifies that a record that was not found does not exist.
	ConfirmAbsence() error
	// Explain turns an error about the medium into the error of a call.
	Explain(err error) error
	// Inconclusive tells whether an error of reading a file says nothing about the file.
	// Unreadable turns such an error into the error of a call.
	Inconclusive(err error) bool
	Unreadable(err error) error

	// ExplainWrite turns an error of writing to the medium into the error of a call.
	ExplainWrite(err error) error
	// Recover removes the incomplete entries of ended processes. When it returns, all that can
	// be read is durable.
	Recover(ctx context.Context) error

	// ID returns the ID of a volume in this pool.
	ID(backend, name string) volume.ID

	// Space reads the size and the free space of the pool's filesystem.
	Space() (ledger.Space, error)
	// DirectIOAlign is the smallest unit of direct I/O, in bytes.
	DirectIOAlign() int
	// FolderMode is the mode of the folders above a volume's subDir.
	FolderMode() uint32

	// SyncNames makes the names in a directory durable.
	SyncNames(dir *os.File) error
	// SyncFiles makes written files and directories durable. On an export it opens no files: the
	// server may grant a delegation for each opened file.
	SyncFiles(dir *os.Root, names ...string) error
	// Link calls link, which gives a written file a name in a folder. Both are durable when
	// it returns without an error.
	Link(file, folder *os.File, link func() error) error
	// OpenLock opens the file or folder that LockVolume locks. path is its path below volumes.
	OpenLock(name string) (f *os.File, path string, err error)

	// Entry returns the name of the entry of tmp for a volume or set that reserves some bytes. The
	// name ends with suffix.
	Entry(name string, bytes int64, suffix string) (string, error)
	// SoleWriter tells whether no other process can write to the pool.
	SoleWriter() bool
	// Reserve reserves bytes for a folder in the ledger. show makes the reservation visible to
	// other processes; meanwhile no other process reserves anything.
	Reserve(ctx context.Context, dir string, r ledger.Reservation, show func() error) error
	// ReservedElsewhere returns the reservations of other processes, by folder.
	ReservedElsewhere() (map[string]ledger.Reservation, error)
	// Exclusively calls f while no other process makes or removes a volume whose directory is
	// outside its folder. recheck calls a check of the ledger. If the check fails, it refreshes
	// the ledger and calls the check again.
	Exclusively(ctx context.Context, f func(recheck func(check func() error) error) error) error
	// AnnounceGrowth shows other processes the bytes that are reserved for a volume beyond its
	// recorded capacity. CompleteGrowth ends the announcement after the record has the new capacity.
	// WithdrawGrowth ends it at any time.
	AnnounceGrowth(name string, more int64) error
	CompleteGrowth(ctx context.Context, name string) error
	WithdrawGrowth(name string) error

	// HoldTrash gives this process the right to empty the trash until release is called;
	// release is nil if another process has it.
	HoldTrash() (release func(), err error)
	// Maintain does periodic work until ctx ends.
	Maintain(ctx context.Context, log klog.Logger)
	Close()
}

// localMedium is a directory of this node, to which one process writes.
type localMedium struct {
	*store
	dev, ino uint64
	// measure measures the foreign use of the filesystem.
	measure func() error
	// discard removes an entry of tmp.
	discard func(ctx context.Context, entry string) error
	// file is a regular file of the pool. Unlike for the pool's directory, statfs(2) of a file shows
	// the whole filesystem, even under a project quota.
	file *os.File
	lock *os.File // nil for a pool that is only read
}

// takeLock keeps other drivers from opening the pool.
func (m *localMedium) takeLock(ctx context.Context) error {
	f, err := m.root.OpenFile(lockFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := flockPatiently(ctx, f); err != nil {
		_ = f.Close()
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is in use by another driver (%w): give each driver its own pools", m.cfg.Name, m.cfg.Directory.Path, err)
	}
	m.lock = f
	return nil
}

// Recover discards all entries of tmp. This process has the pool's lock, so no other process makes
// entries.
func (m *localMedium) Recover(ctx context.Context) error {
	if err := unix.Syncfs(int(m.volumes.Fd())); err != nil {
		return fmt.Errorf("syncfs: %w", err)
	}
	names, err := beneath.Names(m.tmp, ".")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := m.discard(ctx, name); err != nil {
			return fmt.Errorf("clearing leftovers: %w", err)
		}
	}
	return nil
}

func (m *localMedium) ID(backend, name string) volume.ID {
	return volume.ID{Backend: backend, Pool: m.cfg.Name, PoolUUID: m.ShortUUID(), Name: name}
}

// Check verifies that the pool's path is still the open directory, and that the marker is valid.
func (m *localMedium) Check() error {
	c := m.cfg
	var st unix.Stat_t
	if err := unix.Stat(c.Directory.Path, &st); err != nil {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s: %w", c.Name, c.Directory.Path, err)
	}
	if st.Dev != m.dev || st.Ino != m.ino {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s is no longer the directory that the driver opened: was its disk unmounted, or another one mounted over it? Mount the disk again; if this message stays, restart the driver", c.Name, c.Directory.Path)
	}
	if err := m.CheckMarker(); err != nil {
		return volume.Errorf(volume.ErrUnavailable, "pool %q: the marker in %s is missing or belongs to another pool (%w): restore the pool's own %s (uuid %s)", c.Name, c.place(), err, markerFile, m.uuid)
	}
	return nil
}

// ErrDiskUnreadable means that the disk of a pool cannot be read.
var ErrDiskUnreadable = errors.New("the disk cannot be read")

// diskErrors are the errors of a file whose disk fails, was removed, or has made the kernel shut down the filesystem. They are those
// that block drivers return, except for errors about the request, such as ENOMEM.
var diskErrors = []error{
	unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENODATA, unix.EREMOTEIO, unix.ENOLINK, unix.ETIMEDOUT, unix.EILSEQ,
	unix.EBADE, unix.EUCLEAN, unix.ESHUTDOWN,
}

// Probe reads the marker of a pool of this node from the disk, because the page cache hides a disk that fails or was removed. The error
// is ErrDiskUnreadable; Check returns the other errors of the marker. It finds nothing if the data of the volumes is not on the
// filesystem of the marker, and if the filesystem has no direct I/O for the marker, such as btrfs, which stores the content of small
// files in its metadata.
func (p *Pool) Probe() error {
	if p.Shared() || p.storage != nil { // the volumes in disks and volume groups have conditions of their own
		return nil
	}
	marker, err := p.root.OpenFile(markerFile, os.O_RDONLY|unix.O_DIRECT, 0)
	if err == nil {
		err = blockdev.ProbeFile(marker)
		_ = marker.Close()
	}
	if !slices.ContainsFunc(diskErrors, func(failed error) bool { return errors.Is(err, failed) }) {
		return nil
	}
	return fmt.Errorf("pool %q: %w: %s: %w: see the kernel's log; if the disk was removed, insert it, mount it again, and restart the driver", p.cfg.Name, ErrDiskUnreadable, p.cfg.Directory.Path, err)
}

func (*localMedium) ConfirmAbsence() error { return nil }

func (*localMedium) Explain(err error) error { return err }

func (m *localMedium) ExplainWrite(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %w: the driver must be able to write to %s: check its mount options and the security policy of the node", m.cfg.Name, err, m.cfg.Directory.Path)
	}
	return fmt.Errorf("pool %q: %w", m.cfg.Name, err)
}

func (*localMedium) Inconclusive(error) bool { return false }

func (*localMedium) Unreadable(err error) error { return err }

// Space reads both extents, because the pool's directory may have a project quota.
func (m *localMedium) Space() (s ledger.Space, err error) {
	if s.Directory, err = ledger.ExtentOf(m.volumes.Fd()); err == nil {
		s.Filesystem, err = ledger.ExtentOf(m.file.Fd())
	}
	if err != nil {
		err = fmt.Errorf("pool %q: statfs: %w", m.cfg.Name, err)
	}
	return s, err
}

// DirectIOAlign is STATX_DIOALIGN of statx(2), or 4096 if the kernel does not return it.
func (m *localMedium) DirectIOAlign() int {
	var st unix.Statx_t
	err := unix.Statx(int(m.file.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 || st.Dio_offset_align == 0 {
		return 4096
	}
	return int(st.Dio_offset_align)
}

// FolderMode gives access only to root, because otherwise a user of the node could run set-user-ID
// files of a tenant.
func (*localMedium) FolderMode() uint32 { return 0o700 }

func (*localMedium) SyncNames(dir *os.File) error { return dir.Sync() }

// SyncFiles syncs one file after the other: the first sync commits the journal with all of them,
// so the others have nothing to do.
func (*localMedium) SyncFiles(dir *os.Root, names ...string) error {
	for _, name := range names {
		if err := atomicfile.Sync(dir, name); err != nil {
			return err
		}
	}
	return nil
}

// Link syncs the file and the folder after the link: one commit of the journal contains both.
func (*localMedium) Link(file, folder *os.File, link func() error) error {
	if err := link(); err != nil {
		return err
	}
	return errors.Join(file.Sync(), folder.Sync())
}

func (m *localMedium) OpenLock(name string) (f *os.File, path string, err error) {
	f, err = beneath.OpenDir(m.volumes, name)
	return f, name, err
}

// Entry adds only the suffix to the name: the pool has one writer.
func (*localMedium) Entry(name string, _ int64, suffix string) (string, error) {
	return name + suffix, nil
}

func (*localMedium) SoleWriter() bool { return true }

func (m *localMedium) Reserve(_ context.Context, dir string, r ledger.Reservation, show func() error) error {
	if err := m.ledger.Reserve(dir, r); err != nil {
		return err
	}
	return show()
}

func (*localMedium) ReservedElsewhere() (map[string]ledger.Reservation, error) { return nil, nil }

func (*localMedium) Exclusively(_ context.Context, f func(recheck func(check func() error) error) error) error {
	return f(func(check func() error) error { return check() })
}

func (*localMedium) AnnounceGrowth(string, int64) error { return nil }

func (*localMedium) CompleteGrowth(context.Context, string) error { return nil }

func (*localMedium) WithdrawGrowth(string) error { return nil }

func (*localMedium) HoldTrash() (release func(), err error) { return func() {}, nil }

// foreignInterval is the time between two measurements of the foreign use.
const foreignInterval = time.Minute

// Maintain measures the foreign use periodically, if this pool measures for all pools on its filesystem
// (ledger.Ledger.Leads).
func (m *localMedium) Maintain(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(foreignInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if !m.ledger.Leads() {
				continue
			}
			if err := m.measure(); err != nil {
				log.Error(err, "Measuring the pool's storage failed")
			}
		}
	}
}

func (m *localMedium) Close() {
	for _, f := range []*os.File{m.file, m.lock} {
		if f != nil {
			_ = f.Close()
		}
	}
}
