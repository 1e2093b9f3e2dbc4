package freeze

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
)

const notePrefix = "freeze-"

// writeNote names what is about to be frozen. The file is locked for as long as the
// driver or the guardian has it open, so until somebody has thawed. It is complete
// before anything is frozen; it need not survive the power, for no freeze does.
func writeNote(dir string, targets []Target) (note *os.File, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if note, err = os.CreateTemp(dir, notePrefix); err != nil {
		return nil, err
	}
	names := make([]string, len(targets))
	for i, t := range targets {
		names[i] = t.Name
	}
	if err = unix.Flock(int(note.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = json.NewEncoder(note).Encode(names)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("writing %s: %w", note.Name(), err), os.Remove(note.Name()), note.Close())
	}
	return note, nil
}

// guardianPatience is how long a guardian is waited for that has lost its driver.
const guardianPatience = 5 * time.Second

// Recover thaws what a driver that was killed together with its guardian has left
// frozen; it is for the start of the next. find opens a directory of the filesystem of
// a name, which Recover closes; nil and no error if there is none of that name any
// more. A filesystem that was unmounted while it was frozen is still there, frozen, and
// its device in use, until it is mounted again and thawed: find has to look for that.
//
// A note whose filesystems cannot be thawed stays for the next call.
func (f *Freezer) Recover(ctx context.Context, find func(name string) (*os.File, error)) error {
	entries, err := os.ReadDir(f.notes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), notePrefix) {
			errs = append(errs, recoverNote(ctx, filepath.Join(f.notes, e.Name()), find))
		}
	}
	return errors.Join(errs...)
}

func recoverNote(ctx context.Context, path string, find func(name string) (*os.File, error)) error {
	note, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) { // its guardian has thawed
		return nil
	}
	if err != nil {
		return err
	}
	defer note.Close()
	if err := awaitGuardian(ctx, note); err != nil {
		return err
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	names, err := readNote(note)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, thawFound(name, find))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.Remove(path)
}

// awaitGuardian takes a note's lock.
func awaitGuardian(ctx context.Context, note *os.File) error {
	err := retry.For(ctx, guardianPatience, func() (again bool, err error) {
		err = unix.Flock(int(note.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("note %s: a guardian is still freezing or thawing what it names, and thaws it when the kernel lets it: look at its device", note.Name())
	}
	return err
}

// readNote reads the names; none from a note that was not written to its end, under
// which nothing was frozen.
func readNote(note *os.File) ([]string, error) {
	b, err := io.ReadAll(note)
	if err != nil {
		return nil, err
	}
	var names []string
	_ = json.Unmarshal(b, &names) // which leaves names alone where it fails
	return names, nil
}

func thawFound(name string, find func(name string) (*os.File, error)) error {
	root, err := find(name)
	if err != nil {
		return fmt.Errorf("thawing %s: %w", name, err)
	}
	if root == nil {
		return nil
	}
	defer root.Close()
	if err := thaw(root); err != nil && !errors.Is(err, errNotFrozen) {
		return fmt.Errorf("thawing %s: FITHAW: %w", name, err)
	}
	return nil
}
