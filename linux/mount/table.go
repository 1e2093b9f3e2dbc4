package mount

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/trivet-csi/trivet/internal/location"
)

// OnPath returns the topmost mount at exactly the path, or nil if nothing is mounted at it. It reads the mount
// table and accesses only the parent of the path, because the server of a mount at the path may not respond.
func OnPath(path string) (*Entry, error) {
	entries, err := byMountpoint(path, func(mountpoint, at string) bool { return mountpoint == at })
	if err != nil {
		return nil, err
	}
	return topmost(entries), nil
}

// Below returns the mounts at a path and below it. It accesses only the parent of the path.
func Below(path string) ([]*Entry, error) { return byMountpoint(path, location.IsBelow) }

// byMountpoint returns the mounts for which matches returns true. It resolves the symbolic links in the parent
// of the path first.
func byMountpoint(path string, matches func(mountpoint, at string) bool) ([]*Entry, error) {
	path = filepath.Clean(path)
	parent, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	at := filepath.Join(parent, filepath.Base(path))
	return Table(func(e *Entry) bool { return matches(e.Mountpoint, at) })
}

// topmost returns the entry on which no other entry is mounted, or nil if there are no entries.
func topmost(entries []*Entry) *Entry {
	below := map[int]bool{}
	for _, e := range entries {
		below[e.Parent] = true
	}
	var top *Entry
	for _, e := range entries {
		if !below[e.ID] {
			top = e
		}
	}
	return top
}

// IsNFS reports whether a mount is of type nfs or nfs4.
func IsNFS(e *Entry) bool { return e.FSType == "nfs" || e.FSType == "nfs4" }
