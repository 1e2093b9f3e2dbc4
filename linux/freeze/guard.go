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

// Role is the reexec role that runs Guard. In the process list, the path of the note and the names of the
// filesystems follow it.
const Role = "freeze-guard"

// report is a message from the guardian to the driver. The guardian sends an empty report for each frozen
// filesystem, and then a last report.
type report struct {
	// Last means that all filesystems are thawed and the note is removed.
	Last bool `json:"last,omitempty"`
	// Errno, in the last report, is the error of the filesystem that could not be frozen, or 0. This filesystem is
	// the one after those that were reported as frozen.
	Errno syscall.Errno `json:"errno,omitempty"`
	// Early means that the time limit ended the freeze, or that another process thawed a
	// filesystem.
	Early bool `json:"early,omitempty"`
}

// order holds the arguments of the guardian. The guardian inherits the open note, which stays locked while it
// is open, and one open directory of each filesystem.
type order struct {
	Limit time.Duration
	Note  string
}

// guardian keeps filesystems frozen. It writes to no file, because the file could be on a frozen filesystem.
type guardian struct {
	conn  *net.UnixConn
	over  chan struct{}  // closed when the freeze ends
	early atomic.Bool    // Early of the last report
	holds sync.WaitGroup // waits for the goroutines that run hold
	mu    sync.Mutex     // protects errs
	errs  []error        // the errors of thawing
}

// Guard runs the guardian. It freezes the filesystems, waits until the driver hangs up, the driver dies or the
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
	signal.Ignore() // ignores all signals except SIGKILL and SIGSTOP
	g := &guardian{conn: in.Conn, over: make(chan struct{})}
	if err := g.conn.SetReadDeadline(time.Now().Add(o.Limit)); err != nil {
		return err
	}
	go g.await()
	last := report{Last: true, Errno: g.freezeAll(in.Files[1:])}
	g.holds.Wait()
	if err := errors.Join(append(g.errs, os.Remove(o.Note))...); err != nil {
		return err // the driver receives no last report, and therefore thaws, too
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
				_ = g.conn.CloseRead() // makes await end the freeze of the other filesystems
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

// hold freezes a filesystem, sends the result to frozen, and thaws the filesystem when the freeze ends. Each
// filesystem has its own goroutine, so that a freeze that hangs in the kernel does not delay the thaw of the others.
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
