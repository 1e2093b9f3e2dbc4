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

	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/linux/sys"
)

// Role is the name of the role of the guardian (Guard). In the process list it is followed by the path
// of the note and the names of the filesystems.
const Role = "freeze-guard"

// report is a message from the guardian to the driver. The guardian sends one for each frozen
// filesystem and a last one.
type report struct {
	// Last means that all filesystems are thawed and the note is removed.
	Last bool `json:"last,omitempty"`
	// Errno, in the last report, is the reason why the next filesystem could not be frozen.
	Errno syscall.Errno `json:"errno,omitempty"`
	// Early means that the time limit ended the freeze, or that another process thawed a
	// filesystem.
	Early bool `json:"early,omitempty"`
}

// order holds the arguments of the guardian. The files of the guardian are the note, which it keeps
// locked, and one directory of each filesystem.
type order struct {
	Limit time.Duration
	Note  string
}

// guardian keeps filesystems frozen. It writes to no file, because a file could be on one of them.
type guardian struct {
	conn  *net.UnixConn
	over  chan struct{} // closed when the freeze ends
	early atomic.Bool
	holds sync.WaitGroup
	mu    sync.Mutex
	errs  []error
}

// Guard is the guardian: it freezes the filesystems, waits until the driver hangs up or dies or the
// time limit passes, and thaws them.
func Guard(in reexec.Input) error {
	var o order
	if err := in.Decode(&o); err != nil {
		return err
	}
	if len(in.Files) < 1 {
		return errors.New("the guardian received no note")
	}
	defer in.Files[0].Close()
	signal.Ignore() // all signals: only SIGKILL ends it before it has thawed
	g := &guardian{conn: in.Conn, over: make(chan struct{})}
	if err := g.conn.SetReadDeadline(time.Now().Add(o.Limit)); err != nil {
		return err
	}
	go g.await()
	last := report{Last: true, Errno: g.freezeAll(in.Files[1:])}
	g.holds.Wait()
	if err := errors.Join(append(g.errs, os.Remove(o.Note))...); err != nil {
		return err // without a last report the driver thaws as well
	}
	last.Early = g.early.Load()
	return json.NewEncoder(g.conn).Encode(last)
}

// await ends the freeze when the driver hangs up or dies, or the time limit passes.
func (g *guardian) await() {
	_, err := g.conn.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		g.early.Store(true)
	}
	close(g.over)
}

// freezeAll freezes one filesystem after the other, and returns when the freeze ends. It returns the
// errno of the filesystem that could not be frozen, or 0.
func (g *guardian) freezeAll(roots []*os.File) syscall.Errno {
	out := json.NewEncoder(g.conn)
	for _, root := range roots {
		frozen := make(chan error, 1)
		g.holds.Go(func() { g.hold(root, frozen) })
		select {
		case err := <-frozen:
			var errno syscall.Errno
			if errors.As(err, &errno) {
				_ = g.conn.CloseRead() // ends the freeze of the others
				<-g.over
				return errno
			}
			_ = out.Encode(report{}) // fails if the driver is dead
		case <-g.over:
			return 0
		}
	}
	<-g.over
	return 0
}

// hold freezes a filesystem, and thaws it when the freeze ends. Each filesystem has its own goroutine, so
// that a freeze that hangs in the kernel does not delay the thaw of the others.
func (g *guardian) hold(root *os.File, frozen chan<- error) {
	err := sys.Freeze(root)
	frozen <- err
	if err != nil {
		return
	}
	<-g.over
	err = sys.Thaw(root)
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
