package clone_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/linux/clone"
)

// temporary makes files without a name.
func temporary(tb testing.TB) func() (*os.File, error) {
	tb.Helper()
	dir := tb.TempDir()
	return func() (*os.File, error) {
		fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		return os.NewFile(uintptr(fd), dir), err
	}
}

func pack(tb testing.TB, src string) *clone.Packed {
	tb.Helper()
	root, err := os.Open(src)
	must(tb, err)
	p, err := clone.Pack(tb.Context(), root, temporary(tb))
	must(tb, err)
	tb.Cleanup(func() { _ = p.Close() })
	return p
}

// copyIndex copies the index of a packed tree to a file.
func copyIndex(tb testing.TB, p *clone.Packed) *os.File {
	tb.Helper()
	index := create(tb, filepath.Join(tb.TempDir(), "index"))
	_, err := io.Copy(index, io.NewSectionReader(p, 0, p.IndexSize))
	must(tb, err)
	return index
}

// targetOf describes the copy of a packed tree in a directory.
func targetOf(tb testing.TB, p *clone.Packed, dst string) clone.Target {
	tb.Helper()
	return clone.Target{Root: open(tb, dst), Index: copyIndex(tb, p), IndexSize: p.IndexSize, Size: p.Size, Each: tb.Context().Err}
}

// holePuncher is implemented by targets of differences.
type holePuncher interface{ PunchHole(clone.Range) error }

// copyData copies the data between two offsets of a packed tree, and returns its size. Zeros are holes if the target has them.
func copyData(tb testing.TB, p *clone.Packed, to io.WriterAt, from, end int64) (bytes int64) {
	tb.Helper()
	last := int64(0)
	for r, err := range p.Ranges(tb.Context(), from) {
		must(tb, err)
		if r.Offset < max(from, last) || r.Length <= 0 || r.Offset+r.Length > p.Size {
			tb.Fatalf("got range %+v after offset %d, want one between that and %d", r, max(from, last), p.Size)
		}
		last = r.Offset + r.Length
		for at := max(r.Offset, p.IndexSize); at < min(last, end); {
			b := make([]byte, min(1<<20, min(last, end)-at))
			_, err := p.ReadAt(b, at)
			must(tb, err)
			at += int64(len(b))
			if holes, ok := to.(holePuncher); ok && len(strings.Trim(string(b), "\x00")) == 0 {
				must(tb, holes.PunchHole(clone.Range{Offset: at - int64(len(b)), Length: int64(len(b))}))
				continue
			}
			_, err = to.WriteAt(b, at-int64(len(b)))
			must(tb, err)
			bytes += int64(len(b))
		}
	}
	return bytes
}

// sendTree makes dst a copy of src, which is interrupted several times.
func sendTree(tb testing.TB, src, dst string, interruptions int) {
	tb.Helper()
	p := pack(tb, src)
	sendPacked(tb, p, targetOf(tb, p, dst), interruptions)
}

// kept means that a base was not deleted.
func kept() error { return nil }

// sendDifferences is sendTree with the differences from a base, of which older is a copy. It returns the size of the data that was
// sent.
func sendDifferences(tb testing.TB, src, base, dst, older string, interruptions int) (bytes int64) {
	tb.Helper()
	p := pack(tb, src)
	root, err := os.Open(base)
	must(tb, err)
	must(tb, p.Since(root, kept))
	target := targetOf(tb, p, dst)
	target.Base, target.MaxShared = open(tb, older), gib
	return sendPacked(tb, p, target, interruptions)
}

// sendPacked copies a packed tree to a target, and is interrupted several times. It returns the size of the data that was sent.
func sendPacked(tb testing.TB, p *clone.Packed, target clone.Target, interruptions int) (bytes int64) {
	tb.Helper()
	u, err := clone.Unpack(target)
	must(tb, err)
	verified := p.IndexSize
	for i := range interruptions {
		end := verified + (p.Size-verified)*int64(i+1)/int64(interruptions+1)
		written := min(p.Size, end+rand.Int64N(2<<20))
		bytes += copyData(tb, p, u, verified, written)
		must(tb, u.Sync())
		u.Close()
		if verified = end; target.Base != nil {
			verified, err = target.Aligned(end, mib)
			must(tb, err)
		}
		u, err = clone.OpenUnpacked(target, verified)
		must(tb, err)
	}
	bytes += copyData(tb, p, u, verified, p.Size)
	must(tb, u.Finish(tb.Context()))
	must(tb, u.Finish(tb.Context())) // repeated after an interruption
	u.Close()
	return bytes
}

// TestPack: a tree that is packed and unpacked on another filesystem equals the original, also after interruptions.
func TestPack(t *testing.T) {
	dirs := map[string]string{}
	for _, fsType := range []string{"xfs", "ext4", "btrfs"} {
		dirs[fsType] = filesystem(t, fsType, "1G")
	}
	for from, dir := range dirs {
		src := mkdir(t, dir, "src")
		treetest.Make(t, src, 5)
		for to, other := range dirs {
			if from == "btrfs" && to != from { // it has flags that the others do not have
				continue
			}
			t.Run(from+" to "+to, func(t *testing.T) {
				for _, interruptions := range []int{0, 7} {
					dst := mkdir(t, other, fmt.Sprintf("from-%s-%d", from, interruptions))
					sendTree(t, src, dst, interruptions)
					treetest.Compare(t, src, dst)
				}
			})
		}
	}
	// Files of btrfs with the properties that the other filesystems have, too.
	src := mkdir(t, dirs["btrfs"], "from-xfs")
	sendTree(t, filepath.Join(dirs["xfs"], "src"), src, 0)
	for _, to := range []string{"xfs", "ext4"} {
		dst := mkdir(t, dirs[to], "from-btrfs")
		sendTree(t, src, dst, 3)
		treetest.Compare(t, src, dst)
	}
	sendTree(t, filepath.Join(dirs["btrfs"], "src"), mkdir(t, dirs["xfs"], "flags-of-btrfs"), 0)
}

// TestPackDifferences: after random changes, a copy of an earlier snapshot and the differences are a copy of the later one, also after
// interruptions. Blocks that have not changed are shared.
func TestPackDifferences(t *testing.T) {
	for _, options := range [][]string{nil, {"compress-force=zstd"}} {
		dir, other := filesystem(t, "btrfs", "1G", options...), filesystem(t, "btrfs", "1G")
		testenv.Run(t, "btrfs", "subvolume", "create", filepath.Join(dir, "src"))
		src := filepath.Join(dir, "src")
		treetest.Make(t, src, 3)
		large := create(t, filepath.Join(src, "large"))
		write(t, large, 0, random(20*mib))
		snapshot := func(name string) string {
			testenv.Run(t, "btrfs", "subvolume", "snapshot", "-r", src, filepath.Join(dir, name))
			return filepath.Join(dir, name)
		}
		base, older := snapshot("0"), mkdir(t, other, "0")
		sendTree(t, base, older, 0)
		for round := range 8 {
			treetest.Change(t, src, uint64(round+1))
			write(t, large, int64(round)*mib+1, random(100*kib))
			name := fmt.Sprint(round + 1)
			newer, dst := snapshot(name), mkdir(t, other, name)
			sent := sendDifferences(t, newer, base, dst, older, round%3)
			treetest.Compare(t, newer, dst)
			if round%3 == 0 && sent > 10*mib {
				t.Errorf("got %d bytes, want only the changes", sent)
			}
			base, older = newer, dst
		}
	}
}

// TestPackDifferencesTimes: files with the same inode number, size and times, but other content, differ.
func TestPackDifferencesTimes(t *testing.T) {
	dir, other := filesystem(t, "btrfs", "256M"), filesystem(t, "btrfs", "256M")
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"a", "b"} {
		testenv.Run(t, "btrfs", "subvolume", "create", path(name))
	}
	times := func(name string) (changed, modified unix.Timespec, inode uint64) {
		var st unix.Stat_t
		must(t, unix.Stat(path(name), &st))
		return st.Ctim, st.Mtim, st.Ino
	}
	for same := false; !same; { // the clock of the kernel stays the same for some milliseconds
		for _, name := range []string{"a", "b"} {
			_ = os.Remove(path(name + "/file"))
			must(t, os.WriteFile(path(name+"/file"), bytes.Repeat([]byte(name), 64<<10), 0o600))
		}
		changed, modified, inode := times("a/file")
		c, m, i := times("b/file")
		same = changed == c && modified == m && inode == i
	}
	for _, name := range []string{"a", "b"} {
		testenv.Run(t, "btrfs", "subvolume", "snapshot", "-r", path(name), path(name+" snapshot"))
	}
	older, newer := mkdir(t, other, "a"), mkdir(t, other, "b")
	sendTree(t, path("a snapshot"), older, 0)
	sendDifferences(t, path("b snapshot"), path("a snapshot"), newer, older, 0)
	treetest.Compare(t, path("b snapshot"), newer)
}

// TestPackDifferencesContent: on filesystems without snapshots, files with the same path are compared by their content.
func TestPackDifferencesContent(t *testing.T) {
	for _, from := range []string{"xfs", "ext4"} {
		dir, other := filesystem(t, from, "1G"), filesystem(t, "xfs", "1G")
		src := mkdir(t, dir, "src")
		treetest.Make(t, src, 4)
		must(t, os.WriteFile(filepath.Join(src, "large"), random(20*mib), 0o600))
		snapshot := func(name string) string {
			to := mkdir(t, dir, name)
			_, err := clone.Tree(t.Context(), open(t, to), open(t, src), clone.Options{})
			must(t, err)
			return to
		}
		base, older := snapshot("0"), mkdir(t, other, "0")
		sendTree(t, base, older, 0)
		treetest.Change(t, src, 1)
		newer, dst := snapshot("1"), mkdir(t, other, "1")
		if sent := sendDifferences(t, newer, base, dst, older, 0); sent > 10*mib {
			t.Errorf("from %s: got %d bytes, want only the changes", from, sent)
		}
		treetest.Compare(t, newer, dst)
		dst = mkdir(t, other, "2")
		sendDifferences(t, newer, base, dst, older, 3)
		treetest.Compare(t, newer, dst)
	}
}

// TestPackDifferencesLimits: a tree begins with at most a size of data of the base. A base that was changed, and one that cannot
// share blocks, are refused.
func TestPackDifferencesLimits(t *testing.T) {
	dir, other := filesystem(t, "xfs", "512M"), filesystem(t, "ext4", "256M")
	base := mkdir(t, dir, "base")
	for _, name := range []string{"a", "b"} {
		must(t, os.WriteFile(filepath.Join(base, name), random(mib), 0o600))
	}
	try := func(dst, older string, maxShared int64) error {
		p := pack(t, base)
		must(t, p.Since(open(t, base), kept))
		target := targetOf(t, p, dst)
		target.Base, target.MaxShared = open(t, older), maxShared
		u, err := clone.Unpack(target)
		if err == nil {
			if u.SharedBytes != 2*mib {
				t.Errorf("got %d bytes of the base, want %d", u.SharedBytes, 2*mib)
			}
			u.Close()
		}
		return err
	}
	changed := mkdir(t, dir, "other base")
	testenv.Run(t, "cp", "-a", base+"/.", changed)
	must(t, os.WriteFile(filepath.Join(changed, "b"), random(mib), 0o600))
	elsewhere := mkdir(t, other, "base")
	testenv.Run(t, "cp", "-a", base+"/.", elsewhere)
	for name, test := range map[string]struct {
		dst, older string
		maxShared  int64
		want       error
	}{
		"the limit":         {dir, base, 2 * mib, nil},
		"more":              {dir, base, 2*mib - 1, clone.ErrTooLarge},
		"changed":           {dir, changed, gib, clone.ErrBase},
		"no shared blocks":  {other, elsewhere, gib, clone.ErrNotShared},
		"other filesystems": {dir, elsewhere, gib, clone.ErrNotShared},
	} {
		if err := try(mkdir(t, test.dst, name), test.older, test.maxShared); !errors.Is(err, test.want) {
			t.Errorf("%s: got %v, want %v", name, err, test.want)
		}
	}
}

// TestPackAligned: an offset is aligned within its file without the entries of the tree.
func TestPackAligned(t *testing.T) {
	src := t.TempDir()
	must(t, os.Mkdir(filepath.Join(src, "dir"), 0o700))
	must(t, os.WriteFile(filepath.Join(src, "dir", "file"), random(10*kib), 0o600))
	must(t, os.WriteFile(filepath.Join(src, "dir", "other"), random(10*kib), 0o600))
	p := pack(t, src)
	target := targetOf(t, p, t.TempDir())
	for _, row := range [][2]int64{{0, 0}, {4*kib + 1, 4 * kib}, {10*kib - 1, 8 * kib}, {10 * kib, 10 * kib}, {14*kib + 1, 14 * kib}, {20 * kib, 20 * kib}} {
		if got, err := target.Aligned(p.IndexSize+row[0], 4*kib); err != nil || got != p.IndexSize+row[1] {
			t.Errorf("offset %d: got %d, %v, want %d", row[0], got-p.IndexSize, err, row[1])
		}
	}
}

// TestPackLayout: the layout of a tree does not change by reading it, and changes with the tree.
func TestPackLayout(t *testing.T) {
	src := mkdir(t, filesystem(t, "ext4", "512M", "strictatime"), "src")
	treetest.Make(t, src, 1)
	first, second := pack(t, src), pack(t, src)
	if first.Layout != second.Layout || first.Size != second.Size || first.Bytes == 0 {
		t.Errorf("got layouts %q of %d bytes and %q of %d bytes of the same tree", first.Layout, first.Size, second.Layout, second.Size)
	}
	must(t, os.WriteFile(filepath.Join(src, "new"), nil, 0o600))
	if third := pack(t, src); third.Layout == first.Layout {
		t.Error("the layout is the same after a change")
	}
}

// TestPackReplaced: a file that was replaced by a pipe is not opened, and ends the transfer.
func TestPackReplaced(t *testing.T) {
	src := mkdir(t, filesystem(t, "ext4", "256M"), "src")
	path := filepath.Join(src, "file")
	must(t, os.WriteFile(path, random(mib), 0o600))
	p := pack(t, src)
	must(t, os.Remove(path))
	must(t, unix.Mkfifo(path, 0o600))
	events, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	must(t, err)
	defer unix.Close(events)
	_, err = unix.InotifyAddWatch(events, path, unix.IN_OPEN)
	must(t, err)
	if _, err := p.ReadAt(make([]byte, mib), p.IndexSize); err == nil {
		t.Error("reading the replaced file: got no error")
	}
	if n, err := unix.Read(events, make([]byte, 4096)); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("got %d bytes of events and error %v, want none: the pipe was opened", n, err)
	}
}

// TestPackDefaultACL: the default ACL of the new directory is not inherited.
func TestPackDefaultACL(t *testing.T) {
	dir := filesystem(t, "ext4", "256M")
	src, dst := mkdir(t, dir, "src"), mkdir(t, dir, "dst")
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 7}, {2, 7, 1234}, {4, 5}, {0x10, 7}, {0x20, 5}} { // acl(5): user, named user, group, mask, other
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[0]))
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[1]))
		acl = binary.LittleEndian.AppendUint32(acl, e[2])
	}
	must(t, unix.Setxattr(dst, "system.posix_acl_default", acl, 0))
	must(t, os.Mkdir(filepath.Join(src, "sub"), 0o700))
	must(t, os.WriteFile(filepath.Join(src, "sub", "file"), random(kib), 0o600))
	sendTree(t, src, dst, 0)
	treetest.Compare(t, src, dst)
}

// TestPackAllocated: holes are not in the ranges.
func TestPackAllocated(t *testing.T) {
	src := mkdir(t, filesystem(t, "xfs", "512M"), "src")
	f := create(t, filepath.Join(src, "sparse"))
	must(t, f.Truncate(1<<40))
	write(t, f, 1<<39, random(mib))
	must(t, f.Sync())
	p := pack(t, src)
	if got := copyData(t, p, discard{}, 0, p.Size); got < mib || got > mib+64*kib {
		t.Errorf("got %d bytes of data, want about %d", got, mib)
	}
}

// discard is a target that keeps nothing.
type discard struct{}

func (discard) WriteAt(b []byte, _ int64) (int, error) { return len(b), nil }

// TestPackDeep: the number of open files does not grow with the depth of the tree.
func TestPackDeep(t *testing.T) {
	const depth = 5000
	dir := filesystem(t, "xfs", "1G")
	src, dst := mkdir(t, dir, "src"), mkdir(t, dir, "dst")
	makeDeep(t, src, depth, "a", "z")
	p := pack(t, src)
	u, err := clone.Unpack(targetOf(t, p, dst))
	must(t, err)
	maximum := 0
	copyData(t, p, counting{u, func() {
		fds, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		maximum = max(maximum, len(fds))
	}}, 0, p.Size)
	must(t, u.Finish(t.Context()))
	if maximum > 200 || maximum < 64 {
		t.Errorf("got up to %d open files, want 64 to 200", maximum)
	}
	if a, b := countDeep(t, src), countDeep(t, dst); a != b || a.depth != depth {
		t.Errorf("copy: got %+v, source: got %+v, want equal ones of depth %d", b, a, depth)
	}
	tooDeep := mkdir(t, dir, "too deep")
	makeDeep(t, tooDeep, 10_001)
	if _, err := clone.Pack(t.Context(), open(t, tooDeep), temporary(t)); !errors.Is(err, clone.ErrUncopyable) {
		t.Errorf("a tree that is too deep: got %v, want %v", err, clone.ErrUncopyable)
	}
}

// counting is a target that calls a function for each write.
type counting struct {
	io.WriterAt
	written func()
}

func (c counting) WriteAt(b []byte, at int64) (int, error) {
	c.written()
	return c.WriterAt.WriteAt(b, at)
}

// TestPackWide: memory does not grow with the number of files, also if all have several names.
func TestPackWide(t *testing.T) {
	files := 50_000
	if testing.Short() {
		files /= 10
	}
	dir := filesystem(t, "xfs", "1G")
	src := mkdir(t, dir, "src")
	at := open(t, src)
	for i := range files {
		name := fmt.Sprintf("%0100d", i)
		must(t, unix.Mknodat(int(at.Fd()), name, unix.S_IFREG|0o600, 0))
		must(t, unix.Linkat(int(at.Fd()), name, int(at.Fd()), name+".2", 0))
	}
	heapSize := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heapSize()
	p := pack(t, src)
	dst := mkdir(t, dir, "dst")
	u, err := clone.Unpack(targetOf(t, p, dst))
	must(t, err)
	must(t, u.Finish(t.Context()))
	if grown := heapSize() - before; grown > 8*mib {
		t.Errorf("the heap grew by %d bytes, want at most %d", grown, 8*mib)
	}
	testenv.Run(t, "diff", "-rq", src, dst)
	var st unix.Stat_t
	must(t, unix.Lstat(filepath.Join(dst, fmt.Sprintf("%0100d", files/2)), &st))
	if st.Nlink != 2 {
		t.Errorf("got %d names of a file, want 2", st.Nlink)
	}
}

// TestPackCancel: packing and unpacking end with their context.
func TestPackCancel(t *testing.T) {
	dir := filesystem(t, "ext4", "256M")
	src := mkdir(t, dir, "src")
	treetest.Make(t, src, 1)
	p := pack(t, src)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := clone.Pack(ctx, open(t, src), temporary(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("Pack: got %v, want %v", err, context.Canceled)
	}
	target := targetOf(t, p, mkdir(t, dir, "dst"))
	target.Each = ctx.Err
	if _, err := clone.Unpack(target); !errors.Is(err, context.Canceled) {
		t.Errorf("Unpack: got %v, want %v", err, context.Canceled)
	}
	if _, err := clone.OpenUnpacked(target, p.IndexSize); !errors.Is(err, context.Canceled) {
		t.Errorf("OpenUnpacked: got %v, want %v", err, context.Canceled)
	}
}

// TestUnpackTooMany: a tree with more files and directories than the target may have is refused before one is made. Another name of
// a file is not another file.
func TestUnpackTooMany(t *testing.T) {
	dir := filesystem(t, "ext4", "256M")
	src := mkdir(t, dir, "src")
	for _, name := range []string{"a", "b"} {
		must(t, os.WriteFile(filepath.Join(src, name), nil, 0o600))
		must(t, os.Link(filepath.Join(src, name), filepath.Join(src, name+"2")))
	}
	p := pack(t, src)
	for most, want := range map[int64]error{3: nil, 2: clone.ErrTooMany} {
		dst := mkdir(t, dir, fmt.Sprintf("at most %d", most))
		target := targetOf(t, p, dst)
		target.MaxInodes = most
		if _, err := clone.Unpack(target); !errors.Is(err, want) {
			t.Errorf("at most %d files and directories: got error %v, want %v", most, err, want)
		}
		names, err := os.ReadDir(dst)
		if must(t, err); want != nil && len(names) > 0 {
			t.Errorf("at most %d files and directories: got %v, want none", most, names)
		}
	}
}

// TestPackAttributes: the attributes of security modules are not copied, except for capabilities. One that is too large for the
// filesystem is an error that says so.
func TestPackAttributes(t *testing.T) {
	src, dst := mkdir(t, filesystem(t, "xfs", "512M"), "src"), filesystem(t, "ext4", "256M")
	path := filepath.Join(src, "file")
	must(t, os.WriteFile(path, nil, 0o700))
	capability := make([]byte, 20) // struct vfs_cap_data, revision 2
	capability[3] = 2
	for name, value := range map[string][]byte{"security.capability": capability, "security.selinux": []byte("label"), "user.a": []byte("value")} {
		must(t, unix.Setxattr(path, name, value, 0))
	}
	sendTree(t, src, mkdir(t, dst, "small"), 0)
	names := make([]byte, 1024)
	n, err := unix.Listxattr(filepath.Join(dst, "small", "file"), names)
	must(t, err)
	if got := string(names[:n]); strings.Contains(got, "selinux") || !strings.Contains(got, "security.capability") || !strings.Contains(got, "user.a") {
		t.Errorf("got extended attributes %q, want security.capability and user.a", got)
	}
	must(t, unix.Setxattr(path, "user.large", make([]byte, 20*kib), 0))
	u, err := clone.Unpack(targetOf(t, pack(t, src), mkdir(t, dst, "large")))
	must(t, err)
	if err := u.Finish(t.Context()); !errors.Is(err, clone.ErrUncopyable) || !strings.Contains(err.Error(), "user.large") {
		t.Errorf("an attribute that is too large: got %v, want %v with its name", err, clone.ErrUncopyable)
	}
}
