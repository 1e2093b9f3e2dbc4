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

// notePrefix is the beginning of the name of every note.
const notePrefix = "freeze-"

const noteVersion = 1

// note is the content of a note.
type note struct {
	Version int `json:"version"`
	// Filesystems are the names of the filesystems that are or may be frozen (Target.Name).
	Filesystems []string `json:"filesystems"`
}

// writeNote records the names of the filesystems before they are frozen. The note is locked while the driver
// or the guardian has it open, that is until one of them has thawed the filesystems. The note need not be
// durable, because no freeze survives a power failure.
func writeNote(dir string, targets []Target) (file *os.File, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if file, err = os.CreateTemp(dir, notePrefix); err != nil {
		return nil, err
	}
	n := note{Version: noteVersion, Filesystems: make([]string, len(targets))}
	for i, t := range targets {
		n.Filesystems[i] = t.Name
	}
	if err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = json.NewEncoder(file).Encode(n)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("writing %s: %w", file.Name(), err), os.Remove(file.Name()), file.Close())
	}
	return file, nil
}

// guardianPatience is how long Recover waits for a guardian that has lost its driver.
const guardianPatience = 5 * time.Second

// Recover thaws the filesystems that stayed frozen because a driver and its guardian were killed. The next
// driver calls it when it starts. find opens a directory of the filesystem with a given name (Target.Name).
// Recover closes the directory. If the filesystem no longer exists, find returns nil and no error. A
// filesystem that was unmounted while frozen still exists and keeps its device in use until it is mounted
// again and thawed, so find must mount it.
//
// A note whose filesystems cannot be thawed remains for the next call.
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

// recoverNote thaws the filesystems of one note, and removes the note.
func recoverNote(ctx context.Context, path string, find func(name string) (*os.File, error)) error {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) { // the guardian has thawed the filesystems
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if err := awaitGuardian(ctx, file); err != nil {
		return err
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) { // the guardian has thawed them while this call waited
		return nil
	}
	b, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	n, err := parseNote(b)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, name := range n.Filesystems {
		err = errors.Join(err, thawFound(name, find))
	}
	if err != nil {
		return err
	}
	return os.Remove(path)
}

// parseNote parses the content of a note. Incomplete content is a note without filesystems: the driver was killed
// while it wrote the note, so nothing was frozen.
func parseNote(b []byte) (n note, err error) {
	if !json.Valid(b) {
		return note{}, nil
	}
	err = json.Unmarshal(b, &n)
	if n.Version != noteVersion {
		err = fmt.Errorf("the note has version %d, this driver reads version %d: run a driver that reads version %[1]d, or thaw the filesystems of the note with `fsfreeze --unfreeze` and remove the note", n.Version, noteVersion)
	}
	return n, err
}

// awaitGuardian waits until no guardian has the note locked, and locks it.
func awaitGuardian(ctx context.Context, file *os.File) error {
	err := retry.For(ctx, guardianPatience, func() (again bool, err error) {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		return errors.Is(err, unix.EWOULDBLOCK), err
	})
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("note %s: a guardian is still freezing or thawing the filesystems in the note: check their devices for stuck I/O", file.Name())
	}
	return err
}

// thawFound thaws the filesystem with a name. It is no error if the filesystem no longer exists.
func thawFound(name string, find func(name string) (*os.File, error)) error {
	root, err := find(name)
	if err != nil {
		return fmt.Errorf("thawing %s: %w", name, err)
	}
	if root == nil {
		return nil
	}
	defer root.Close()
	return thaw(root, name)
}
