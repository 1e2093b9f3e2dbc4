package pool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/location"
	"github.com/trivet-csi/trivet/volume"
)

// site is the place of a pool's directory, which may not exist yet.
type site struct {
	// at is the filesystem and the path on it, so it does not depend on links and bind mounts.
	at location.Location
	// own is the directory, zero if it does not exist. above are its ancestors, beginning with the
	// nearest.
	own   inode
	above []inode
}

// inode identifies a directory while this process runs.
type inode struct{ dev, ino uint64 }

// siteOf returns the site of a directory, which may not exist. It follows links.
func siteOf(path string) (site, error) {
	dir, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) && filepath.Dir(path) != path {
		parent, err := siteOf(filepath.Dir(path))
		return parent.child(filepath.Base(path)), err
	}
	if err != nil {
		return site{}, err
	}
	defer dir.Close()
	ancestry, err := ancestryOf(dir)
	if err != nil {
		return site{}, err
	}
	at, err := location.Of(dir)
	if errors.Is(err, unix.ENOENT) { // not in the mount table, so only st_dev identifies the filesystem
		at, err = location.Location{Major: int(unix.Major(ancestry[0].dev)), Minor: int(unix.Minor(ancestry[0].dev))}, nil
	}
	return site{at: at, own: ancestry[0], above: ancestry[1:]}, err
}

// child returns the site of a missing directory in p.
func (p site) child(name string) site {
	p.above = append([]inode{p.own}, p.above...)
	p.own = inode{}
	p.at.Path = filepath.Join(p.at.Path, name)
	return p
}

// ancestryOf identifies a directory and all its ancestors, up to the root.
func ancestryOf(dir *os.File) (ancestry []inode, err error) {
	path := "."
	for {
		var st unix.Stat_t
		if err := unix.Fstatat(int(dir.Fd()), path, &st, 0); err != nil {
			return nil, &os.PathError{Op: "fstatat", Path: dir.Name() + "/" + path, Err: err}
		}
		i := inode{st.Dev, st.Ino}
		if len(ancestry) > 0 && ancestry[len(ancestry)-1] == i { // only "/" is its own parent
			return ancestry, nil
		}
		ancestry, path = append(ancestry, i), path+"/.."
	}
}

// inside tells whether p is below other: other is an ancestor of p, or they are on one filesystem and
// p's path on it begins with other's.
func (p site) inside(other site) bool {
	if other.own != (inode{}) && slices.Contains(p.above, other.own) {
		return true
	}
	return other.at.Path != "" && p.at.Path != other.at.Path && p.at.Below(other.at)
}

// checkNesting refuses two pools if one is inside the other, because operations on the files of the
// outer pool would also change the inner one.
func checkNesting(c Config, at site, other Config, otherAt site) error {
	const text = "pool %q at %s is inside pool %q at %s: give each pool a directory outside the other pools"
	switch {
	case at.inside(otherAt):
		return volume.Errorf(volume.ErrPrecondition, text, c.Name, c.Directory.Path, other.Name, other.Directory.Path)
	case otherAt.inside(at):
		return volume.Errorf(volume.ErrPrecondition, text, other.Name, other.Directory.Path, c.Name, c.Directory.Path)
	}
	return nil
}

// Nested finds the pools of a configuration that are inside others. Pools whose directory cannot
// be opened are left out.
func Nested(configs []Config, stateDir string) []error {
	var errs []error
	var seen []Config
	sites := map[string]site{}
	for _, c := range configs {
		if c = c.Within(stateDir); c.Directory.Path == "" { // an export
			continue
		}
		at, err := siteOf(c.Directory.Path)
		if err != nil {
			continue
		}
		for _, other := range seen {
			if err := checkNesting(c, at, other, sites[other.Name]); err != nil {
				errs = append(errs, err)
			}
		}
		seen, sites[c.Name] = append(seen, c), at
	}
	return errs
}
