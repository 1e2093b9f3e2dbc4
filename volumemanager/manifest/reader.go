package manifest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxSize is of one file, in bytes.
const maxSize = 10 << 20

// reader reads a directory, and later what changed in it.
type reader struct {
	dir   string
	files map[string]*file
	// found says that the directory was read once, complete that Objects were.
	found, complete bool
	// dev is the filesystem that the directory was on.
	dev uint64
	// trouble is what is wrong with the directory itself.
	trouble string
	// last are the objects of the last Objects, and homes the files that they were in.
	last  map[key]metav1.Object
	homes map[key]string
	// missed are those of last that no file has, since when.
	missed map[key]time.Time
}

// file is what counts of a file: what it had when it was read well last.
type file struct {
	entries []entry
	good    bool // it was, once
	// problem is why it has not what the file has now.
	problem string
	stamp   stamp
	sum     [sha256.Size]byte
}

// stamp is that of a file at a time; the zero one is of no file.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

// granularity is more than that of the kernel's timestamps: a file may change twice in
// less, and have one stamp.
const granularity = 20 * time.Millisecond

func stampOf(info fs.FileInfo) stamp {
	st := info.Sys().(*syscall.Stat_t)
	if time.Since(time.Unix(st.Ctim.Unix())) < granularity {
		return stamp{}
	}
	return stamp{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
}

// read is nil if nothing is different from the last time. notWatched is why changes may
// be seen late.
func (r *reader) read(notWatched error) *Objects {
	first := r.files == nil
	if first {
		r.files = make(map[string]*file)
	}
	changed, err := r.scan()
	trouble := ""
	switch {
	case err != nil:
		trouble = fmt.Sprintf("the directory cannot be read: %v: make it, or correct --manifests; until then what it had before counts", err)
	case notWatched != nil:
		trouble = fmt.Sprintf("changes are seen late: %v", notWatched)
	}
	if !first && !changed && trouble == r.trouble && !r.due() {
		return nil
	}
	r.trouble = trouble
	return r.merge()
}

// scan reads the files that are not what they were.
func (r *reader) scan() (changed bool, err error) {
	root, err := os.OpenRoot(r.dir)
	if err != nil {
		return false, err
	}
	defer root.Close()
	there, err := r.list(root)
	if err != nil {
		return false, err
	}
	changed, r.found = !r.found, true
	for name := range there {
		f := r.files[name]
		if f == nil {
			f = &file{}
			r.files[name] = f
		}
		changed = f.update(root, name) || changed
	}
	for name := range r.files {
		if !there[name] {
			delete(r.files, name)
			changed = true
		}
	}
	return changed, nil
}

// list is the names of the manifests. That what was mounted there is mounted no more does
// not mean that there are none.
func (r *reader) list(root *os.Root) (map[string]bool, error) {
	info, err := root.Stat(".")
	if err != nil {
		return nil, err
	}
	all, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, err
	}
	names := make(map[string]bool)
	for _, e := range all {
		if isManifest(e.Name()) {
			names[e.Name()] = true
		}
	}
	dev := info.Sys().(*syscall.Stat_t).Dev
	if len(names) == 0 && len(r.files) > 0 && dev != r.dev {
		return nil, errors.New("it is on another filesystem than it was, and has no manifests")
	}
	r.dev = dev
	return names, nil
}

func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// update reads a file unless it is what it was, and tells whether something else counts
// now.
func (f *file) update(root *os.Root, name string) (changed bool) {
	info, err := root.Stat(name)
	if err == nil && f.stamp != (stamp{}) && f.stamp == stampOf(info) {
		return false
	}
	data, now, err := load(root, name)
	if err != nil {
		f.stamp, f.sum = now, [sha256.Size]byte{}
		return f.broken(err.Error())
	}
	sum := sha256.Sum256(data)
	if sum == f.sum {
		f.stamp = now
		return false
	}
	entries, err := decode(data, filepath.Ext(name) == ".json")
	if err == nil && len(bytes.TrimSpace(data)) == 0 {
		err = errEmpty
	}
	if err == nil && len(entries) == 0 && (len(f.entries) > 0 || !f.good) && f.problem != without {
		f.stamp, f.sum = stamp{}, [sha256.Size]byte{}
		return f.broken(without)
	}
	f.stamp, f.sum = now, sum
	if err == nil {
		err = f.replaced(entries)
	}
	if err != nil {
		return f.broken(err.Error())
	}
	f.entries, f.good, f.problem = entries, true, ""
	return true
}

// errEmpty is of a file whose writer has not begun yet, or one whose content went with the
// machine's power.
var errEmpty = errors.New("it is empty: fill it, or remove it if it is to have nothing")

// without is the problem of a file that is perhaps being written: only if it still has no
// object when it is looked at again, it has none.
const without = "it has no object"

// replaced tells of an object that has become one of a kind that is not read: somebody
// made a mistake in its kind.
func (f *file) replaced(now []entry) error {
	for _, e := range now {
		for _, was := range f.entries {
			still := slices.ContainsFunc(now, func(e entry) bool { return e.key == was.key })
			if e.foreign && !was.foreign && !was.mistyped && was.key.name == e.key.name && !still {
				return fmt.Errorf("%s has become a %s, which is not read here: correct its kind, or put the new object into another file", was.key, e.key.kind)
			}
		}
	}
	return nil
}

func (f *file) broken(problem string) (changed bool) {
	changed = f.problem != problem
	f.problem = problem
	return changed
}

// unsettled tells whether a file is to be looked at soon, whether it changes or not.
func (r *reader) unsettled() bool {
	for _, f := range r.files {
		if f.problem == without {
			return true
		}
	}
	return len(r.missed) > 0
}

// due tells whether something has been missed for long enough.
func (r *reader) due() bool {
	for _, since := range r.missed {
		if time.Since(since) >= patience {
			return true
		}
	}
	return false
}

// load reads a file, which may be a symbolic link inside the directory. The stamp is of
// before.
func load(root *os.Root, name string) ([]byte, stamp, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // no waiting for a pipe's writer
	if err != nil {
		return nil, stamp{}, fmt.Errorf("%w: it has to be a file of this directory that can be read", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, stamp{}, err
	}
	now := stampOf(info)
	if !info.Mode().IsRegular() {
		return nil, now, fmt.Errorf("it is not a regular file (%s): remove it, or give it another name", info.Mode().Type())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if len(data) > maxSize {
		return nil, now, fmt.Errorf("it has more than %d MiB: make several files of it", maxSize>>20)
	}
	return data, now, err
}

// merge makes one of all files.
func (r *reader) merge() *Objects {
	m := &merger{
		last:    r.last,
		started: r.complete,
		objects: newObjects(),
		by:      make(map[key]metav1.Object),
		files:   make(map[key]string),
		uids:    make(map[key]key),
		typos:   make(map[string]string),
	}
	m.objects.Complete = r.found
	switch {
	case r.trouble != "":
		m.complain(r.dir, "", r.trouble)
	case len(r.files) == 0 && !r.complete: // perhaps it is not mounted yet
		m.complain(r.dir, "", "it has no manifests: until it had one, nothing is taken down or deleted")
		m.objects.Complete = false
	}
	names := slices.Sorted(maps.Keys(r.files))
	for _, name := range names {
		m.tell(filepath.Join(r.dir, name), r.files[name])
	}
	// What counted last goes first: a copy of a manifest that is being edited takes nothing
	// from it.
	for _, known := range []bool{true, false} {
		for _, name := range names {
			path := filepath.Join(r.dir, name)
			for _, e := range r.files[name].entries {
				if known == r.knows(path, e) {
					m.addEntry(path, e)
				}
			}
		}
	}
	r.miss(m)
	r.last, r.homes = m.by, m.files
	r.complete = r.complete || m.objects.Complete
	return m.objects
}

// knows tells whether an object is where it was last, and the same.
func (r *reader) knows(path string, e entry) bool {
	return r.homes[e.key] == path && (e.object == nil || e.object.GetUID() == r.last[e.key].GetUID())
}

// miss has what no file has any more count a little longer: some remove a file before they
// write it anew, and a directory that changes while it is read may show a file by neither
// of its names (readdir(3)). While the kind of one is mistyped, what has its name counts.
func (r *reader) miss(m *merger) {
	missed := make(map[key]time.Time)
	for k, o := range r.last {
		if m.by[k] != nil {
			continue
		}
		if path, is := m.typos[k.name]; is && m.put(k, o) == nil {
			m.complain(path, k.String(), "no file has it any more, and the kind of its namesake in here is mistyped: until that is mended, it stays as it was")
			continue
		}
		since, again := r.missed[k]
		if !again {
			since = time.Now()
		}
		if time.Since(since) < patience && m.put(k, o) == nil {
			missed[k] = since
		}
	}
	r.missed = missed
}

type merger struct {
	last    map[key]metav1.Object
	started bool // Objects were complete once
	objects *Objects
	by      map[key]metav1.Object
	files   map[key]string
	uids    map[key]key       // of a kind, and with the UID as name
	typos   map[string]string // files of objects whose kind is mistyped, by their names
}

func (m *merger) complain(file, object, message string) {
	m.objects.Problems = append(m.objects.Problems, Problem{File: file, Object: object, Message: message})
}

// tell tells what is wrong with a file.
func (m *merger) tell(path string, f *file) {
	switch {
	case f.problem != "" && f.good:
		m.complain(path, "", f.problem+": until it is mended, what the file had before counts")
	case f.problem != "":
		m.complain(path, "", f.problem+": until it is mended, nothing is taken down or deleted: it may be in here")
		m.objects.Complete = false
	}
}

func (m *merger) addEntry(path string, e entry) {
	object := e.object
	if object != nil && m.last[e.key] != nil {
		if problem := unchangeable(m.last[e.key], object); problem != "" {
			e.problem, object = problem, nil
		}
	}
	if object == nil {
		if object = m.last[e.key]; object == nil {
			m.leaveOut(path, e)
			return
		}
		m.complain(path, e.key.String(), e.problem+": until it is mended, it stays as it was")
	}
	if first, twice := m.files[e.key]; twice {
		m.complain(path, e.key.String(), fmt.Sprintf("%s has it already, and that one counts: remove one of the two", first))
		return
	}
	if err := m.put(e.key, object); err != nil {
		e.problem = err.Error()
		if last := m.last[e.key]; last == nil || m.put(e.key, last) != nil {
			m.leaveOut(path, e)
			return
		}
		m.complain(path, e.key.String(), e.problem+": until it is mended, it stays as it was")
	}
	m.files[e.key] = path
}

// put adds an object, if none of its kind has its UID.
func (m *merger) put(k key, object metav1.Object) error {
	uid := key{kind: k.kind, name: string(object.GetUID())}
	if other, twice := m.uids[uid]; twice {
		return fmt.Errorf("metadata.uid: %q is that of %s: remove it, or give it another", uid.name, other)
	}
	m.uids[uid], m.by[k] = k, object
	kinds[k.kind].put(m.objects, object)
	return nil
}

// leaveOut is for what has never been valid. What was there at the start may have been
// before, and be mounted.
func (m *merger) leaveOut(path string, e entry) {
	if e.mistyped {
		m.typos[e.key.name] = path
	}
	if e.foreign || m.started {
		m.complain(path, e.key.String(), e.problem+": it is left out")
		return
	}
	m.complain(path, e.key.String(), e.problem+": until it is mended, nothing is taken down or deleted")
	m.objects.Complete = false
}
