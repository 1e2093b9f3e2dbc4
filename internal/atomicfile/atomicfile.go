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
	if err := Create(root, tmp, data); err != nil {
		return err
	}
	if err := root.Rename(tmp, name); err != nil {
		_ = root.Remove(tmp)
		return err
	}
	return SyncDir(root, filepath.Dir(name))
}

// Create writes data to name below root, replacing what is there, and makes
// the content durable, the name not yet (see SyncDir).
func Create(root *os.Root, name string, data []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = root.Remove(name)
	}
	return err
}

// SyncDir makes the names in the folder dir below root durable (fsync(2), the
// note on directories).
func SyncDir(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
