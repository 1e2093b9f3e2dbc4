// Package atomicfile replaces small files so that a reader, and a machine that
// lost its power, sees the old content or the new one and nothing else.
//
// It knows nothing of what is in them.
package atomicfile

import (
	"os"
	"path/filepath"
)

// Write puts data at name below root: temporary file, fsync, rename, fsync of
// the folder. One writer per name at a time.
func Write(root *os.Root, name string, data []byte) error {
	tmp := name + ".tmp"
	err := root.WriteFile(tmp, data, 0o600)
	if err == nil {
		err = Sync(root, tmp)
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
