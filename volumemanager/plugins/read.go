package plugins

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/trivet-csi/trivet/volume"
)

// Entries is os.ReadDir for a directory that may be missing: a missing one has no entries.
func Entries(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// ReadJSON decodes a file. It returns fs.ErrNotExist if there is none. All errors contain the path.
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

// ReadRecord is ReadJSON for a record with a version (volume.DecodeRecord). It refuses unknown fields.
func ReadRecord(path string, record any, version *int, known int) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := volume.DecodeRecord(b, record, version, known); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Unchanged reports whether a file was neither replaced nor written between the calls of Stat that
// returned a and b. It does not rely on the inode number alone, because a new file may reuse it.
func Unchanged(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
