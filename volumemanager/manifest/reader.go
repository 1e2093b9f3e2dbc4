package manifest

import (
	"crypto/sha256"
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
	// trouble is what is wrong with the directory itself.
	trouble string
	// last are the objects of the last Objects.
	last map[key]metav1.Object
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
	if !first && !changed && trouble == r.trouble {
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
	all, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return false, err
	}
	changed, r.found = !r.found, true
	there := make(map[string]bool)
	for _, e := range all {
		if !isManifest(e.Name()) {
			continue
		}
		there[e.Name()] = true
		f := r.files[e.Name()]
		if f == nil {
			f = &file{}
			r.files[e.Name()] = f
		}
		changed = f.update(root, e.Name()) || changed
	}
	for name := range r.files {
		if !there[name] {
			delete(r.files, name)
			changed = true
		}
	}
	return changed, nil
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
	if err == nil && len(entries) == 0 && (len(f.entries) > 0 || !f.good) && f.problem != empty {
		f.stamp, f.sum = stamp{}, [sha256.Size]byte{}
		return f.broken(empty)
	}
	f.stamp, f.sum = now, sum
	if err != nil {
		return f.broken(err.Error())
	}
	f.entries, f.good, f.problem = entries, true, ""
	return true
}

// empty is the problem of a file that is perhaps being written: only if it is still empty
// when it is looked at again, it has nothing.
const empty = "it is empty"

func (f *file) broken(problem string) (changed bool) {
	changed = f.problem != problem
	f.problem = problem
	return changed
}

// unsettled tells whether a file is to be looked at soon, whether it changes or not.
func (r *reader) unsettled() bool {
	for _, f := range r.files {
		if f.problem == empty {
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
	m := merger{
		last:    r.last,
		started: r.complete,
		objects: newObjects(),
		by:      make(map[key]metav1.Object),
		files:   make(map[key]string),
		uids:    make(map[key]key),
	}
	m.objects.Complete = r.found
	if r.trouble != "" {
		m.complain(r.dir, "", r.trouble)
	}
	for _, name := range slices.Sorted(maps.Keys(r.files)) {
		m.add(filepath.Join(r.dir, name), r.files[name])
	}
	r.last = m.by
	r.complete = r.complete || m.objects.Complete
	return m.objects
}

type merger struct {
	last    map[key]metav1.Object
	started bool // Objects were complete once
	objects *Objects
	by      map[key]metav1.Object
	files   map[key]string
	uids    map[key]key // of a kind, and with the UID as name
}

func (m *merger) complain(file, object, message string) {
	m.objects.Problems = append(m.objects.Problems, Problem{File: file, Object: object, Message: message})
}

func (m *merger) add(path string, f *file) {
	switch {
	case f.problem != "" && f.good:
		m.complain(path, "", f.problem+": until it is mended, what the file had before counts")
	case f.problem != "":
		m.complain(path, "", f.problem+": until it is mended, nothing is taken down or deleted: it may be in here")
		m.objects.Complete = false
	}
	for _, e := range f.entries {
		m.addEntry(path, e)
	}
}

func (m *merger) addEntry(path string, e entry) {
	object := e.object
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
	uid := key{kind: e.key.kind, name: string(object.GetUID())}
	if other, twice := m.uids[uid]; twice {
		m.complain(path, e.key.String(), fmt.Sprintf("metadata.uid: %q is that of %s: remove it, or give it another; until then it is left out", uid.name, other))
		return
	}
	m.files[e.key], m.uids[uid], m.by[e.key] = path, e.key, object
	kinds[e.key.kind].put(m.objects, object)
}

// leaveOut is for what has never been valid. What was there at the start may have been
// before, and be mounted.
func (m *merger) leaveOut(path string, e entry) {
	if e.foreign || m.started {
		m.complain(path, e.key.String(), e.problem+": it is left out")
		return
	}
	m.complain(path, e.key.String(), e.problem+": until it is mended, nothing is taken down or deleted")
	m.objects.Complete = false
}
