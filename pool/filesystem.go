package pool

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/location"
	"github.com/trivet-csi/trivet/volume"
)

// Filesystems knows the filesystem of each pool of one process. The pools on one
// filesystem share its space.
type Filesystems struct {
	mu  sync.Mutex
	all map[location.Location]*filesystem // by their roots
}

// filesystem adds up the ledgers of the pools on it.
type filesystem struct {
	// mu is the lock of the ledgers too: between a look at what is free and the promise
	// of it no other pool promises anything.
	mu      sync.Mutex
	ledgers []*ledger
	// unread has the names of pools whose promises are not known yet. Until their channels
	// are closed, no pool on the filesystem promises anything.
	unread map[chan struct{}]string
	// foreign is what is used by others than the volumes of the pools, as last measured.
	foreign int64

	measuring sync.Mutex
}

// join makes the ledger of a pool at a site. Whole disks are no part of the filesystem
// that their records are on, and promise nothing of it.
func (f *Filesystems) join(at site, c Config) *ledger {
	if c.Disks != nil {
		return newLedger()
	}
	root := location.Location{Major: at.at.Major, Minor: at.at.Minor}
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

func (s *filesystem) join() *ledger {
	l := &ledger{
		filesystem: s, stakes: map[string]stake{},
		attached: map[string]bool{}, pending: map[string]bool{}, touched: map[string]bool{},
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledgers = append(s.ledgers, l)
	return l
}

// leave takes a closed pool off its filesystem. The next measurement counts its volumes as
// foreign use.
func (l *ledger) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ledgers = slices.DeleteFunc(l.ledgers, func(other *ledger) bool { return other == l })
}

func (l *ledger) begins(p *Pool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pool = p
}

// open are the ledgers whose pools are open.
func (s *filesystem) open() []*ledger {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.ledgers), func(l *ledger) bool { return !l.counted })
}

// expect keeps all pools on the filesystem from promising anything until read is called:
// what the named pool has promised is not known yet.
func (s *filesystem) expect(pool string) (read func()) {
	c := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unread == nil {
		s.unread = map[chan struct{}]string{}
	}
	s.unread[c] = pool
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.unread[c] != "" {
			delete(s.unread, c)
			close(c)
		}
	}
}

// firstUnread is one of the pools that are not read yet, the first by name.
func (s *filesystem) firstUnread() (name string, read <-chan struct{}) {
	for c, pool := range s.unread {
		if name == "" || pool < name {
			name, read = pool, c
		}
	}
	return name, read
}

// awaitRead waits until the promises of all pools on the filesystem are known, at most for
// a time.
func (s *filesystem) awaitRead(patience time.Duration) {
	over := time.After(patience)
	for {
		s.mu.Lock()
		_, read := s.firstUnread()
		s.mu.Unlock()
		if read == nil {
			return
		}
		select {
		case <-read:
		case <-over:
			return
		}
	}
}

// drain waits until nothing is in the trash of any pool, at most for a time.
func (s *filesystem) drain(atMost time.Duration) {
	end := time.Now().Add(atMost)
	for _, l := range s.open() {
		l.pool.reaper.drain(time.Until(end))
	}
}

// otherPools is the space of all pools but own: what each promised divided by its
// overcommit, or what its volumes use, if that is more.
func (s *filesystem) otherPools(own *ledger) (sum int64) {
	for _, l := range s.ledgers {
		if l != own {
			sum += l.share()
		}
	}
	return sum
}

func (l *ledger) share() int64 {
	if l.pool == nil {
		return 0
	}
	return max(l.used, int64(math.Ceil(float64(l.promised)/l.pool.cfg.overcommit())))
}

// ofOthers names the other pools whose space reduces the room; empty if there is none.
func (l *ledger) ofOthers(u Usage) string {
	var names []string
	for _, other := range l.ledgers {
		if other != l && other.share() > 0 {
			names = append(names, strconv.Quote(other.pool.cfg.Name))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf(", %s for pool %s on the same filesystem", volume.FormatSize(u.OtherPools), strings.Join(names, ", "))
}

// measure measures what the volumes of each pool on the filesystem use, and what others
// use. A pool that cannot be measured keeps its last measurement and does not keep the
// others from being measured; the error is that of l's own pool.
func (l *ledger) measure() (own error) {
	l.measuring.Lock() // a measurement under way may have begun before l was counted
	defer l.measuring.Unlock()
	all := map[*ledger]measured{}
	var last measured
	var sum int64
	for _, each := range l.open() {
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
		l.foreign = max(0, last.space.whole.used()-sum)
	}
	for each, m := range all {
		each.used, each.foreignHere = m.used, l.foreign
		if m.space.limited() {
			each.foreignHere = max(0, m.space.here.used()-m.used)
		}
	}
	return own
}

// measured is the measurement of one pool.
type measured struct {
	space space
	used  int64
}

// measureOwn returns what was used before together with an error.
func (l *ledger) measureOwn() (m measured, err error) {
	if m.used, err = l.pool.measure(); err == nil {
		m.space, err = l.pool.space()
	}
	if err != nil {
		m.used = l.used // only changed by measure
	}
	return m, err
}

// leads tells whether a pool is the one that measures for all on its filesystem.
func (l *ledger) leads() bool {
	open := l.open()
	return len(open) > 0 && open[0] == l
}

// space is what a pool's filesystem has. A directory under a project quota (XFS, ext4)
// shows that quota's size in place of the filesystem's; a file in it does not.
type space struct{ here, whole extent }

func (s space) limited() bool { return s.here.total != s.whole.total }

// extent is a size in bytes and what is left of it.
type extent struct{ total, free int64 }

func (e extent) used() int64 { return e.total - e.free }

// extentOf leaves out what a filesystem keeps for root: that keeps a node alive whose disk
// is full, and is not promised.
func extentOf(fd uintptr) (extent, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(fd), &st); err != nil {
		return extent{}, err
	}
	return extent{int64(st.Blocks-(st.Bfree-st.Bavail)) * st.Frsize, int64(st.Bavail) * st.Frsize}, nil
}

func (p *Pool) space() (s space, err error) {
	if s.here, err = extentOf(p.volumes.Fd()); err == nil {
		s.whole = s.here
		if !p.Shared() {
			s.whole, err = extentOf(p.file.Fd())
		}
	}
	if err != nil {
		err = p.explain(fmt.Errorf("pool %q: statfs: %w", p.cfg.Name, err))
	}
	return s, err
}
