package plugins

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Entries is os.ReadDir for a directory that may be missing: a missing one has no entries.
func Entries(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// ReadJSON decodes a file (fs.ErrNotExist). Its errors contain the path.
func ReadJSON(path string, to any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, to); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Unchanged reports whether a file was neither replaced nor written. An inode number alone may be
// reused.
func Unchanged(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
