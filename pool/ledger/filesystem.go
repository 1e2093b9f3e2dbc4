package ledger

import (
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/location"
)

// Filesystems contains the filesystems on which the pools of one process are. The pools on one
// filesystem share its space.
type Filesystems struct {
	mu  sync.Mutex
	all map[location.Location]*filesystem // by device numbers, without a path
}

// filesystem contains the ledgers of the pools on one filesystem.
type filesystem struct {
	// mu is also the lock of the ledgers, so that no other pool on the filesystem reserves bytes
	// between reading the free space and reserving it.
	mu      sync.Mutex
	ledgers []*Ledger
	// unread contains the names of the pools whose records are not read yet, until their channels
	// are closed. While it is not empty, no pool on the filesystem reserves bytes.
	unread map[chan struct{}]string
	// foreign is the foreign use at the last measurement, in bytes.
	foreign int64

	// measuring is held during Measure.
	measuring sync.Mutex
}

// Join makes the ledger of a pool whose directory is at a location.
func (f *Filesystems) Join(at location.Location) *Ledger {
	root := location.Location{Major: at.Major, Minor: at.Minor}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[location.Location]*filesystem{}
	}
	if f.all[root] == nil {
		f.all[root] = new(filesystem)
	}
	return f.all[root].join()
}

// New makes the ledger of a pool that shares its filesystem with no other.
func New() *Ledger { return new(filesystem).join() }

// join makes the ledger of another pool on the filesystem.
func (s *filesystem) join() *Ledger {
	l := &Ledger{
		filesystem: s, reservations: map[string]Reservation{},
		attached: map[string]bool{}, pending: map[string]bool{}, touched: map[string]bool{},
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledgers = append(s.ledgers, l)
	return l
}

// Leave removes a closed pool from its filesystem. The next measurement counts its volumes
// as foreign use.
func (l *Ledger) Leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ledgers = slices.DeleteFunc(l.ledgers, func(other *Ledger) bool { return other == l })
}

// counted returns the ledgers of the pools whose records were read.
func (s *filesystem) counted() []*Ledger {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.ledgers), func(l *Ledger) bool { return !l.complete })
}

// Expect prevents all pools on the filesystem from reserving bytes until read is called, because the
// records of the named pool are not read yet.
func (l *Ledger) Expect(pool string) (read func()) {
	c := make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.unread == nil {
		l.unread = map[chan struct{}]string{}
	}
	l.unread[c] = pool
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.unread[c] != "" {
			delete(l.unread, c)
			close(c)
		}
	}
}

// firstUnread returns the first pool, by name, whose records are not read yet.
func (s *filesystem) firstUnread() (name string, read <-chan struct{}) {
	for c, pool := range s.unread {
		if name == "" || pool < name {
			name, read = pool, c
		}
	}
	return name, read
}

// awaitRead waits until the records of all pools on the filesystem are read, or patience has passed.
func (s *filesystem) awaitRead(patience time.Duration) {
	timeout := time.After(patience)
	for {
		s.mu.Lock()
		_, read := s.firstUnread()
		s.mu.Unlock()
		if read == nil {
			return
		}
		select {
		case <-read:
		case <-timeout:
			return
		}
	}
}

// drain waits until the trash of each pool is empty, except for entries whose removal keeps failing, or
// until atMost has passed.
func (s *filesystem) drain(atMost time.Duration) {
	end := time.Now().Add(atMost)
	for _, l := range s.counted() {
		l.pool.Drain(time.Until(end))
	}
}

// otherPools returns the sum of the shares of all pools other than own, in bytes.
func (s *filesystem) otherPools(own *Ledger) (sum int64) {
	for _, l := range s.ledgers {
		if l != own {
			sum += l.share()
		}
	}
	return sum
}

// share is the number of bytes of the filesystem that the pool takes from the other pools: the bytes
// that it promised, divided by its overcommit, or the usage of its volumes, if that is more.
func (l *Ledger) share() int64 {
	if l.pool == nil {
		return 0
	}
	return max(l.used, int64(math.Ceil(float64(l.promised)/l.config.overcommit())))
}

// Measure measures the usage of the volumes of each pool on the filesystem, and the foreign use. A
// pool that cannot be measured keeps its last measurement, and the others are measured nevertheless.
// Measure returns only an error of l's own pool.
func (l *Ledger) Measure() (own error) {
	if l.config.Accounting != Measured {
		return nil
	}
	l.measuring.Lock() // a measurement under way may have begun before l was complete
	defer l.measuring.Unlock()
	all := map[*Ledger]measured{}
	var last measured
	var sum int64
	for _, each := range l.counted() {
		m, err := each.measureOwn()
		sum += m.used
		if err == nil {
			all[each], last = m, m
		} else if each == l {
			own = err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(all) > 0 {
		l.foreign = max(0, last.space.Filesystem.used()-sum)
	}
	for each, m := range all {
		each.used, each.foreignInDirectory = m.used, l.foreign
		if m.space.limited() {
			each.foreignInDirectory = max(0, m.space.Directory.used()-m.used)
		}
	}
	return own
}

// measured is the measurement of one pool.
type measured struct {
	space Space
	used  int64
}

// measureOwn measures one pool. With an error, it returns the usage of the last measurement.
func (l *Ledger) measureOwn() (m measured, err error) {
	if m.used, err = l.pool.Used(); err == nil {
		m.space, err = l.pool.Space()
	}
	if err != nil {
		m.used = l.used // no lock is needed: only Measure changes it
	}
	return m, err
}

// Leads tells whether this pool measures for all pools on its filesystem: one of them does.
func (l *Ledger) Leads() bool {
	all := l.counted()
	return len(all) > 0 && all[0] == l
}

// Space is what statfs(2) shows for a pool's directory and for its filesystem. They differ if the
// directory has a project quota (XFS, ext4).
type Space struct{ Directory, Filesystem Extent }

// limited tells whether the pool's directory has a project quota.
func (s Space) limited() bool { return s.Directory.Total != s.Filesystem.Total }

// Extent is a size and the free part of it, in bytes.
type Extent struct{ Total, Free int64 }

func (e Extent) used() int64 { return e.Total - e.Free }

// ExtentOf reads the size and the free space of the filesystem of a descriptor. It does not count the
// blocks that are reserved for root, because they keep a node working when its disk is full.
func ExtentOf(fd uintptr) (Extent, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(fd), &st); err != nil {
		return Extent{}, err
	}
	return Extent{int64(st.Blocks-(st.Bfree-st.Bavail)) * st.Frsize, int64(st.Bavail) * st.Frsize}, nil
}
