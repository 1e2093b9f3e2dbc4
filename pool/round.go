package pool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// ledgerFile is locked by who promises bytes of a shared pool.
	ledgerFile = ".trivet/ledger"
	// ledgerPage is its size in bytes.
	ledgerPage = 4096
	// growthsKept is how many grown volumes it names.
	growthsKept = 32
	// ledgerPatience is how long a call waits for that lock. One that died with its
	// node is given back with the node's lease.
	ledgerPatience = 20 * time.Second
	// joinTime is how long callers may join a round that has begun: then others,
	// of other processes, shall have their turn.
	joinTime = 100 * time.Millisecond
)

// page is what stands in the ledger file: whether another process promised
// something since this one last looked. All else is read from the folders.
type page struct {
	// Writer is of the last round before which another process had one, and of no other.
	Writer string `json:"writer"`
	// Growths counts the volumes that grew; Grown names the last of them.
	Growths int      `json:"growths"`
	Grown   []string `json:"grown,omitempty"`
}

// rounds are the times in which this process has the ledger's lock. One is a few
// round trips to the server; callers that come meanwhile share it.
type rounds struct {
	mu      sync.Mutex
	current *round
	file    *os.File
	// seen is the page as it was when the ledger was last true to the folders.
	seen  page
	count int
}

type round struct {
	members int
	began   time.Time
	ready   chan struct{} // what follows is set
	over    chan struct{} // the lock is given back
	err     error
	space   space
	found   page // as the last round left it
	page    page // as this one does

	refresh, again sync.Once
	stale, unread  error // of the one and the other
}

// inRound runs f while this process has the ledger's lock.
func (p *Pool) inRound(ctx context.Context, f func(*round) error) error {
	r := p.enter(ctx)
	defer p.leave(r)
	if r.err != nil {
		return r.err
	}
	return f(r)
}

// enter joins the round that there is, or begins one.
func (p *Pool) enter(ctx context.Context) *round {
	s := &p.rounds
	s.mu.Lock()
	for s.current != nil && time.Since(s.current.began) > joinTime {
		over := s.current.over
		s.mu.Unlock()
		<-over
		s.mu.Lock()
	}
	r, first := s.current, s.current == nil
	if first {
		r = &round{began: time.Now(), ready: make(chan struct{}), over: make(chan struct{})}
		s.current = r
	}
	r.members++
	s.mu.Unlock()
	if first {
		r.err = p.beginRound(ctx, r)
		close(r.ready)
	}
	<-r.ready
	return r
}

// leave ends the round with its last member.
func (p *Pool) leave(r *round) {
	s := &p.rounds
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.members--; r.members > 0 {
		return
	}
	if r.err == nil {
		_ = unix.Flock(int(s.file.Fd()), unix.LOCK_UN)
	}
	s.current = nil
	close(r.over)
}

// beginRound takes the lock and says so in the page. Without locks (see noLocks)
// two processes may promise the same bytes.
func (p *Pool) beginRound(ctx context.Context, r *round) (err error) {
	token, err := p.ownToken()
	if err != nil {
		return err
	}
	if r.space, err = p.space(); err != nil {
		return err
	}
	s := &p.rounds
	if s.file == nil {
		if s.file, err = p.openRegular(p.dir, ledgerFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return p.strange(ledgerFile, err)
		}
	}
	if err := p.lockLedger(ctx); err != nil {
		return err
	}
	if err := p.turnPage(r, token); err != nil {
		_ = unix.Flock(int(s.file.Fd()), unix.LOCK_UN)
		return err
	}
	return nil
}

// turnPage reads what the last round left, and writes that there was one of this
// process, unless that stands there.
func (p *Pool) turnPage(r *round, token string) (err error) {
	s := &p.rounds
	if r.found, err = p.readPage(); err != nil {
		return err
	}
	r.page = r.found
	if s.seen.Writer != "" && r.found.Writer == s.seen.Writer { // nobody was here since
		return nil
	}
	s.count++
	r.page.Writer = token + "/" + strconv.Itoa(s.count)
	return p.writePage(r.page)
}

func (p *Pool) lockLedger(ctx context.Context) error {
	f := p.rounds.file
	err := retry.For(ctx, ledgerPatience, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return volume.Errorf(volume.ErrUnavailable, "pool %q: another process has had the lock of %s for over %v: try again; if that one's node died, its lease at the server has to end", p.cfg.Name, ledgerFile, ledgerPatience)
	case err == nil || noLocks(err):
		return nil
	case errors.Is(err, unix.ESTALE): // removed by hand: another is made next time
		p.rounds.file = nil
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: locking %s: %w", p.cfg.Name, ledgerFile, err)
}

// readPage reads what the last round left. What cannot be read says that all is to
// be looked at.
func (p *Pool) readPage() (page, error) {
	b := make([]byte, ledgerPage)
	n, err := unix.Pread(int(p.rounds.file.Fd()), b, 0)
	if err != nil {
		return page{}, fmt.Errorf("pool %q: reading %s: %w", p.cfg.Name, ledgerFile, err)
	}
	return parsePage(bytes.TrimRight(b[:n], " \n")), nil
}

func parsePage(b []byte) (out page) {
	if json.Unmarshal(b, &out) != nil {
		return page{}
	}
	return out
}

// writePage writes the page. It is at the server when the lock is given back.
func (p *Pool) writePage(next page) error {
	text, err := json.Marshal(next)
	if err != nil {
		return err
	}
	b := append(bytes.Repeat([]byte(" "), ledgerPage-1), '\n')
	copy(b, text)
	if _, err := unix.Pwrite(int(p.rounds.file.Fd()), b, 0); err != nil {
		return fmt.Errorf("pool %q: writing %s: %w", p.cfg.Name, ledgerFile, err)
	}
	return nil
}

// noteGrowth tells the other processes that a volume's record has another size.
func (p *Pool) noteGrowth(ctx context.Context, name string) error {
	return p.inRound(ctx, func(r *round) error {
		s := &p.rounds
		s.mu.Lock()
		defer s.mu.Unlock()
		next := r.page
		next.Growths++
		next.Grown = append(slices.Clone(next.Grown), name)
		next.Grown = next.Grown[max(0, len(next.Grown)-growthsKept):]
		if err := p.writePage(next); err != nil {
			return err
		}
		if s.seen.Writer == r.page.Writer { // all of the others' is known: so is this
			s.seen.Growths = next.Growths
		}
		r.page = next
		return nil
	})
}

// refreshed makes the ledger true to the folders, if another process promised
// something since it last was.
func (p *Pool) refreshed(ctx context.Context, r *round) error {
	r.refresh.Do(func() { r.stale = p.follow(ctx, r) })
	return r.stale
}

func (p *Pool) follow(ctx context.Context, r *round) error {
	s := &p.rounds
	s.mu.Lock()
	seen := s.seen
	s.mu.Unlock()
	if seen.Writer == r.page.Writer {
		return nil
	}
	var err error
	r.again.Do(func() { err = p.refresh(ctx, r.found.grownSince(seen)) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = page{Writer: r.page.Writer, Growths: r.page.Growths}
	return nil
}

// orReread tries what the ledger may refuse, and if it does, once more when the folders
// were read again: other processes may have given something back without a word.
func (p *Pool) orReread(ctx context.Context, r *round, try func() error) error {
	err := try()
	if err == nil || r == nil {
		return err
	}
	r.again.Do(func() { r.unread = p.refresh(ctx, nothingGrew) })
	if r.unread != nil {
		return r.unread
	}
	return try()
}

func nothingGrew(string) bool { return false }

// grownSince tells of a volume whether it may have grown since a page was seen.
func (now page) grownSince(seen page) func(name string) bool {
	n := now.Growths - seen.Growths
	if n < 0 || n > len(now.Grown) {
		return func(string) bool { return true }
	}
	grown := map[string]bool{}
	for _, name := range now.Grown[len(now.Grown)-n:] {
		grown[name] = true
	}
	return func(name string) bool { return grown[name] }
}

// refresh reads which volumes there are: their folders' names and inode numbers, and
// the records of those that are new here, have grown or could not be read. What this
// process itself is making is left as it is.
func (p *Pool) refresh(ctx context.Context, grown func(name string) bool) error {
	before, end := p.ledger.read()
	defer end()
	// In this order what moves on meanwhile is counted twice, not missed.
	making, err := p.makingElsewhere()
	if err != nil {
		return err
	}
	folders, err := inodesIn(p.volumes, ".")
	if err != nil {
		return err
	}
	sets, err := inodesIn(p.snapshots, ".")
	if err != nil {
		return err
	}
	trashed, err := namesIn(p.trash, ".")
	if err != nil {
		return err
	}
	there := map[string]bool{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for name, ino := range folders {
		there[volumeDir(name)] = true
		if have, known := before[volumeDir(name)]; !known || have.ino != ino || have.unread || grown(name) {
			group.Go(func() error { return errors.Join(ctx.Err(), p.countUntouched(name, ino)) })
		}
	}
	for name, ino := range sets {
		there[snapshotDir(name)] = true
		if have, known := before[snapshotDir(name)]; !known || have.ino != ino {
			group.Go(func() error { return errors.Join(ctx.Err(), p.countSetUntouched(name, ino)) })
		}
	}
	for _, name := range trashed {
		there[trashDir+"/"+name] = true
		if _, known := before[trashDir+"/"+name]; !known {
			group.Go(func() error { p.countTrashed(name); return ctx.Err() })
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	for dir, s := range making {
		there[dir] = true
		p.ledger.set(dir, s)
	}
	for dir := range before {
		if !there[dir] && !p.ledger.touched[dir] {
			p.ledger.remove(dir)
		}
	}
	return nil
}

// makingElsewhere is what other processes have reserved for volumes that they make
// or grow.
func (p *Pool) makingElsewhere() (map[string]stake, error) {
	names, err := namesIn(p.tmp, ".")
	if err != nil {
		return nil, err
	}
	p.owner.mu.Lock()
	own := p.owner.token
	p.owner.mu.Unlock()
	making := map[string]stake{}
	for _, name := range names {
		if e, ok := parseEntry(name); ok && e.owner != own && e.bytes() > 0 {
			making[tmpDir+"/"+name] = stake{backend: unknownBackend, bytes: e.bytes()}
		}
	}
	return making, nil
}

// countUntouched reads one volume, whose folder had an inode number, into the ledger,
// unless this process knows better.
func (p *Pool) countUntouched(name string, ino uint64) error {
	s, err := p.readStake(name)
	return p.follows(volumeDir(name), ino, s, err)
}

// countSetUntouched is countUntouched for a set of snapshots.
func (p *Pool) countSetUntouched(name string, ino uint64) error {
	s, err := p.readSetStake(name)
	return p.follows(snapshotDir(name), ino, s, err)
}

func (p *Pool) follows(dir string, ino uint64, s stake, err error) error {
	if errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if !p.ledger.touched[dir] {
		s.ino = ino
		p.ledger.follow(dir, s, err)
	}
	return nil
}

func (p *Pool) countTrashed(name string) {
	s := p.trashedStake(name)
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.set(trashDir+"/"+name, s)
}
