package clone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
)

// indexOf returns the records of an index with entries, each followed by an extended attribute, and the size of their data. A nil
// entry leaves a directory.
func indexOf(tb testing.TB, entries ...*packedEntry) (index []byte, size int64) {
	tb.Helper()
	var b bytes.Buffer
	w := newIndexWriter(&b)
	for _, e := range entries {
		if e == nil {
			w.leave()
			continue
		}
		if err := w.entry(e); err != nil {
			tb.Fatal(err)
		}
		if e.Marks&markAgain == 0 {
			w.attribute("user.name", []byte("value"))
		}
	}
	if err := w.to.Flush(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes(), w.data
}

// withOrigins returns the index with records and the origins of the files.
func withOrigins(tb testing.TB, records []byte, origins ...*origin) []byte {
	tb.Helper()
	index := bytes.Clone(records)
	for _, o := range origins {
		var err error
		if index, err = o.append(index, &packedEntry{}, ""); err != nil {
			tb.Fatal(err)
		}
	}
	return append(index, make([]byte, max(0, 2*len(records)-len(index)))...)
}

func named(name string, mode uint32, change ...func(*packedEntry)) *packedEntry {
	e := &packedEntry{name: name, packedHeader: packedHeader{Mode: mode}}
	for _, f := range change {
		f(e)
	}
	return e
}

func readAll(index []byte, size int64) error {
	r := newIndexReader(bytes.NewReader(index), int64(len(index)), size)
	for {
		if _, err := r.next(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// hostile are entries in the root that Pack does not write.
var hostile = map[string][]*packedEntry{
	"parent":             {named("..", unix.S_IFDIR|0o700), nil},
	"itself":             {named(".", unix.S_IFDIR|0o700), nil},
	"path":               {named("a/b", unix.S_IFREG|0o600)},
	"absolute":           {named("/etc", unix.S_IFDIR|0o700), nil},
	"no name":            {named("", unix.S_IFREG|0o600)},
	"zero in the name":   {named("a\x00b", unix.S_IFREG|0o600)},
	"long name":          {named(strings.Repeat("n", unix.NAME_MAX+1), unix.S_IFREG|0o600)},
	"no type":            {named("a", 0o600)},
	"unknown type":       {named("a", 0o170000|0o600)},
	"mode":               {named("a", unix.S_IFREG|1<<20)},
	"negative size":      {named("a", unix.S_IFREG, func(e *packedEntry) { e.Size = -1 })},
	"size of a pipe":     {named("a", unix.S_IFIFO, func(e *packedEntry) { e.Size = 1 })},
	"no target":          {named("a", unix.S_IFLNK)},
	"target of a file":   {named("a", unix.S_IFREG, func(e *packedEntry) { e.target = "x" })},
	"linked directory":   {named("a", unix.S_IFDIR, func(e *packedEntry) { e.Inode, e.Links = 1, 2 }), nil},
	"again without link": {named("a", unix.S_IFREG, func(e *packedEntry) { e.Marks = markAgain })},
	"unknown mark":       {named("a", unix.S_IFREG, func(e *packedEntry) { e.Marks = 1 << 7 })},
	"flags":              {named("a", unix.S_IFREG, func(e *packedEntry) { e.Flags = 1 << 30 })},
	"protection":         {named("a", unix.S_IFREG, func(e *packedEntry) { e.Protection = 1 })},
	"nanoseconds":        {named("a", unix.S_IFREG, func(e *packedEntry) { e.Modified.Nanoseconds = 1e9 })},
	"leave the root":     {nil},
}

// TestHostileIndex: an index that Pack does not write is refused.
func TestHostileIndex(t *testing.T) {
	for name, entries := range hostile {
		index, size := indexOf(t, append(append([]*packedEntry{named("", unix.S_IFDIR|0o700)}, entries...), nil)...)
		if err := readAll(index, size); !errors.Is(err, ErrIndex) {
			t.Errorf("%s: got %v, want %v", name, err, ErrIndex)
		}
	}
	index, size := indexOf(t, named("", unix.S_IFDIR|0o700), named("a", unix.S_IFREG|0o600, func(e *packedEntry) { e.Size = 10 }), nil)
	if err := readAll(index, size); err != nil {
		t.Errorf("a valid index: got %v", err)
	}
	for name, other := range map[string]struct {
		index []byte
		size  int64
	}{
		"larger tree":    {index, size + 1},
		"smaller tree":   {index, size - 1},
		"more records":   {append(bytes.Clone(index), recordLeave), size},
		"other magic":    {append([]byte("x"), index[1:]...), size},
		"empty":          {nil, 0},
		"a file as root": {func() []byte { b, _ := indexOf(t, named("", unix.S_IFREG)); return b }(), size},
	} {
		if err := readAll(other.index, other.size); !errors.Is(err, ErrIndex) {
			t.Errorf("%s: got %v, want %v", name, err, ErrIndex)
		}
	}
	for n := range index {
		if err := readAll(index[:n], size); !errors.Is(err, ErrIndex) {
			t.Errorf("the first %d bytes: got %v, want %v", n, err, ErrIndex)
		}
	}
}

// TestHostileTree: an index whose entries contradict each other fails, and nothing is made outside of the root.
func TestHostileTree(t *testing.T) {
	link := func(e *packedEntry) { e.Inode, e.Links = 7, 3 }
	again := func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 3, markAgain }
	for name, entries := range map[string][]*packedEntry{
		"through a symbolic link": {
			named("a", unix.S_IFLNK|0o777, func(e *packedEntry) { e.target = "../outside" }),
			named("a", unix.S_IFDIR|0o700), named("file", unix.S_IFREG|0o600), nil,
		},
		"same name twice": {named("a", unix.S_IFREG|0o600), named("a", unix.S_IFREG|0o600)},
		"last name twice": {
			named("a", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links = 7, 2 }),
			named("a", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 2, markAgain }),
		},
		"unknown link":     {named("a", unix.S_IFREG|0o600, again)},
		"first name twice": {named("a", unix.S_IFREG|0o600, link), named("b", unix.S_IFREG|0o600, link)},
		"more names":       {named("a", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links = 7, 2 }), named("b", unix.S_IFREG|0o600, again), named("c", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 2, markAgain }), named("d", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 2, markAgain })},
	} {
		t.Run(name, func(t *testing.T) {
			b, size := indexOf(t, append(append([]*packedEntry{named("", unix.S_IFDIR|0o700)}, entries...), nil)...)
			target, unchanged := targetOf(t, withOrigins(t, b), size)
			if u, err := Unpack(target); err == nil {
				u.Close()
				t.Error("the index was accepted")
			}
			unchanged()
		})
	}
}

// TestHostileOrigins: origins that Since does not write are refused, and so are files outside of the base, other files than regular
// ones, and those in another state.
func TestHostileOrigins(t *testing.T) {
	records, size := indexOf(t, named("", unix.S_IFDIR|0o700), named("file", unix.S_IFREG|0o600, func(e *packedEntry) { e.Size = 10 }), nil)
	state := originState{Size: 4, Modified: packedTime{Seconds: 1}}
	invalid := func(origin ...byte) []byte {
		index := withOrigins(t, records)
		copy(index[len(records):], origin)
		return index
	}
	for name, test := range map[string]struct {
		index []byte
		want  error
	}{
		"parent":                  {withOrigins(t, records, &origin{path: "../secret", originState: state}), ErrBase},
		"absolute":                {withOrigins(t, records, &origin{path: "/secret", originState: state}), ErrBase},
		"symbolic link":           {withOrigins(t, records, &origin{path: "link", originState: state}), ErrBase},
		"through a symbolic link": {withOrigins(t, records, &origin{path: "up/secret", originState: state}), ErrBase},
		"pipe":                    {withOrigins(t, records, &origin{path: "pipe"}), ErrBase},
		"directory":               {withOrigins(t, records, &origin{path: "."}), ErrBase},
		"missing":                 {withOrigins(t, records, &origin{path: "missing", originState: state}), ErrBase},
		"other size":              {withOrigins(t, records, &origin{path: "file", originState: originState{5, state.Modified}}), ErrBase},
		"other time":              {withOrigins(t, records, &origin{path: "file", originState: originState{4, packedTime{2, 0}}}), ErrBase},
		"no path":                 {invalid(originUsed|originMoved, 0, 0), ErrIndex},
		"zero in the path":        {invalid(originUsed|originMoved, 0, 2, 'a', 0), ErrIndex},
		"long path":               {invalid(originUsed|originMoved, 0xff, 0xff), ErrIndex},
		"unknown bit":             {invalid(originUsed | 1<<7), ErrIndex},
		"unused":                  {invalid(originChanged), ErrIndex},
	} {
		t.Run(name, func(t *testing.T) {
			target, unchanged := targetOf(t, test.index, size)
			if _, err := Unpack(target); !errors.Is(err, test.want) {
				t.Errorf("got %v, want %v", err, test.want)
			}
			unchanged()
		})
	}
}

// TestUnpackDevice: no block device gets the name of a regular file, and a file that was replaced by one is not opened.
func TestUnpackDevice(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	disk, _, _ := testenv.Disk(t, 1<<20)
	data := bytes.Repeat([]byte("data"), 1<<18)
	must(os.WriteFile(disk, data, 0))
	var st unix.Stat_t
	must(unix.Stat(disk, &st))
	root, file := named("", unix.S_IFDIR|0o700), named("file", unix.S_IFREG|0o600, func(e *packedEntry) { e.Size = 1 << 20 })
	unchanged := func() {
		t.Helper()
		if got, err := os.ReadFile(disk); err != nil || !bytes.Equal(got, data) {
			t.Errorf("the content of the device has changed, or reading it fails with %v", err)
		}
	}

	records, size := indexOf(t, root,
		named("device", unix.S_IFBLK|0o600, func(e *packedEntry) { e.Device, e.Inode, e.Links = st.Rdev, 7, 2 }), file,
		named("file", unix.S_IFREG|0o600, func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 2, markAgain }), nil)
	target, _ := targetOf(t, withOrigins(t, records), size)
	if _, err := Unpack(target); !errors.Is(err, unix.EEXIST) {
		t.Errorf("a name of the device that the file has: got %v, want %v", err, unix.EEXIST)
	}
	if u, err := OpenUnpacked(target, target.IndexSize); err == nil {
		u.Close()
	}
	unchanged()

	records, size = indexOf(t, root, file, nil)
	target, _ = targetOf(t, withOrigins(t, records), size)
	u, err := Unpack(target)
	must(err)
	at := int(target.Root.Fd())
	must(unix.Unlinkat(at, "file", 0))
	must(unix.Mknodat(at, "file", unix.S_IFBLK|0o600, int(st.Rdev)))
	events, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	must(err)
	defer unix.Close(events)
	_, err = unix.InotifyAddWatch(events, sys.Path(target.Root)+"/file", unix.IN_OPEN)
	must(err)
	if _, err := OpenUnpacked(target, target.IndexSize); err == nil {
		t.Error("OpenUnpacked with the device: got no error")
	}
	if err := u.Finish(t.Context()); err == nil {
		t.Error("Finish with the device: got no error")
	}
	if n, err := unix.Read(events, make([]byte, 4096)); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("got %d bytes of events and error %v, want none: the device was opened", n, err)
	}
	unchanged()
}

// targetOf describes the tree of an index in a new directory, with data of a size, and a base. unchanged verifies that nothing
// outside of the tree was changed.
func targetOf(t *testing.T, index []byte, size int64) (target Target, unchanged func()) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.OpenRoot(t.TempDir())
	must(err)
	must(errors.Join(dir.Mkdir("root", 0o700), dir.Mkdir("outside", 0o700), dir.WriteFile("index", index, 0o600)))
	must(errors.Join(dir.Mkdir("base", 0o700), dir.Symlink("../secret", "base/link"), dir.Symlink("..", "base/up")))
	for _, name := range []string{"secret", "base/file"} {
		must(errors.Join(dir.WriteFile(name, []byte("data"), 0o600), dir.Chtimes(name, time.Unix(1, 0), time.Unix(1, 0))))
	}
	state := func() string {
		var text strings.Builder
		must(fs.WalkDir(dir.FS(), ".", func(path string, e fs.DirEntry, err error) error {
			if err != nil || path == "." {
				return err
			}
			if path == "root" {
				return fs.SkipDir
			}
			info, err := e.Info()
			if err == nil {
				fmt.Fprintf(&text, "%s %v %d %v\n", path, info.Mode(), info.Size(), info.ModTime())
			}
			return err
		}))
		return text.String()
	}
	target = Target{IndexSize: int64(len(index)), Size: int64(len(index)) + size, MaxShared: 1 << 20, Each: t.Context().Err}
	target.Index, err = dir.Open("index")
	must(err)
	target.Root, err = dir.Open("root")
	must(err)
	target.Base, err = dir.Open("base")
	must(err)
	must(unix.Mknodat(int(target.Base.Fd()), "pipe", unix.S_IFIFO|0o600, 0))
	t.Cleanup(func() {
		if err := errors.Join(tree.Empty(context.Background(), target.Root), target.Root.Close(), target.Base.Close(), target.Index.Close(), dir.Close()); err != nil {
			t.Error(err)
		}
	})
	before := state()
	return target, func() {
		t.Helper()
		if after := state(); after != before {
			t.Errorf("got outside of the root:\n%swant:\n%s", after, before)
		}
	}
}

// FuzzIndex: whatever the index contains, every entry that is read has a name of one component, and its data is in order and
// within the packed tree.
func FuzzIndex(f *testing.F) {
	index, size := indexOf(f, named("", unix.S_IFDIR|0o700), named("a", unix.S_IFREG|0o600, func(e *packedEntry) { e.Size = 10 }),
		named("d", unix.S_IFDIR|0o755), named("l", unix.S_IFLNK|0o777, func(e *packedEntry) { e.target = "a" }), nil, nil)
	f.Add(index, size)
	for _, entries := range hostile {
		b, size := indexOf(f, append([]*packedEntry{named("", unix.S_IFDIR|0o700)}, entries...)...)
		f.Add(b, size)
	}
	f.Fuzz(func(t *testing.T, index []byte, size int64) {
		if size < 0 {
			return
		}
		r := newIndexReader(bytes.NewReader(index), int64(len(index)), size)
		end, depth, records := int64(0), 0, 0
		for {
			got, err := r.next()
			if err != nil {
				return
			}
			if records++; records > len(index) {
				t.Fatal("more records than bytes")
			}
			e := got.entry
			switch {
			case e == nil && got.attribute == "":
				depth--
			case e == nil:
			case (e.name == "") != (depth == 0) || e.name == ".." || strings.ContainsAny(e.name, "/\x00"):
				t.Fatalf("got name %q at depth %d", e.name, depth)
			case got.data != end || e.dataSize() < 0 || end+e.dataSize() > size:
				t.Fatalf("got data at %d of %d bytes, want it at %d and within %d", got.data, e.dataSize(), end, size)
			default:
				end += e.dataSize()
				if e.kind() == unix.S_IFDIR {
					depth++
				}
			}
			if depth < 0 {
				t.Fatal("left more directories than were entered")
			}
		}
	})
}

// FuzzOrigins: every origin that is read is written with the same meaning, and the paths are those of a system call.
func FuzzOrigins(f *testing.F) {
	for _, o := range []*origin{nil, {path: "path"}, {path: "a/b", originState: originState{1, packedTime{2, 3}}}} {
		record, err := o.append(nil, &packedEntry{}, "path")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.Repeat(record, 4))
	}
	f.Fuzz(func(t *testing.T, origins []byte) {
		e := &packedEntry{}
		read := func(b []byte) *originReader {
			return newOriginReader(bytes.NewReader(append(make([]byte, len(b)), b...)), int64(2*len(b)))
		}
		for r, left := read(origins), len(origins); left >= 0; left-- {
			o, err := r.next(e, "path")
			if err != nil {
				return
			}
			record, err := o.append(nil, e, "path")
			if err != nil {
				t.Fatal(err)
			}
			again, err := read(record).next(e, "path")
			if err != nil || (o == nil) != (again == nil) || o != nil && (*o != *again || o.path == "" || len(o.path) >= unix.PathMax || strings.Contains(o.path, "\x00")) {
				t.Fatalf("got %+v, and after writing it %+v, %v", o, again, err)
			}
		}
	})
}

// FuzzUnpack: whatever the index and the data contain, nothing outside of the root changes.
func FuzzUnpack(f *testing.F) {
	seed := func(entries ...*packedEntry) {
		records, size := indexOf(f, append(append([]*packedEntry{named("", unix.S_IFDIR|0o700)}, entries...), nil)...)
		index := withOrigins(f, records, &origin{path: "file", originState: originState{4, packedTime{1, 0}}}, &origin{path: "../secret"})
		f.Add(index, size, int64(len(index)), []byte("data"))
	}
	content := func(e *packedEntry) { e.Size = 10 }
	seed(named("a", unix.S_IFREG|0o4755, content), named("d", unix.S_IFDIR|0o755), named("b", unix.S_IFREG|0o600, content), nil)
	seed(named("a", unix.S_IFLNK|0o777, func(e *packedEntry) { e.target = "../outside" }), named("a", unix.S_IFDIR|0o700), named("file", unix.S_IFREG|0o600, content), nil)
	seed(named("a", unix.S_IFREG|0o600, content, func(e *packedEntry) { e.Inode, e.Links = 7, 2 }), named("b", unix.S_IFREG|0o600, content, func(e *packedEntry) { e.Inode, e.Links, e.Marks = 7, 2, markAgain }))
	for _, entries := range hostile {
		seed(entries...)
	}
	f.Fuzz(func(t *testing.T, index []byte, size, at int64, data []byte) {
		target, unchanged := targetOf(t, index, size)
		target.MaxInodes = 100
		if u, err := Unpack(target); err == nil {
			if at >= target.IndexSize {
				_, _ = u.WriteAt(data, at)
			}
			_ = u.Finish(t.Context())
			u.Close()
		}
		unchanged()
	})
}
