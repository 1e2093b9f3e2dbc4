package shared

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

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// ledgerFile is locked by a process that reserves bytes.
	ledgerFile = ".trivet/ledger"
	// ledgerPage is the size of the ledger file in bytes.
	ledgerPage    = 4096
	ledgerVersion = 1
	// growthsKept is the number of grown volumes that the ledger file names.
	growthsKept = 32
	// ledgerPatience is the longest time for which a call waits for the lock of the ledger file.
	// The server releases the lock of a dead node when the node's lease expires.
	ledgerPatience = 20 * time.Second
	// joinTime is the time after the start of a transaction during which callers may join it. It is
	// limited so that the transaction ends and other processes get the lock.
	joinTime = 100 * time.Millisecond
)

// page is the content of the ledger file. It shows whether another process has reserved bytes
// since this process last read the folders.
type page struct {
	Version int `json:"version"`
	// Writer identifies a series of transactions of one process. A process writes a new value in its
	// first transaction after one of another process.
	Writer string `json:"writer"`
	// Growths counts the growths of volumes; Grown names the last volumes that grew.
	Growths int      `json:"growths"`
	Grown   []string `json:"grown,omitempty"`
}

// transactions has the state of this process's transactions. During a transaction the process has
// the lock of the ledger file. The lock takes a few round trips, so concurrent calls share one.
type transactions struct {
	mu      sync.Mutex
	current *transaction
	file    *os.File
	// seen is the page at the last refresh of the ledger.
	seen page
	// count is the number of values of Writer that this process has written.
	count int
}

// transaction is one period in which this process has the lock of the ledger file.
type transaction struct {
	members int // calls that share the transaction
	began   time.Time
	ready   chan struct{} // closed when the fields below are set
	over    chan struct{} // closed when the lock is released
	err     error
	space   ledger.Space
	found   page // of the previous transaction
	page    page // of this transaction

	// refresh updates the ledger from the folders, if another process has had a transaction since
	// the last refresh.
	refresh func() error

	// reread reads the folders at most once in the transaction.
	reread    sync.Once
	rereadErr error
}

// transact runs f while this process has the lock of the ledger file.
func (e *Export) transact(ctx context.Context, f func(*transaction) error) error {
	t := e.join(ctx)
	defer e.leave(t)
	if t.err != nil {
		return t.err
	}
	return f(t)
}

// join joins the current transaction, or begins one.
func (e *Export) join(ctx context.Context) *transaction {
	s := &e.transactions
	s.mu.Lock()
	for s.current != nil && time.Since(s.current.began) > joinTime {
		over := s.current.over
		s.mu.Unlock()
		<-over
		s.mu.Lock()
	}
	t, first := s.current, s.current == nil
	if first {
		t = &transaction{began: time.Now(), ready: make(chan struct{}), over: make(chan struct{})}
		s.current = t
	}
	t.members++
	s.mu.Unlock()
	if first {
		t.refresh = sync.OnceValue(func() error { return e.refreshIfStale(context.WithoutCancel(ctx), t) })
		t.err = e.begin(ctx, t)
		close(t.ready)
	}
	<-t.ready
	return t
}

// leave ends the transaction with its last member.
func (e *Export) leave(t *transaction) {
	s := &e.transactions
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.members--; t.members > 0 {
		return
	}
	if t.err == nil {
		_ = unix.Flock(int(s.file.Fd()), unix.LOCK_UN)
	}
	s.current = nil
	close(t.over)
}

// begin takes the lock and writes the page. If the server does not support locks, two processes may
// promise the same bytes.
func (e *Export) begin(ctx context.Context, t *transaction) (err error) {
	token, err := e.token()
	if err != nil {
		return err
	}
	if t.space, err = e.Space(); err != nil {
		return err
	}
	s := &e.transactions
	if s.file == nil {
		if s.file, err = e.Files.Open(e.Dir, ledgerFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return e.foreign(ledgerFile, err)
		}
	}
	if err := e.lockLedger(ctx); err != nil {
		return err
	}
	if err := e.signPage(t, token); err != nil {
		_ = unix.Flock(int(s.file.Fd()), unix.LOCK_UN)
		return err
	}
	return nil
}

// signPage reads the page of the previous transaction. It writes a new Writer of this process,
// unless no other process has had a transaction since the last refresh.
func (e *Export) signPage(t *transaction, token string) (err error) {
	s := &e.transactions
	if t.found, err = e.readPage(); err != nil {
		return err
	}
	t.page = t.found
	if s.seen.Writer != "" && t.found.Writer == s.seen.Writer {
		return nil
	}
	s.count++
	t.page.Writer = token + "/" + strconv.Itoa(s.count)
	return e.writePage(t.page)
}

// lockLedger locks the ledger file, if the server supports locks. It waits up to ledgerPatience.
func (e *Export) lockLedger(ctx context.Context) error {
	f := e.transactions.file
	err := retry.For(ctx, ledgerPatience, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return volume.Errorf(volume.ErrUnavailable, "pool %q: another process has held the lock of %s for over %v: retry; if the node of that process died, its lease at the server must expire first", e.Name, ledgerFile, ledgerPatience)
	case err == nil || NoLocks(err):
		return nil
	case errors.Is(err, unix.ESTALE): // the file was removed by hand: the next transaction makes a new one
		e.transactions.file = nil
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %q: locking %s: %w", e.Name, ledgerFile, err)
}

// readPage reads the page of the previous transaction. If the page cannot be parsed, readPage returns
// an empty page, which makes this process read all folders. It refuses a page that another version of the driver
// wrote (ErrPrecondition), because that driver would not understand what this process writes.
func (e *Export) readPage() (page, error) {
	b := make([]byte, ledgerPage)
	n, err := unix.Pread(int(e.transactions.file.Fd()), b, 0)
	if err != nil {
		return page{}, fmt.Errorf("pool %q: reading %s: %w", e.Name, ledgerFile, err)
	}
	var p page
	err = volume.DecodeRecord(b[:n], &p, &p.Version, ledgerVersion)
	if err != nil && p.Version != 0 {
		return page{}, volume.Errorf(volume.ErrPrecondition, "pool %q: %s: %w", e.Name, ledgerFile, err)
	}
	if err != nil {
		return page{}, nil //nolint:nilerr // the file is new or damaged
	}
	return p, nil
}

// writePage writes the page. The NFS client sends the page to the server before it releases the lock.
func (e *Export) writePage(next page) error {
	next.Version = ledgerVersion
	text, err := json.Marshal(next)
	if err != nil {
		return err
	}
	b := append(bytes.Repeat([]byte(" "), ledgerPage-1), '\n')
	copy(b, text)
	if _, err := unix.Pwrite(int(e.transactions.file.Fd()), b, 0); err != nil {
		return fmt.Errorf("pool %q: writing %s: %w", e.Name, ledgerFile, err)
	}
	return nil
}

// recordGrowth adds a volume whose record has a new capacity to the page.
func (e *Export) recordGrowth(ctx context.Context, name string) error {
	return e.transact(ctx, func(t *transaction) error {
		s := &e.transactions
		s.mu.Lock()
		defer s.mu.Unlock()
		next := t.page
		next.Growths++
		next.Grown = append(slices.Clone(next.Grown), name)
		next.Grown = next.Grown[max(0, len(next.Grown)-growthsKept):]
		if err := e.writePage(next); err != nil {
			return err
		}
		if s.seen.Writer == t.page.Writer { // this process knows all growths, including the one recorded now
			s.seen.Growths = next.Growths
		}
		t.page = next
		return nil
	})
}

// refreshIfStale reads the folders if another process has had a transaction since the last refresh.
func (e *Export) refreshIfStale(ctx context.Context, t *transaction) error {
	s := &e.transactions
	s.mu.Lock()
	seen := s.seen
	s.mu.Unlock()
	if seen.Writer == t.page.Writer {
		return nil
	}
	var err error
	t.reread.Do(func() { err = e.pool.Refresh(ctx, t.found.grownSince(seen)) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = page{Writer: t.page.Writer, Growths: t.page.Growths}
	return nil
}

// recheck calls a check of the ledger. If the check fails, it reads the folders and calls the check
// again, because other processes do not announce removals.
func (e *Export) recheck(ctx context.Context, t *transaction, check func() error) error {
	err := check()
	if err == nil {
		return nil
	}
	t.reread.Do(func() { t.rereadErr = e.pool.Refresh(ctx, nothingGrew) })
	if t.rereadErr != nil {
		return t.rereadErr
	}
	return check()
}

func nothingGrew(string) bool { return false }

// grownSince returns a function that tells whether a volume may have grown since the page was seen.
func (p page) grownSince(seen page) func(name string) bool {
	n := p.Growths - seen.Growths
	if n < 0 || n > len(p.Grown) {
		return func(string) bool { return true }
	}
	grown := map[string]bool{}
	for _, name := range p.Grown[len(p.Grown)-n:] {
		grown[name] = true
	}
	return func(name string) bool { return grown[name] }
}

// Reserve reserves bytes for a folder in the ledger, and calls show to make the reservation visible
// to other processes. No other process reserves bytes until show has returned.
func (e *Export) Reserve(ctx context.Context, dir string, r ledger.Reservation, show func() error) error {
	reserve := func(t *transaction) error {
		if err := t.refresh(); err != nil {
			return err
		}
		if err := e.recheck(ctx, t, func() error { return e.Ledger.TryReserve(dir, r, t.space) }); err != nil {
			return err
		}
		return show()
	}
	err := e.transact(ctx, reserve)
	if errors.Is(err, volume.ErrExhausted) && e.pool.AwaitTrash() {
		return e.transact(ctx, reserve)
	}
	return err
}

// Exclusively calls f while no other process makes or removes a volume whose directory is outside
// its folder.
func (e *Export) Exclusively(ctx context.Context, f func(recheck func(check func() error) error) error) error {
	return e.transact(ctx, func(t *transaction) error {
		if err := t.refresh(); err != nil {
			return err
		}
		return f(func(check func() error) error { return e.recheck(ctx, t, check) })
	})
}
