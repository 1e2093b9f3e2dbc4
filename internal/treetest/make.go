package treetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Make fills an empty directory with files of all types, attributes and names, and with random files. The same
// seed gives the same tree. Properties that the filesystem does not support are omitted. When the test ends,
// the flags immutable and append-only in dir are cleared.
func Make(tb testing.TB, dir string, seed uint64) {
	tb.Helper()
	m := &maker{tb: tb, Rand: rand.New(rand.NewPCG(seed, 0)), root: dir}
	tb.Cleanup(func() { unlock(tb, dir) })
	m.oneOfEach(dir)
	m.randomFiles(dir, 4)
	m.randomLinks()
	m.attributes(dir)
	for _, change := range m.final {
		change()
	}
}

// unlock clears the flags immutable and append-only in a directory, so that it can be removed.
func unlock(tb testing.TB, dir string) {
	tb.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.IsDir() && !e.Type().IsRegular() {
			return err
		}
		changeFlags(tb, path, func(flags int) int { return flags &^ locked })
		return nil
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		tb.Error(err)
	}
}

// Flags of ioctl_iflags(2).
const (
	flagSync      = 0x8
	flagImmutable = 0x10
	flagAppend    = 0x20
	flagNoDump    = 0x40
	flagNoAtime   = 0x80
	flagNoCOW     = 0x800000

	locked = flagImmutable | flagAppend
)

// maker is one call of Make.
type maker struct {
	tb testing.TB
	*rand.Rand
	root  string
	files []string // paths of all created files that can have more names
	dirs  []string // paths of all created directories
	n     int      // number of names so far
	// final contains the changes that are made last, because they make files unchangeable.
	final []func()
}

// must fails the test if err is not nil.
func (m *maker) must(err error) {
	m.tb.Helper()
	if err != nil {
		m.tb.Fatal(err)
	}
}

// mustIfSupported does the same as must for properties that the filesystem may not support.
func (m *maker) mustIfSupported(err error) {
	m.tb.Helper()
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTTY) {
		m.must(err)
	}
}

// oneOfEach creates one file of each type, and files with unusual names, flags and times.
func (m *maker) oneOfEach(dir string) {
	for _, create := range m.types() {
		m.attributes(create(filepath.Join(dir, m.name())))
	}
	for _, name := range []string{"-", "…", "\xff\xfe\x80", "new\nline", " ", "*", strings.Repeat("n", unix.NAME_MAX), strings.Repeat("ü", 127)} {
		m.attributes(m.file(filepath.Join(dir, name)))
	}
	m.protected(dir)
	m.extremeTimes(dir)
	m.link(m.file(filepath.Join(dir, "linked")), filepath.Join(dir, "link"))
}

// randomFiles creates random files, and directories with random files up to a depth.
func (m *maker) randomFiles(dir string, depth int) {
	types := m.types()
	for range 3 + m.IntN(12) {
		m.attributes(types[m.IntN(len(types))](filepath.Join(dir, m.name())))
	}
	for range m.IntN(4) {
		if depth > 0 {
			sub := m.directory(filepath.Join(dir, m.name()))
			m.randomFiles(sub, depth-1)
			m.attributes(sub)
		}
	}
}

// types returns a function for each type of file. It creates a file at a path and returns the path.
func (m *maker) types() []func(string) string {
	return []func(string) string{m.file, m.file, m.sparse, m.preallocated, m.directory, m.symlink, m.pipe, m.socket, m.character, m.block}
}

// name returns a unique name with random bytes.
func (m *maker) name() string {
	m.n++
	name := fmt.Sprintf("%d-", m.n)
	for range m.IntN(20) {
		name += string([]byte{byte(1 + m.IntN('/'-1))})
	}
	return name
}

// file creates a regular file, which is empty in half of the calls.
func (m *maker) file(path string) string {
	m.must(os.WriteFile(path, m.bytes(m.IntN(20000)*m.IntN(2)), 0o600))
	return m.created(path)
}

// created records a file, so that links to it can be created.
func (m *maker) created(path string) string {
	m.files = append(m.files, path)
	return path
}

// bytes returns n random bytes.
func (m *maker) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(m.Uint32())
	}
	return b
}

// sparse creates a sparse file, sometimes with a hole at its end.
func (m *maker) sparse(path string) string {
	f, err := os.Create(path)
	m.must(err)
	defer f.Close()
	for range m.IntN(6) {
		_, err := f.WriteAt(m.bytes(1+m.IntN(9000)), m.Int64N(4<<20))
		m.must(err)
	}
	if m.IntN(2) == 0 {
		m.must(f.Truncate(4<<20 + m.Int64N(32<<20)))
	}
	return m.created(path)
}

// preallocated creates a file with unwritten blocks, also after its end.
func (m *maker) preallocated(path string) string {
	m.sparse(path)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	m.must(err)
	defer f.Close()
	m.mustIfSupported(unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, m.Int64N(1<<20), 1+m.Int64N(100000)))
	return path
}

func (m *maker) directory(path string) string {
	m.must(os.Mkdir(path, 0o700))
	m.dirs = append(m.dirs, path)
	return path
}

// symlink creates a symbolic link with a random target, which may be missing or outside of the tree.
func (m *maker) symlink(path string) string {
	targets := []string{"/", "/etc/passwd", "..", "../../../..", "nothing", ".", "a\xffb", strings.Repeat("x/", 500)}
	m.must(os.Symlink(targets[m.IntN(len(targets))], path))
	return m.created(path)
}

// node creates a pipe, socket or device node.
func (m *maker) node(path string, kind uint32, dev uint64) string {
	m.must(unix.Mknod(path, kind|0o600, int(dev)))
	return m.created(path)
}

func (m *maker) pipe(path string) string   { return m.node(path, unix.S_IFIFO, 0) }
func (m *maker) socket(path string) string { return m.node(path, unix.S_IFSOCK, 0) }

func (m *maker) character(path string) string {
	return m.node(path, unix.S_IFCHR, unix.Mkdev(m.Uint32N(500), m.Uint32N(1<<18)))
}

func (m *maker) block(path string) string {
	return m.node(path, unix.S_IFBLK, unix.Mkdev(m.Uint32N(500), m.Uint32N(1<<18)))
}

// link adds a name to a file.
func (m *maker) link(path, name string) {
	m.must(unix.Linkat(unix.AT_FDCWD, path, unix.AT_FDCWD, name, 0))
}

// randomLinks adds names to random files.
func (m *maker) randomLinks() {
	for range len(m.files) / 4 {
		dir := m.root
		if len(m.dirs) > 0 {
			dir = m.dirs[m.IntN(len(m.dirs))]
		}
		m.link(m.files[m.IntN(len(m.files))], filepath.Join(dir, m.name()))
	}
}

// protected creates files and directories with flags, for example immutable, and one immutable file with two
// names.
func (m *maker) protected(dir string) {
	for _, flags := range []int{flagImmutable, flagAppend, flagNoDump, flagNoAtime | flagSync, locked} {
		for _, path := range []string{m.file(filepath.Join(dir, m.name())), m.directory(filepath.Join(dir, m.name()))} {
			m.lock(path, flags)
		}
	}
	path := m.file(filepath.Join(dir, m.name()))
	m.link(path, filepath.Join(dir, m.name()))
	m.lock(path, flagImmutable)
	changeFlags(m.tb, m.directory(filepath.Join(dir, m.name())), func(f int) int { return f | flagNoCOW })
	empty := filepath.Join(dir, m.name())
	m.must(os.WriteFile(empty, nil, 0o600))
	changeFlags(m.tb, m.created(empty), func(f int) int { return f | flagNoCOW })
	m.must(os.WriteFile(empty, m.bytes(70000), 0o600))
}

// lock sets flags of a file after all other changes.
func (m *maker) lock(path string, flags int) {
	m.final = append(m.final, func() { changeFlags(m.tb, path, func(f int) int { return f | flags }) })
}

// changeFlags changes the flags of a file, if the filesystem supports them.
func changeFlags(tb testing.TB, path string, change func(int) int) {
	tb.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if changed := change(flags); err == nil && changed != flags {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, changed)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTTY) {
		tb.Fatalf("changing the flags of %q: %v", path, err)
	}
}

// attributes sets owner, extended attributes, mode and times.
func (m *maker) attributes(path string) {
	m.must(os.Lchown(path, m.IntN(3)*1000, m.IntN(3)*70000))
	var st unix.Stat_t
	m.must(unix.Lstat(path, &st))
	m.xattrs(path, st.Mode&unix.S_IFMT)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		m.must(unix.Chmod(path, m.Uint32N(0o10000)))
	}
	m.times(path, st.Mode&unix.S_IFMT)
}

// xattrs sets random extended attributes that files of a kind (S_IFMT) can have.
func (m *maker) xattrs(path string, kind uint32) {
	set := func(name string, value []byte) { m.mustIfSupported(unix.Lsetxattr(path, name, value, 0)) }
	set("trusted.test", m.bytes(m.IntN(100)))
	if kind == unix.S_IFREG {
		set("security.capability", capability())
	}
	if kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return
	}
	for range m.IntN(4) {
		set(fmt.Sprintf("user.%d.\xff", m.IntN(100)), m.bytes(m.IntN(150)))
	}
	set("system.posix_acl_access", acl(m.Uint32N(70000), uint16(m.IntN(8))))
	if kind == unix.S_IFDIR {
		set("system.posix_acl_default", acl(m.Uint32N(70000), uint16(m.IntN(8))))
	}
}

// acl returns an ACL with an entry for one user besides those of the mode (linux/posix_acl_xattr.h).
func acl(uid uint32, perm uint16) []byte {
	const version, none = 2, 0xffffffff
	b := binary.LittleEndian.AppendUint32(nil, version)
	for _, e := range []struct {
		tag uint16
		id  uint32
	}{{1, none}, {2, uid}, {4, none}, {0x10, none}, {0x20, none}} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

// capability returns a struct vfs_cap_data of revision 2 with CAP_NET_RAW (linux/capability.h).
func capability() []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64([]byte{1, 0, 0, 2}, 1<<13), 0)
}

// times sets random times. The access time of a symbolic link is in the future, because otherwise each read
// changes it (mount(8), relatime).
func (m *maker) times(path string, kind uint32) {
	access := m.Int64N(2e18) // nanoseconds since 1970, up to the year 2033
	if kind == unix.S_IFLNK {
		access = 2.06e18 + m.Int64N(6e16)
	}
	m.setTimes(path, access, m.Int64N(2e18))
}

// setTimes sets access and modification time, in nanoseconds since 1970.
func (m *maker) setTimes(path string, access, modification int64) {
	times := []unix.Timespec{unix.NsecToTimespec(access), unix.NsecToTimespec(modification)}
	m.must(unix.UtimesNanoAt(unix.AT_FDCWD, path, times, unix.AT_SYMLINK_NOFOLLOW))
}

// extremeTimes creates files with the earliest and latest common times.
func (m *maker) extremeTimes(dir string) {
	for _, t := range []int64{0, -1, time.Date(1910, 1, 1, 0, 0, 0, 1, time.UTC).UnixNano(), time.Date(2037, 1, 1, 0, 0, 0, 999999999, time.UTC).UnixNano()} {
		m.setTimes(m.file(filepath.Join(dir, m.name())), t, t+1)
	}
}
