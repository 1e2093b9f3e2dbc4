package image

import (
	"archive/tar"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// entry is a file, a symbolic link or a directory.
type entry struct {
	mode int64 // permissions
	data []byte
	link string // target of a symbolic link
	dir  bool
	pkg  string // the Debian package that contains it
}

// tree contains entries by absolute path.
type tree map[string]*entry

// aliases are the directories that are links to directories of the same names below /usr.
var aliases = []string{"/bin", "/lib", "/lib64", "/sbin"}

// merged returns the absolute path of a file of a package. Packages of Debian 12 have files in /lib and
// /sbin, which are links to directories in /usr on every system.
func merged(name string) string {
	name = path.Join("/", name)
	for _, alias := range aliases {
		if strings.HasPrefix(name, alias+"/") {
			return "/usr" + name
		}
	}
	return name
}

// maxLinks is the maximum number of symbolic links on a path.
const maxLinks = 10

// copyPath copies the file at a path, and the symbolic links that lead to it, to another tree. It returns the
// file.
func (t tree) copyPath(to tree, name string) (*entry, error) {
	for range maxLinks {
		e := t[name]
		if e == nil {
			return nil, fmt.Errorf("no package in packages.lock contains %s", name)
		}
		to[name] = e
		if e.link == "" {
			return e, nil
		}
		if !path.IsAbs(e.link) {
			name = path.Join(path.Dir(name), e.link)
		} else {
			name = e.link
		}
		name = merged(name)
	}
	return nil, fmt.Errorf("more than %d symbolic links at %s", maxLinks, name)
}

// addParents adds the missing directories.
func (t tree) addParents() {
	for _, name := range slices.Collect(maps.Keys(t)) {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			if t[dir] == nil {
				t[dir] = &entry{dir: true, mode: 0o755}
			}
		}
	}
}

// size returns the sum of the sizes of all files in bytes.
func (t tree) size() int64 {
	var n int64
	for _, e := range t {
		n += int64(len(e.data))
	}
	return n
}

// writeTar writes the tree as a tar archive. Entries are sorted and belong to root, so equal trees give equal
// archives.
func (t tree) writeTar(w io.Writer, modified time.Time) error {
	archive := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(t)) {
		e := t[name]
		header := &tar.Header{Name: name[1:], Mode: e.mode, ModTime: modified, Typeflag: tar.TypeReg, Size: int64(len(e.data)), Format: tar.FormatPAX}
		switch {
		case e.dir:
			header.Typeflag, header.Name = tar.TypeDir, header.Name+"/"
		case e.link != "":
			header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, e.link, 0o777
		}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(e.data); err != nil {
			return err
		}
	}
	return archive.Close()
}

// writeDir writes the tree to a new directory.
func (t tree) writeDir(root string, modified time.Time) error {
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(t))
	for _, name := range names {
		e, at := t[name], filepath.Join(root, name)
		var err error
		switch {
		case e.dir:
			err = os.Mkdir(at, 0o755)
		case e.link != "":
			err = os.Symlink(e.link, at)
		default:
			err = os.WriteFile(at, e.data, 0o600)
		}
		if err != nil {
			return err
		}
	}
	// In reverse order, because a new file changes the time of its directory.
	for _, name := range slices.Backward(names) {
		e, at := t[name], filepath.Join(root, name)
		if e.link != "" {
			continue
		}
		// Chmod applies all bits, which the umask cannot remove.
		if err := os.Chmod(at, os.FileMode(e.mode&0o777)|sticky(e.mode)); err != nil {
			return err
		}
		if err := os.Chtimes(at, modified, modified); err != nil {
			return err
		}
	}
	return nil
}

func sticky(mode int64) os.FileMode {
	if mode&0o1000 != 0 {
		return os.ModeSticky
	}
	return 0
}
