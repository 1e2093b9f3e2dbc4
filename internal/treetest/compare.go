package treetest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Compare fails a test if two trees differ in names, file types, content, holes, owners, modes, times, extended
// attributes, flags or hard links. It changes no times. It also compares the directories a and b themselves,
// except for their flags immutable and append-only.
func Compare(tb testing.TB, a, b string) {
	tb.Helper()
	left, right := describe(tb, a), describe(tb, b)
	if len(left) < 2 {
		tb.Errorf("%s is empty, so nothing was compared", a)
	}
	paths := maps.Clone(left)
	maps.Copy(paths, right)
	differences := 0
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		if left[path] != right[path] {
			if differences++; differences > 20 {
				tb.Fatal("more than 20 paths differ")
			}
			tb.Errorf("%q differs\n%s: %s\n%s: %s", path, a, left[path], b, right[path])
		}
	}
}

// describer describes all files in a tree.
type describer struct {
	root  string
	paths map[string]string // descriptions by path
	first map[uint64]string // first path of each inode, which identifies hard links
}

// describe returns the descriptions of all files in a tree by path.
func describe(tb testing.TB, root string) map[string]string {
	tb.Helper()
	d := &describer{root: root, paths: map[string]string{}, first: map[uint64]string{}}
	if err := d.walk("."); err != nil {
		tb.Fatal(err)
	}
	return d.paths
}

// walk describes a file, and all files below a directory. rel is relative to the root.
func (d *describer) walk(rel string) error {
	st, text, err := d.file(rel)
	d.paths[rel] = text
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	dir, err := os.OpenFile(filepath.Join(d.root, rel), os.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	slices.Sort(names)
	for _, name := range names {
		if err := d.walk(filepath.Join(rel, name)); err != nil {
			return err
		}
	}
	return err
}

// file describes one file.
func (d *describer) file(rel string) (st unix.Stat_t, text string, err error) {
	path := filepath.Join(d.root, rel)
	if err := unix.Lstat(path, &st); err != nil {
		return st, "", err
	}
	text = fmt.Sprintf("mode %o owner %d:%d device %x times %v %v", st.Mode, st.Uid, st.Gid, st.Rdev, st.Atim, st.Mtim)
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR {
		if _, ok := d.first[st.Ino]; !ok {
			d.first[st.Ino] = rel
		}
		text += fmt.Sprintf(" size %d, %d links, first %q", st.Size, st.Nlink, d.first[st.Ino])
	}
	x, err := xattrs(path)
	if err != nil {
		return st, "", err
	}
	var content string
	switch kind {
	case unix.S_IFREG, unix.S_IFDIR:
		content, err = contentAndFlags(path, kind == unix.S_IFREG, rel == ".")
	case unix.S_IFLNK:
		content, err = os.Readlink(path)
	}
	return st, text + x + " " + strconv.Quote(content), err
}

// xattrs describes the extended attributes of a file.
func xattrs(path string) (string, error) {
	names, value := make([]byte, 64<<10), make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var out []string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" || strings.HasPrefix(name, "trusted.SGI_ACL_") { // xfs lists each ACL twice
			continue
		}
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return "", err
		}
		out = append(out, fmt.Sprintf(" %q=%x", name, value[:n]))
	}
	slices.Sort(out)
	return strings.Join(out, ""), nil
}

// contentAndFlags describes the flags of a file or directory, and the content and holes of a regular file. For the
// root of a tree it omits the flags immutable and append-only.
func contentAndFlags(path string, regular, root bool) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil && !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EOPNOTSUPP) {
		return "", err
	}
	const indexed, extents, inlined = 0x1000, 0x80000, 0x10000000 // internal to ext4
	flags &^= indexed | extents | inlined
	if root {
		flags &^= locked
	}
	if !regular {
		return fmt.Sprintf("flags %x", flags), nil
	}
	content, err := contentOf(f)
	return fmt.Sprintf("flags %x, %s", flags, content), err
}

// contentOf describes the data of a file and its extents. It disables read-ahead, because xfs reports unwritten
// blocks in the page cache as data (lseek(2)).
func contentOf(f *os.File) (string, error) {
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
		return "", err
	}
	h := sha256.New()
	var extents []int64
	for off := int64(0); ; {
		start, err := f.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return fmt.Sprintf("sum %x, data %v", h.Sum(nil), extents), nil
		}
		if err != nil {
			return "", err
		}
		if off, err = f.Seek(start, unix.SEEK_HOLE); err != nil {
			return "", err
		}
		if _, err := io.Copy(h, io.NewSectionReader(f, start, off-start)); err != nil {
			return "", err
		}
		if off > start { // xfs may evict an unwritten block after SEEK_DATA
			extents = append(extents, start, off)
		}
	}
}
