// Package freeze keeps filesystems frozen while they are copied, by FIFREEZE and
// FITHAW (linux/fs.h; fsfreeze(8)), and never for longer: the kernel keeps a freeze
// when the process dies that asked for it, so that another process, the guardian, has
// it. That thaws when it is told to, when the driver dies, and when the time is over.
// If it is killed the driver thaws. If both are, which is so if the driver is the
// first process of a container, a note says what the next driver has to thaw.
//
// It knows neither volumes nor pools. Nobody may write to a frozen filesystem, and
// wait for that to return, who is to end the freeze.
package freeze

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// ErrExpired means: the filesystems were thawed before the caller said so. What was
// copied meanwhile is not of one moment.
var ErrExpired = errors.New("the filesystems were thawed too early")

// Target is a mounted filesystem.
type Target struct {
	// Root is a directory of it, open for reading, which stays the caller's.
	Root *os.File
	// Name is unique; Recover asks for the filesystem by it.
	Name string
}

// Freezer freezes filesystems.
type Freezer struct {
	guardian []string
	notes    string
}

// New returns a freezer. The words start a program that calls Guard with what is added
// to them. The directory for the notes is made if it is missing; nothing that is ever
// frozen may lie above it.
func New(words []string, notes string) *Freezer { return &Freezer{guardian: words, notes: notes} }

// Frozen is what one call has frozen.
type Frozen struct {
	targets []Target // with descriptors of their own
	note    *os.File
	conn    *net.UnixConn
	child   *command.Child
	// ended has nil once all is frozen, and how the freeze has ended after that; of
	// one that failed only that.
	ended chan error
	done  chan struct{}
	err   error // once done is closed
}

// Freeze freezes the filesystems in their order, and returns when all are. They are
// thawed after limit, whatever the caller does. If one cannot be frozen none is when
// Freeze returns: syscall.EBUSY if somebody else has it frozen, whose freeze stays,
// syscall.EOPNOTSUPP if its kind has no freezing. If ctx or limit (ErrExpired) end
// first, those that are frozen by then are thawed at once; one that the kernel is still
// writing its dirty pages of is when that is done.
//
// A filesystem cannot be unmounted until it is thawed (EBUSY).
func (f *Freezer) Freeze(ctx context.Context, limit time.Duration, targets ...Target) (*Frozen, error) {
	z, err := f.start(limit, targets)
	if err != nil {
		return nil, fmt.Errorf("freezing %s: %w", namesOf(targets), err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w: not all were frozen within %v: try again when less is being written", ErrExpired, limit))
	defer cancel()
	select {
	case err := <-z.ended:
		if err != nil {
			<-z.done
			return nil, err
		}
		crashpoint.Here(crashpoint.FreezeFrozen)
		return z, nil
	case <-ctx.Done():
		z.hangUp()
		return nil, fmt.Errorf("freezing %s: %w", namesOf(targets), context.Cause(ctx))
	}
}

// Thaw thaws all, and returns when that is done; what it says stays the same.
// ErrExpired if something was thawed before: by the limit, because the guardian was
// killed, or by somebody else who did not freeze it again.
func (z *Frozen) Thaw() error {
	z.hangUp()
	<-z.done
	return z.err
}

// start starts a guardian, which begins to freeze.
func (f *Freezer) start(limit time.Duration, targets []Target) (*Frozen, error) {
	z := &Frozen{ended: make(chan error, 2), done: make(chan struct{})}
	err := z.dup(targets)
	if err == nil {
		z.note, err = writeNote(f.notes, targets)
	}
	if err == nil {
		if err = z.run(f.guardian, limit); err != nil {
			err = errors.Join(err, os.Remove(z.note.Name()))
		}
	}
	if err != nil {
		z.release()
		return nil, err
	}
	go z.attend()
	return z, nil
}

// run runs the guardian.
func (z *Frozen) run(words []string, limit time.Duration) error {
	conn, theirs, err := socketPair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	z.conn = conn
	run := command.Command{Name: words[0], Hold: []*os.File{theirs, z.note}}
	run.Args = append(slices.Clone(words[1:]), limit.String(), z.note.Name())
	for _, t := range z.targets {
		run.Args, run.Hold = append(run.Args, t.Name), append(run.Hold, t.Root)
	}
	z.child, err = run.StartDetached()
	return err
}

func (z *Frozen) dup(targets []Target) error {
	for _, t := range targets {
		fd, err := unix.FcntlInt(t.Root.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		z.targets = append(z.targets, Target{Root: os.NewFile(uintptr(fd), t.Root.Name()), Name: t.Name})
	}
	return nil
}

func (z *Frozen) release() {
	for _, t := range z.targets {
		t.Root.Close()
	}
	if z.note != nil {
		z.note.Close()
	}
	if z.conn != nil {
		_ = z.conn.Close()
	}
}

// hangUp is the word to thaw: the guardian sees the same when the driver dies.
func (z *Frozen) hangUp() { _ = z.conn.CloseWrite() } // it has ended, or hears it

// attend hears the guardian out. If that ended without its last word it may have left
// frozen what it told of, and the next in turn.
func (z *Frozen) attend() {
	frozen, last := z.listen()
	<-z.child.Done()
	switch {
	case last == nil:
		z.err = errors.Join(fmt.Errorf("%w: the guardian of %s ended: %w", ErrExpired, namesOf(z.targets), z.child.Err()), z.thaw(frozen+1))
	case last.Errno != 0:
		z.err = refusal(z.targets[frozen].Name, last.Errno)
	case last.Early:
		z.err = fmt.Errorf("%s: %w: by the time limit, or by somebody else", namesOf(z.targets), ErrExpired)
	}
	z.release()
	close(z.done)
	z.ended <- z.err
}

// listen counts what is frozen until the last word, nil if there is none.
func (z *Frozen) listen() (frozen int, last *report) {
	for in := json.NewDecoder(z.conn); ; {
		var r report
		if err := in.Decode(&r); err != nil {
			return frozen, nil
		}
		if r.Last {
			return frozen, &r
		}
		if frozen++; frozen == len(z.targets) {
			z.ended <- nil
		}
	}
}

// thaw thaws the first n in place of the guardian.
func (z *Frozen) thaw(n int) error {
	var errs []error
	for _, t := range z.targets[:min(n, len(z.targets))] {
		if err := thaw(t.Root); err != nil && !errors.Is(err, errNotFrozen) {
			errs = append(errs, fmt.Errorf("thawing %s: %w", t.Name, err))
		}
	}
	if errs == nil {
		return os.Remove(z.note.Name())
	}
	return errors.Join(errs...)
}

// refusal explains why the kernel froze nothing.
func refusal(name string, errno syscall.Errno) error {
	err := fmt.Errorf("freezing %s: FIFREEZE: %w", name, errno)
	switch errno {
	case unix.EBUSY:
		return fmt.Errorf("%w: somebody else has it frozen: wait, or thaw it (fsfreeze --unfreeze)", err)
	case unix.EOPNOTSUPP:
		return fmt.Errorf("%w: use ext4, xfs or btrfs", err)
	default:
		return err
	}
}

func namesOf(targets []Target) string {
	names := make([]string, len(targets))
	for i, t := range targets {
		names[i] = t.Name
	}
	return strings.Join(names, ", ")
}

// socketPair is the driver's side, and the file that the guardian inherits.
func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "driver")
	if ours, err = connOf(fds[0]); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}

// connOf makes a connection of a descriptor, which it closes.
func connOf(fd int) (*net.UnixConn, error) {
	file := os.NewFile(uintptr(fd), "guardian")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("descriptor %d: %w", fd, unix.ENOTSOCK), conn.Close())
	}
	return unixConn, nil
}
