// Package atomicfile replaces small files atomically, so that a reader reads either the old or the new
// content, also after a power failure.
package atomicfile

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Temporary ends the name of the temporary file of Write, which a killed writer leaves.
const Temporary = ".tmp"

// Write replaces the content of the file called name in root by data. It writes a temporary file, syncs it, renames
// it and syncs the directory. Only one writer of a name may run at a time.
func Write(root *os.Root, name string, data []byte) error {
	tmp := name + Temporary
	err := Create(root, tmp, data)
	if errors.Is(err, fs.ErrExist) { // left by a killed writer; it may be a link, which must not be followed
		_ = root.Remove(tmp)
		err = Create(root, tmp, data)
	}
	if err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		_ = root.Remove(tmp)
		return err
	}
	return Sync(root, filepath.Dir(name))
}

// WriteJSON writes a value as JSON to the file name in the directory dir, in the same way as Write.
func WriteJSON(dir, name string, value any) error {
	b, err := json.Marshal(value)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return Write(root, name, b)
}

// Create creates a file and makes its content durable, but not its directory entry.
func Create(root *os.Root, name string, data []byte) error {
	flags, err := sys.NoDelegationIn(root)
	if err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|sys.NonBlocking|flags, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Sync makes the content of a file, or the names in a directory, durable (fsync(2)).
func Sync(root *os.Root, name string) error {
	f, err := root.OpenFile(name, os.O_RDONLY|sys.NonBlocking, 0)
	if errors.Is(err, unix.EAGAIN) { // another process has a lease (F_SETLEASE); an open without the flag waits for its end
		f, err = root.Open(name)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
