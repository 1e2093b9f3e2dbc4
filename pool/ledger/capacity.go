package ledger

import (
	"errors"
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// Accounting says how a ledger learns what its pool can promise.
type Accounting int

const (
	// Measured pools measure what their volumes use; the rest is foreign use.
	Measured Accounting = iota
	// Estimated pools cannot measure that, as on an export: what is allocated beyond all
	// that was promised counts as foreign use.
	Estimated
	// Unlimited pools promise no bytes of a filesystem: each volume has its own device.
	Unlimited
)

// Config describes a pool to its ledger.
type Config struct {
	Name       string
	Accounting Accounting
	// Size bounds the pool below its filesystem's size; 0: no bound.
	Size    int64
	Reserve Reserve
	// Overcommit is how often each byte may be promised; 0 stands for 1.
	Overcommit float64
	// MaxVolumes bounds the number of volumes; 0: no bound.
	MaxVolumes int
	// RaiseOvercommit tells an administrator how the overcommit is raised.
	RaiseOvercommit string
}

func (c Config) overcommit() float64 {
	if c.Overcommit == 0 {
		return 1
	}
	return c.Overcommit
}

// Reserve is what is kept from being promised: bytes, or a percentage of the pool.
type Reserve struct{ Bytes, Percent int64 }

func (r Reserve) of(total int64) int64 { return r.Bytes + total/100*r.Percent }

// Usage is a pool's capacity in bytes at one moment.
type Usage struct {
	// Total is the size of the pool: of its filesystem, or as configured.
	Total int64
	// Used is what its filesystem has allocated to anybody, Free what it has
	// left for the driver.
	Used, Free int64
	// Promised is the sum of all volumes' sizes.
	Promised int64
	// Room is what can still be promised, Largest what a single volume can have of it.
	Room, Largest int64
	// Reserve is what is kept from being promised.
	Reserve int64
	// OtherPools is what other pools on the filesystem have of it: what they promised,
	// divided by their overcommit, or what their volumes use, if that is more.
	OtherPools int64
	Volumes    int
	// Snapshots counts those of groups one by one.
	Snapshots int
	// Full: the pool has its maxVolumes.
	Full bool
	// Attached is the number of controller-published volumes; 0 for a shared pool,
	// where it is not counted.
	Attached int
}

// Low tells whether thin volumes of this pool may soon fail to get the space
// that was promised to them: what is free has fallen below the reserve.
func (u Usage) Low() bool { return u.Free < u.Reserve }

// Usage is the pool's capacity on a filesystem that has some space.
func (l *Ledger) Usage(s Space) Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usage(s)
}

func (l *Ledger) usage(s Space) Usage {
	u := Usage{
		Total: s.Here.Total, Free: s.Here.Free, Used: s.Here.used(),
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

// ownShare is what others leave to the pool.
func (l *Ledger) ownShare(s Space, u Usage) int64 {
	if l.config.Accounting == Estimated {
		return s.Here.Total - max(0, u.Used-u.Promised)
	}
	return min(s.Here.Total-l.foreignHere, s.Whole.Total-l.foreign-u.OtherPools)
}

const (
	// readPatience is how long a call waits for other pools on the filesystem to be read.
	readPatience = 2 * time.Second
	// DrainTime is how long a call waits for the trash to make room for it.
	DrainTime = 5 * time.Second
)

// Reserve reserves for a folder what it is to have, or says why not (ErrExhausted). It waits
// for deleted volumes to make room.
func (l *Ledger) Reserve(dir string, want Reservation) error {
	l.awaitRead(readPatience)
	err := l.reserveNow(dir, want)
	if errors.Is(err, volume.ErrExhausted) {
		l.drain(DrainTime)
		return l.reserveNow(dir, want)
	}
	return err
}

func (l *Ledger) reserveNow(dir string, want Reservation) error {
	s, err := l.pool.Space()
	if err != nil {
		return err
	}
	return l.TryReserve(dir, want, s)
}

// TryReserve is Reserve without waiting, on a filesystem that has some space.
func (l *Ledger) TryReserve(dir string, want Reservation, s Space) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.usage(s)
	have, known := l.reservations[dir]
	if err := l.checkSubDir(dir, want); err != nil {
		return err
	}
	more := want.Bytes - have.Bytes
	if unread, _ := l.firstUnread(); unread != "" && more > 0 {
		return volume.Errorf(volume.ErrUnavailable, "pool %q promises nothing until the volumes of pool %q on the same filesystem have been read: retry; if this lasts, see why pool %[2]q is not open (trivet doctor)", l.config.Name, unread)
	}
	if more > u.Room && l.config.Accounting != Unlimited {
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %d bytes more (%s of %s promised, %s reserved%s), asked for are %d: delete volumes, grow the pool, or %s",
			l.config.Name, u.Room, volume.FormatSize(u.Promised), volume.FormatSize(u.Total), volume.FormatSize(u.Reserve), l.describeOtherPools(u), more, l.config.RaiseOvercommit)
	}
	if !known && want.Snapshots == nil && u.Full {
		return volume.Errorf(volume.ErrExhausted, "pool %q has its maxVolumes of %d: delete volumes or raise maxVolumes", l.config.Name, l.config.MaxVolumes)
	}
	l.set(dir, want)
	return nil
}

// describeOtherPools names the other pools whose space reduces the room; empty if there is
// none.
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

// checkSubDir refuses a directory outside the volume's folder that another volume has or
// may have, or that is in one or around one. Volumes that outlive their records may share
// one.
func (l *Ledger) checkSubDir(dir string, want Reservation) error {
	if want.SubDir == "" {
		return nil
	}
	for other, have := range l.reservations {
		switch {
		case other == dir || have.Retain && want.Retain:
		case have.Unread && !want.Retain:
			return volume.Errorf(volume.ErrPrecondition, "%s %q: it may be the directory of volume %q, whose record cannot be read: run the driver that wrote %s/volume.json, restore it from a backup, or, if there is no such volume any more, move its folder away",
				volume.ParamSubDir, want.SubDir, path.Base(other), other)
		case have.SubDir != "" && overlap(have.SubDir, want.SubDir):
			return volume.Errorf(volume.ErrPrecondition, "%s %q: %s of volume %q is there: use another, or %s=%s for both",
				volume.ParamSubDir, want.SubDir, have.SubDir, path.Base(other), volume.ParamOnDelete, volume.OnDeleteRetain)
		}
	}
	return nil
}

// overlap tells whether two directories are one, or one is in the other.
func overlap(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}

// CheckSubDir refuses a directory as TryReserve does.
func (l *Ledger) CheckSubDir(dir string, want Reservation) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checkSubDir(dir, want)
}

// IfSubDirFree calls f if no folder but dir has the directory. Nobody reserves it meanwhile.
func (l *Ledger) IfSubDirFree(dir, subDir string, f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.checkSubDir(dir, Reservation{SubDir: subDir}) != nil {
		return nil
	}
	return f()
}
