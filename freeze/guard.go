package freeze

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// report is what the guardian tells the driver, one for each filesystem that is frozen,
// and a last one.
type report struct {
	// Last: what was frozen is thawed, and the note removed.
	Last bool `json:"last,omitempty"`
	// Errno is why the next filesystem could not be frozen, in the last report.
	Errno syscall.Errno `json:"errno,omitempty"`
	// Early: the time was over, or a filesystem was thawed by somebody else.
	Early bool `json:"early,omitempty"`
}

// The guardian's descriptors: its connection to the driver, the note, which it keeps
// locked, and from firstRoot on the filesystems.
const (
	driverSide = 3
	firstRoot  = 5
)

// guardian keeps filesystems frozen. It writes to no file, for that might be on one of
// them.
type guardian struct {
	conn  *net.UnixConn
	over  chan struct{} // closed when it is time to thaw
	early atomic.Bool
	holds sync.WaitGroup
	mu    sync.Mutex
	errs  []error
}

// Guard is what the program does that New was told of: it freezes, waits for the
// driver's word or death or the time limit, whatever comes first, and thaws. args are
// what Freeze has added: the limit, the note, the filesystems' names.
func Guard(args []string) error {
	if len(args) < 2 {
		return errors.New("it is for this program's own use")
	}
	signal.Ignore() // all: it ends when it has thawed, and by SIGKILL
	limit, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	conn, err := connOf(driverSide)
	if err != nil {
		return fmt.Errorf("it is for this program's own use: %w", err)
	}
	g := &guardian{conn: conn, over: make(chan struct{})}
	if err := conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	go g.await()
	last := report{Last: true, Errno: g.freezeAll(args[2:])}
	g.holds.Wait()
	if err := errors.Join(append(g.errs, os.Remove(args[1]))...); err != nil {
		return err // the driver tries it, too, if there is no last word
	}
	last.Early = g.early.Load()
	return json.NewEncoder(conn).Encode(last)
}

// await ends the freeze when the driver hangs up, or is dead, or time is over.
func (g *guardian) await() {
	_, err := g.conn.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		g.early.Store(true)
	}
	close(g.over)
}

// freezeAll freezes one after the other, and returns when it is time to thaw: why it
// froze no more, or 0.
func (g *guardian) freezeAll(names []string) syscall.Errno {
	out := json.NewEncoder(g.conn)
	for i, name := range names {
		frozen := make(chan error, 1)
		g.holds.Go(func() { g.hold(os.NewFile(uintptr(firstRoot+i), name), frozen) })
		select {
		case err := <-frozen:
			var errno syscall.Errno
			if errors.As(err, &errno) {
				_ = g.conn.CloseRead() // ends the freeze of the others
				<-g.over
				return errno
			}
			_ = out.Encode(report{}) // a driver that is dead is no more to be told
		case <-g.over:
			return 0
		}
	}
	<-g.over
	return 0
}

// hold freezes a filesystem, and thaws it when it is time. A freeze that hangs in the
// kernel keeps no other waiting.
func (g *guardian) hold(root *os.File, frozen chan<- error) {
	err := freeze(root)
	frozen <- err
	if err != nil {
		return
	}
	<-g.over
	err = thaw(root)
	if errors.Is(err, errNotFrozen) {
		g.early.Store(true)
		return
	}
	if err != nil {
		g.mu.Lock()
		g.errs = append(g.errs, fmt.Errorf("thawing %s: %w", root.Name(), err))
		g.mu.Unlock()
	}
}
