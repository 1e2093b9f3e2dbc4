package treetest

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Change makes random changes in a tree that Make has filled: it moves, exchanges, links, removes and replaces files and directories,
// and changes contents, holes and attributes. Each seed may be used once for a tree. When the test ends, the flags immutable and
// append-only in dir are cleared.
func Change(tb testing.TB, dir string, seed uint64) {
	tb.Helper()
	unlock(tb, dir)
	m := &maker{tb: tb, Rand: rand.New(rand.NewPCG(seed, 1)), root: dir, n: int(seed) << 20}
	tb.Cleanup(func() { unlock(tb, dir) })
	for range 40 {
		m.change()
	}
	m.protected(dir)
	m.attributes(dir)
	for _, change := range m.final {
		change()
	}
}

// paths returns the paths of all directories and of all other files.
func (m *maker) paths() (dirs, files []string) {
	m.must(filepath.WalkDir(m.root, func(path string, e os.DirEntry, err error) error {
		switch {
		case err != nil:
		case e.IsDir():
			dirs = append(dirs, path)
		default:
			files = append(files, path)
		}
		return err
	}))
	return dirs, files
}

// change makes one change.
func (m *maker) change() {
	dirs, files := m.paths()
	pick := func(from []string) string { return from[m.IntN(len(from))] }
	file, fresh := pick(files), filepath.Join(pick(dirs), m.name())
	switch m.IntN(9) {
	case 0:
		m.must(os.Rename(file, fresh))
	case 1:
		m.move(pick(dirs), fresh)
	case 2:
		m.move(pick(dirs), pick(files))
	case 3:
		m.link(file, fresh)
	case 4:
		m.must(os.Remove(file))
	case 5:
		if dir := pick(dirs); dir != m.root {
			m.must(os.RemoveAll(dir))
			m.replace(dir)
		}
	case 6:
		m.must(os.Remove(file))
		m.replace(file)
	default:
		m.rewrite(pick(files))
	}
}

// move moves a directory to a path. It exchanges the two if the path exists.
func (m *maker) move(dir, path string) {
	flags := uint(unix.RENAME_NOREPLACE)
	if _, err := os.Lstat(path); err == nil {
		flags = unix.RENAME_EXCHANGE
	}
	err := unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, path, flags)
	if dir != m.root && !errors.Is(err, unix.EINVAL) { // a directory is not moved into itself
		m.must(err)
	}
}

// replace creates a file of a random type at a path.
func (m *maker) replace(path string) {
	types := m.types()
	m.attributes(types[m.IntN(len(types))](path))
}

// block is the block size of the filesystems, in bytes.
const block = 4096

// rewrite changes content, size, holes and attributes of a file, if it has them. It makes no block of zeros, which may be a hole in a
// copy.
func (m *maker) rewrite(path string) {
	st, err := os.Lstat(path)
	m.must(err)
	if st.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		m.must(err)
		defer f.Close()
		blocks := 1 + st.Size()/block
		for range 1 + m.IntN(3) {
			switch at := block * m.Int64N(blocks); m.IntN(3) {
			case 0:
				_, err := f.WriteAt(m.bytes(block*(1+m.IntN(3))), at)
				m.must(err)
			case 1:
				m.must(f.Truncate(at + block*m.Int64N(256)))
			default:
				m.must(unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, block*(1+m.Int64N(256))))
			}
		}
	}
	m.attributes(path)
}
