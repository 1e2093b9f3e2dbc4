package clone

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/tree"
)

// links holds one additional hard link to the copy of each file that has more names than were copied so far.
// The links are in a temporary directory of the copy, and not in memory, because a tree can have any number of
// such files, and their other names may be outside of the tree.
type links struct {
	// root is the root of the copy.
	root *os.File
	// name is the name of the temporary directory in root. dir is that directory, or nil until the first link
	// is stored.
	name string
	dir  *os.File
}

// link identifies a file with several hard links.
type link struct {
	inode uint64
	// protection contains the attributes of the file in protectionMask. They are set on the copy when the copy
	// has all its names.
	protection uint32
}

// linkOf returns the link of an entry of the source.
func linkOf(e *entry) (l link, err error) {
	l.inode = e.st.Ino
	if e.kind() == unix.S_IFREG {
		l.protection, err = protectionOf(e.node)
	}
	return l, err
}

// String returns the name of the link in the temporary directory.
func (l link) String() string { return fmt.Sprintf("%d.%d", l.inode, l.protection) }

// add creates the name of e as a hard link to the copy of the file. found is false if the file is not copied
// yet. The last name replaces the additional link, so that the copy never has more links than the source. The error is EEXIST
// if the name exists.
func (ls *links) add(l link, e *entry) (found bool, err error) {
	if ls.dir == nil {
		return false, nil
	}
	from, to := int(ls.dir.Fd()), int(e.dst.Fd())
	var st unix.Stat_t
	err = unix.Fstatat(from, l.String(), &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fail("fstatat", ls.dir, err)
	}
	if st.Nlink < e.st.Nlink {
		return true, fail("linkat", e.dst, unix.Linkat(from, l.String(), to, e.Name, 0))
	}
	err = unix.Fstatat(to, e.Name, &st, unix.AT_SYMLINK_NOFOLLOW) // NFS does not support RENAME_NOREPLACE
	if err == nil {
		err = unix.EEXIST
	}
	if !errors.Is(err, unix.ENOENT) {
		return true, fail("fstatat", e.dst, err)
	}
	return true, ls.release(l, func() error {
		return fail("renameat", e.dst, unix.Renameat(from, l.String(), to, e.Name))
	})
}

// store creates the additional link to the copy, which already has the name of e.
func (ls *links) store(l link, e *entry) error {
	if err := ls.open(); err != nil {
		return err
	}
	return fail("linkat", ls.dir, unix.Linkat(int(e.dst.Fd()), e.Name, int(ls.dir.Fd()), l.String(), 0))
}

// open creates the temporary directory. Its name is random, so that the source does not contain the same name.
func (ls *links) open() (err error) {
	if ls.dir != nil {
		return nil
	}
	ls.name = rand.Text()
	if err := unix.Mkdirat(int(ls.root.Fd()), ls.name, 0o700); err != nil {
		return fail("mkdirat", ls.root, err)
	}
	ls.dir, err = tree.OpenDir(ls.root, ls.name)
	return err
}

// release calls remove, which removes or renames the additional link, and then sets the protection of the copy.
func (ls *links) release(l link, remove func() error) error {
	if l.protection == 0 {
		return remove()
	}
	f, err := openat(ls.dir, l.String(), unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := remove(); err != nil {
		return err
	}
	return setAttributes(f, protectionMask, l.protection)
}

// end removes the temporary directory with the remaining additional links, which belong to files with names
// outside of the tree. It calls each repeatedly, and ends with its error.
func (ls *links) end(each func() error) error {
	if ls.dir == nil {
		return nil
	}
	for {
		released, err := ls.releaseAll(each)
		if err != nil {
			return err
		}
		err = unix.Unlinkat(int(ls.root.Fd()), ls.name, unix.AT_REMOVEDIR)
		if released == 0 || !errors.Is(err, unix.ENOTEMPTY) {
			return fail("rmdir", ls.root, err)
		}
		// Reading the directory may miss names while others are removed (readdir(3)).
	}
}

// releaseAll removes the additional links that it finds in one pass over the temporary directory, and returns
// their number.
func (ls *links) releaseAll(each func() error) (released int, err error) {
	if _, err := ls.dir.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	for {
		names, err := ls.dir.Readdirnames(1024)
		if errors.Is(err, io.EOF) {
			return released, nil
		}
		if err != nil {
			return released, err
		}
		for _, name := range names {
			if err := errors.Join(each(), ls.drop(name)); err != nil {
				return released, err
			}
			released++
		}
	}
}

// drop removes the additional link that has a name in the temporary directory.
func (ls *links) drop(name string) error {
	var l link
	if _, err := fmt.Sscanf(name, "%d.%d", &l.inode, &l.protection); err != nil {
		return fmt.Errorf("%s: %q is not a link of this copy: %w", ls.dir.Name(), name, err)
	}
	return ls.release(l, func() error {
		return fail("unlinkat", ls.dir, unix.Unlinkat(int(ls.dir.Fd()), name, 0))
	})
}

func (ls *links) close() {
	if ls.dir != nil {
		ls.dir.Close()
	}
}
