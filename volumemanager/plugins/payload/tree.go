package payload

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// node is a file or a directory.
type node struct {
	mode     fs.FileMode
	uid, gid int
	data     string
}

// tree is the content of a directory by path relative to it: "" is the directory itself, "/a/b" is
// below it.
type tree map[string]node

// add adds a file at a relative path, and its parent directories with the attributes of the root. It
// replaces an earlier file at the path. It returns an error if the same path would be a file and a
// directory.
func (t tree) add(at *field.Path, name string, file node) error {
	key := "/" + path.Clean(name)
	if t[key].mode.IsDir() {
		return errTaken(at, name)
	}
	for dir := path.Dir(key); dir != "/"; dir = path.Dir(dir) {
		if n, ok := t[dir]; ok && !n.mode.IsDir() {
			return errTaken(at, name)
		}
		t[dir] = t[""]
	}
	t[key] = file
	return nil
}

func errTaken(at *field.Path, name string) error {
	return plugins.Invalidf("%s: path %q: the volume has a file and a directory at this path: give them different paths (items)", at, name)
}

// topNames returns the names in the tree's root.
func (t tree) topNames() map[string]bool {
	names := map[string]bool{}
	for key := range t {
		if path.Dir(key) == "/" {
			names[path.Base(key)] = true
		}
	}
	return names
}

// readTree reads the directory with a name in root.
func readTree(root *os.Root, name string) (tree, error) {
	t := tree{}
	err := fs.WalkDir(root.FS(), name, func(found string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		t[strings.TrimPrefix(found, name)], err = readNode(root, found)
		return err
	})
	return t, err
}

func readNode(root *os.Root, name string) (node, error) {
	info, err := root.Lstat(name)
	if err != nil {
		return node{}, err
	}
	st := info.Sys().(*syscall.Stat_t)
	n := node{mode: info.Mode(), uid: int(st.Uid), gid: int(st.Gid)}
	if info.Mode().IsRegular() {
		var b []byte
		b, err = root.ReadFile(name)
		n.data = string(b)
	}
	return n, err
}

// write creates the tree at a name that does not exist, parents first.
func (t tree) write(root *os.Root, name string) error {
	for _, key := range slices.Sorted(maps.Keys(t)) {
		if err := t[key].write(root, name+key); err != nil {
			return err
		}
	}
	return nil
}

func (n node) write(root *os.Root, name string) error {
	if n.mode.IsDir() {
		if err := root.Mkdir(name, 0o700); err != nil {
			return err
		}
		return n.setAttributes(root, name)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(n.data); err != nil {
		return err
	}
	return n.setAttributes(root, name)
}

// setAttributes sets the mode after owner and group, because chown(2) clears mode bits. The umask
// does not apply to chmod(2).
func (n node) setAttributes(root *os.Root, name string) error {
	if err := root.Chown(name, n.uid, n.gid); err != nil {
		return err
	}
	return root.Chmod(name, n.mode)
}
