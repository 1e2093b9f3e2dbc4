package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// Accounting is the method by which a ledger determines the capacity of its pool.
type Accounting int

const (
	// Measured means that the usage of the pool's volumes is measured; the rest is foreign use.
	Measured Accounting = iota
	// Estimated means that the usage cannot be measured, as on an export. Allocated bytes beyond the
	// promised ones count as foreign use.
	Estimated
	// Unlimited means that the volumes take no space of a filesystem, because each has its own device.
	Unlimited
)

// Config describes a pool to its ledger.
type Config struct {
	Name       string
	Accounting Accounting
	// Shared means that other processes also publish volumes of the pool, so that this process cannot count them.
	Shared bool
	// Size limits the pool to less than its filesystem's size, in bytes. 0 means no limit.
	Size    int64
	Reserve Reserve
	// Overcommit is the number of times that each byte may be promised; 0 means 1.
	Overcommit float64
	// MaxVolumes is the largest number of volumes. 0 means no limit.
	MaxVolumes int
	// RaiseOvercommit tells an administrator how to raise the overcommit.
	RaiseOvercommit string
}

func (c Config) overcommit() float64 { return cmp.Or(c.Overcommit, 1) }

// Reserve is the space that is never promised to volumes: bytes, or a percentage of the pool.
type Reserve struct{ Bytes, Percent int64 }

func (r Reserve) of(total int64) int64 { return r.Bytes + total/100*r.Percent }

// Usage is a pool's capacity in bytes at one moment.
type Usage struct {
	// Total is the size of the pool: of its filesystem, or as configured.
	Total int64
	// Used is the allocated space of the filesystem, foreign use included. Free is the space that
	// the driver can allocate.
	Used, Free int64
	// Promised is the sum of the sizes of all volumes and snapshots.
	Promised int64
	// Room is the space that can still be promised. Largest is the size of the largest possible
	// volume.
	Room, Largest int64
	// Reserve is the space that is never promised.
	Reserve int64
	// OtherPools is the share of other pools on the filesystem: the bytes that they promised,
	// divided by their overcommit, or the usage of their volumes, if that is more.
	OtherPools int64
	Volumes    int
	// Snapshots counts every member of a group.
	Snapshots int
	// Full means that the pool has maxVolumes volumes.
	Full bool
	// Attached is the number of controller-published volumes; 0 for a shared pool,
	// where it is not counted.
	Attached int
}

// Low tells whether Free is below the reserve: thin volumes may soon not get the space that was
// promised to them.
func (u Usage) Low() bool { return u.Free < u.Reserve }

// Usage is the pool's capacity on a filesystem with the space s.
func (l *Ledger) Usage(s Space) Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usage(s)
}

// usage is Usage for a caller that holds l.mu.
func (l *Ledger) usage(s Space) Usage {
	u := Usage{
		Total: s.Directory.Total, Free: s.Directory.Free, Used: s.Directory.used(),
		Promised: l.promised, Attached: len(l.attached),
		Volumes: len(l.reservations) - l.sets, Snapshots: l.snapshots,
	}
	u.Full = l.config.MaxVolumes > 0 && u.Volumes >= l.config.MaxVolumes
	if l.config.Accounting == Unlimited {
		return u
	}
	if l.config.Size > 0 {
		u.Total = min(u.Total, l.config.Size)
	}
	u.Reserve = l.config.Reserve.of(u.Total)
	u.OtherPools = l.otherPools(l)
	base := min(u.Total, l.ownShare(s, u)) - u.Reserve
	promisable := math.Max(0, float64(base)*l.config.overcommit())
	u.Room = max(0, int64(math.Min(promisable, math.MaxInt64/2))-u.Promised)
	if len(l.unread) > 0 {
		u.Room = 0
	}
	u.Largest = u.Room
	return u
}

// ownShare is the part of the filesystem that is left for the pool.
func (l *Ledger) ownShare(s Space, u Usage) int64 {
	if l.config.Accounting == Estimated {
		return s.Directory.Total - max(0, u.Used-u.Promised)
	}
	return min(s.Directory.Total-l.foreignInDirectory, s.Filesystem.Total-l.foreign-u.OtherPools)
}

const (
	// readPatience is how long a call waits until the records of the other pools on the filesystem
	// are read.
	readPatience = 2 * time.Second
	// DrainTime is how long a call waits until the trash frees space.
	DrainTime = 5 * time.Second
)

// Reserve sets the reservation of a folder. If the pool has no room for it, Reserve waits up to
// DrainTime until the trash frees space. ErrExhausted if that is not enough.
func (l *Ledger) Reserve(dir string, r Reservation) error {
	l.awaitRead(readPatience)
	for waited := false; ; waited = true {
		s, err := l.pool.Space()
		if err != nil {
			return err
		}
		err = l.TryReserve(dir, r, s)
		if waited || !errors.Is(err, volume.ErrExhausted) {
			return err
		}
		l.drain(DrainTime)
	}
}

// TryReserve is Reserve without waiting, on a filesystem with the space s.
func (l *Ledger) TryReserve(dir string, r Reservation, s Space) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.usage(s)
	existing, known := l.reservations[dir]
	if err := l.checkSubDir(dir, r); err != nil {
		return err
	}
	more := r.Bytes - existing.Bytes
	if unread, _ := l.firstUnread(); unread != "" && more > 0 {
		return volume.Errorf(volume.ErrUnavailable, "pool %q promises nothing until the volumes of pool %q on the same filesystem have been read: retry; if this lasts, check why pool %[2]q is not open (trivet doctor)", l.config.Name, unread)
	}
	if more > u.Room && l.config.Accounting != Unlimited && !r.Exists {
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %s more (%s of %s promised, %s reserved%s), the request needs %s: request less, delete volumes, grow the pool, or %s",
			l.config.Name, volume.ExactSize(u.Room), volume.FormatSize(u.Promised), volume.FormatSize(u.Total), volume.FormatSize(u.Reserve), l.describeOtherPools(u), volume.ExactSize(more), l.config.RaiseOvercommit)
	}
	if !known && r.Snapshots == nil && u.Full {
		return volume.Errorf(volume.ErrExhausted, "pool %q has its maxVolumes of %d: delete volumes or raise maxVolumes", l.config.Name, l.config.MaxVolumes)
	}
	l.set(dir, r)
	return nil
}

// describeOtherPools names the other pools whose shares reduce the room; empty if there is none.
func (l *Ledger) describeOtherPools(u Usage) string {
	var names []string
	for _, other := range l.ledgers {
		if other != l && other.share() > 0 {
			names = append(names, strconv.Quote(other.config.Name))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(", %s for pool %s on the same filesystem", volume.FormatSize(u.OtherPools), strings.Join(names, ", "))
}

// checkSubDir refuses a subDir that overlaps, or may overlap, that of another volume. Volumes with
// onDelete retain may share a directory.
func (l *Ledger) checkSubDir(dir string, r Reservation) error {
	if r.SubDir == "" {
		return nil
	}
	for otherDir, other := range l.reservations {
		switch {
		case otherDir == dir || other.Retain && r.Retain:
		case other.UnknownSubDir && !r.Retain:
			return volume.Errorf(volume.ErrPrecondition, "%s %q: it may be the directory of volume %q, whose record cannot be read: run the driver that wrote %s/volume.json, restore it from a backup, or, if the volume no longer exists, move its folder out of the pool",
				volume.ParamSubDir, r.SubDir, path.Base(otherDir), otherDir)
		case other.SubDir != "" && overlap(other.SubDir, r.SubDir):
			return volume.Errorf(volume.ErrPrecondition, "%s %q overlaps %[1]s %[3]q of volume %[4]q: use another %[1]s, or %[5]s=%[6]s for both volumes",
				volume.ParamSubDir, r.SubDir, other.SubDir, path.Base(otherDir), volume.ParamOnDelete, volume.OnDeleteRetain)
		}
	}
	return nil
}

// overlap tells whether two directories are the same, or one is in the other.
func overlap(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}

// CheckSubDir refuses the same subDirs as TryReserve. It reserves nothing.
func (l *Ledger) CheckSubDir(dir string, r Reservation) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checkSubDir(dir, r)
}

// IfSubDirFree calls f, unless the subDir of a folder other than dir overlaps subDir. No call reserves
// an overlapping subDir while f runs.
func (l *Ledger) IfSubDirFree(dir, subDir string, f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.checkSubDir(dir, Reservation{SubDir: subDir}) != nil {
		return nil
	}
	return f()
}
