// Package freeze freezes filesystems while they are copied (fsfreeze(8)), and guarantees that they
// are thawed afterwards. A freeze outlives the process that requested it. Therefore a separate process,
// the guardian, freezes the filesystems. It thaws them on request, when the driver dies, and after a time
// limit. If the guardian is killed, the driver thaws the filesystems. If both are killed, for example with the
// container of the driver, the next driver thaws the filesystems that are listed in a file, the note.
//
// A process that thaws filesystems must not write to them before, because the write would block.
package freeze

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/sys"
)

// errNotFrozen is the error of FITHAW on a filesystem that is not frozen.
var errNotFrozen = unix.EINVAL

// ErrExpired means that a filesystem was thawed before the caller called Thaw, so a copy of it may be
// inconsistent.
var ErrExpired = errors.New("the filesystems were thawed too early")

// Target is a mounted filesystem.
type Target struct {
	// Root is a directory of the filesystem, open for reading. The caller closes it.
	Root *os.File
	// Name is unique. Recover passes it to find.
	Name string
}

// Freezer freezes filesystems.
type Freezer struct {
	program, notes string
}

// New returns a freezer. program is the executable that runs Guard for Role (reexec.Run). notes is the
// directory of the notes. It is created if it is missing, and must not be on a filesystem that is ever frozen.
func New(program, notes string) *Freezer { return &Freezer{program: program, notes: notes} }

// Frozen holds the filesystems that one call of Freeze has frozen.
type Frozen struct {
	targets []Target // each Root is a duplicate of the descriptor that the caller passed
	note    *os.File
	child   *reexec.Process // the guardian
	// results receives nil when all are frozen, and err when the guardian has ended. If not all could be
	// frozen, it receives only err.
	results chan error
	done    chan struct{}
	err     error // valid after done is closed
}

// Freeze freezes the filesystems in order, and returns when all are frozen. They are thawed after limit at the
// latest. If one cannot be frozen, Freeze thaws all others before it returns. The error is syscall.EBUSY if another
// process has frozen that filesystem (that freeze remains), and syscall.EOPNOTSUPP if its type cannot be frozen. If
// ctx ends or limit passes (ErrExpired) before all are frozen, the guardian thaws the frozen ones at once. If the
// kernel is still freezing a filesystem, the guardian thaws it as soon as the kernel has frozen it.
//
// A filesystem cannot be unmounted until it is thawed (EBUSY).
func (f *Freezer) Freeze(ctx context.Context, limit time.Duration, targets ...Target) (_ *Frozen, err error) {
	ctx, span := trace.Start(ctx, "freeze")
	defer span.End(&err)
	z, err := f.start(limit, targets)
	if err != nil {
		return nil, fmt.Errorf("freezing %s: %w", namesOf(targets), err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w: not all filesystems were frozen within %v: retry when less data is being written", ErrExpired, limit))
	defer cancel()
	select {
	case err := <-z.results:
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

// Thaw thaws all filesystems and waits until they are thawed. A second call returns the same result. The error is
// ErrExpired if a filesystem was thawed before the call because the limit passed, because the guardian was killed, or
// by another process.
func (z *Frozen) Thaw() error {
	z.hangUp()
	<-z.done
	return z.err
}

// start writes the note and starts a guardian, which freezes the filesystems.
func (f *Freezer) start(limit time.Duration, targets []Target) (*Frozen, error) {
	z := &Frozen{results: make(chan error, 2), done: make(chan struct{})}
	err := z.dup(targets)
	if err == nil {
		z.note, err = writeNote(f.notes, targets)
	}
	if err == nil {
		if err = z.startGuardian(f.program, limit); err != nil {
			err = errors.Join(err, os.Remove(z.note.Name()))
		}
	}
	if err != nil {
		z.release()
		return nil, err
	}
	go z.awaitEnd()
	return z, nil
}

// startGuardian starts the guardian, and sets z.child.
func (z *Frozen) startGuardian(program string, limit time.Duration) (err error) {
	note := z.note.Name()
	guardian := reexec.Child{
		Program: program, Role: Role, Label: []string{note}, Args: order{limit, note}, Files: []*os.File{z.note}, Detached: true,
	}
	for _, t := range z.targets {
		guardian.Label = append(guardian.Label, t.Name)
		guardian.Files = append(guardian.Files, t.Root)
	}
	z.child, err = guardian.Start()
	return err
}

// dup sets z.targets to the targets, with a duplicate of each descriptor.
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

// release closes the files of z.
func (z *Frozen) release() {
	for _, t := range z.targets {
		t.Root.Close()
	}
	if z.note != nil {
		z.note.Close()
	}
	if z.child != nil {
		_ = z.child.Conn.Close()
	}
}

// hangUp requests the thaw by closing the connection for writing. The guardian cannot distinguish this from the
// death of the driver.
func (z *Frozen) hangUp() { _ = z.child.Conn.CloseWrite() } // fails only if the guardian has ended

// awaitEnd waits until the guardian ends, and sets z.err. If the guardian ends without a last report, the
// filesystems that it reported as frozen and the next one may still be frozen.
func (z *Frozen) awaitEnd() {
	frozen, last := z.listen()
	<-z.child.Done()
	switch {
	case last == nil:
		z.err = errors.Join(fmt.Errorf("%w: the guardian of %s ended: %w", ErrExpired, namesOf(z.targets), z.child.Err()), z.thaw(frozen+1))
	case last.Errno != 0:
		z.err = refusal(z.targets[frozen].Name, last.Errno)
	case last.Early:
		z.err = fmt.Errorf("%s: %w: the time limit passed, or another process thawed them", namesOf(z.targets), ErrExpired)
	}
	z.release()
	close(z.done)
	z.results <- z.err
}

// listen counts the filesystems that the guardian reports as frozen, until the last report. last is nil
// if the guardian ends without one.
func (z *Frozen) listen() (frozen int, last *report) {
	for in := json.NewDecoder(z.child.Conn); ; {
		var r report
		if err := in.Decode(&r); err != nil {
			return frozen, nil
		}
		if r.Last {
			return frozen, &r
		}
		if frozen++; frozen == len(z.targets) {
			z.results <- nil
		}
	}
}

// thaw thaws the first n filesystems after the guardian was killed, and removes the note.
func (z *Frozen) thaw(n int) error {
	var err error
	for _, t := range z.targets[:min(n, len(z.targets))] {
		err = errors.Join(err, thaw(t.Root, t.Name))
	}
	if err != nil {
		return err
	}
	return os.Remove(z.note.Name())
}

// thaw thaws a filesystem. It is no error if the filesystem is not frozen.
func thaw(root *os.File, name string) error {
	if err := sys.Thaw(root); err != nil && !errors.Is(err, errNotFrozen) {
		return fmt.Errorf("thawing %s: %w", name, err)
	}
	return nil
}

// refusal returns the error for a filesystem that the kernel did not freeze.
func refusal(name string, errno syscall.Errno) error {
	err := fmt.Errorf("freezing %s: FIFREEZE: %w", name, errno)
	switch errno {
	case unix.EBUSY:
		return fmt.Errorf("%w: another process has frozen this filesystem: wait, or thaw it (fsfreeze --unfreeze)", err)
	case unix.EOPNOTSUPP:
		return fmt.Errorf("%w: use ext4, xfs or btrfs", err)
	default:
		return err
	}
}

// namesOf returns the names of targets for errors.
func namesOf(targets []Target) string {
	names := make([]string, len(targets))
	for i, t := range targets {
		names[i] = t.Name
	}
	return strings.Join(names, ", ")
}
