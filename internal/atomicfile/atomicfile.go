// Package atomicfile replaces small files so that a reader, and a machine that
// lost its power, sees the old content or the new one and nothing else.
//
// It knows nothing of what is in them.
package atomicfile

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write puts data at name below root: temporary file, fsync, rename, fsync of
// the folder. One writer per name at a time.
func Write(root *os.Root, name string, data []byte) error {
	tmp := name + ".tmp"
	err := writeNew(root, tmp, data)
	if errors.Is(err, fs.ErrExist) { // of a writer that was killed; whatever it is, it is not written through
		_ = root.Remove(tmp)
		err = writeNew(root, tmp, data)
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

// WriteJSON is Write for a value as JSON in a directory.
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

// writeNew makes a file, durable but for its name.
func writeNew(root *os.Root, name string, data []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Sync makes a file's content durable, or the names in a folder (fsync(2), the
// note on directories).
func Sync(root *os.Root, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
