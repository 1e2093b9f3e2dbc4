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

// maxSize is the maximal size of a file in bytes.
const maxSize = 10 << 20

// reader reads the manifests of a directory. After the first read it reads only changed files.
type reader struct {
	dir   string
	files map[string]*file
	// found is set after the directory was read once, complete after Objects were complete once.
	found, complete bool
	// dev is the device number of the directory's filesystem.
	dev uint64
	// problem says why the directory cannot be read or watched; otherwise "".
	problem string
	// last holds the objects of the last merge, paths the files that contain them.
	last  map[key]metav1.Object
	paths map[key]string
	// missing holds the objects of last that disappeared from the files, with the times when they
	// disappeared.
	missing map[key]time.Time
}

// file is the state of a manifest file.
type file struct {
	entries []entry // of the last valid version
	valid   bool    // at least one version was valid
	// problem says why the current version is not valid; otherwise "".
	problem string
	// stamp and sum identify the current version; zero if unknown.
	stamp stamp
	sum   [sha256.Size]byte
}

// stamp identifies a version of a file. The zero stamp matches no version.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

// minStampAge is longer than the granularity of the kernel's file timestamps. Two changes within this
// time may result in the same timestamps.
const minStampAge = 20 * time.Millisecond

// stampOf returns the stamp of a file; zero if the file has just changed.
func stampOf(info fs.FileInfo) stamp {
	st := info.Sys().(*syscall.Stat_t)
	if time.Since(time.Unix(st.Ctim.Unix())) < minStampAge {
		return stamp{}
	}
	return stamp{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
}

// read reads the directory. It returns nil if nothing has changed since the last call. If the directory
// cannot be watched for changes, notWatched is the error.
func (r *reader) read(notWatched error) *Objects {
	first := r.files == nil
	if first {
		r.files = make(map[string]*file)
	}
	changed, err := r.scan()
	problem := ""
	switch {
	case err != nil:
		problem = fmt.Sprintf("the directory cannot be read: %v: create or mount it, or correct --manifests; until then its last content applies", err)
	case notWatched != nil:
		problem = fmt.Sprintf("the directory is read only every %v: %v", pollPeriod, notWatched)
	}
	if !first && !changed && problem == r.problem && !r.missingExpired() {
		return nil
	}
	r.problem = problem
	return r.merge()
}

// scan reads the files that have changed.
func (r *reader) scan() (changed bool, err error) {
	root, err := os.OpenRoot(r.dir)
	if err != nil {
		return false, err
	}
	defer root.Close()
	names, err := r.list(root)
	if err != nil {
		return false, err
	}
	changed, r.found = !r.found, true
	for name := range names {
		f := r.files[name]
		if f == nil {
			f = &file{}
			r.files[name] = f
		}
		changed = f.update(root, name) || changed
	}
	for name := range r.files {
		if !names[name] {
			delete(r.files, name)
			changed = true
		}
	}
	return changed, nil
}

// list returns the names of the manifests. It returns an error if the directory is empty because its
// filesystem was unmounted.
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
		return nil, errors.New("it has no manifests and is on another filesystem than before")
	}
	r.dev = dev
	return names, nil
}

func isManifest(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

// update reads a file if it has changed. It reports whether its entries or its problem have changed.
func (f *file) update(root *os.Root, name string) (changed bool) {
	info, err := root.Stat(name)
	if err == nil && f.stamp != (stamp{}) && f.stamp == stampOf(info) {
		return false
	}
	data, current, err := load(root, name)
	if err != nil {
		f.stamp, f.sum = current, [sha256.Size]byte{}
		return f.setProblem(err.Error())
	}
	sum := sha256.Sum256(data)
	if sum == f.sum {
		f.stamp = current
		return false
	}
	entries, err := decode(data, filepath.Ext(name) == ".json")
	if err == nil && len(bytes.TrimSpace(data)) == 0 {
		err = errEmpty
	}
	if err == nil && len(entries) == 0 && (len(f.entries) > 0 || !f.valid) && f.problem != noObject {
		f.stamp, f.sum = stamp{}, [sha256.Size]byte{} // so that the file is read again
		return f.setProblem(noObject)
	}
	f.stamp, f.sum = current, sum
	if err == nil {
		err = f.checkKinds(entries)
	}
	if err != nil {
		return f.setProblem(err.Error())
	}
	f.entries, f.valid, f.problem = entries, true, ""
	return true
}

// errEmpty is the error of an empty file: its writer has not filled it yet, or its content was lost
// in a power failure.
var errEmpty = errors.New("the file is empty: write the manifest again, or remove the file")

// noObject is the problem of a file that has text, but no objects. Its writer may not have finished. The
// file is accepted if it still has no objects at the next read.
const noObject = "the file has no objects"

// checkKinds returns an error if an object was replaced with one of the same name whose kind is not
// supported, because the new kind is probably a mistake.
func (f *file) checkKinds(entries []entry) error {
	for _, e := range entries {
		for _, old := range f.entries {
			kept := slices.ContainsFunc(entries, func(e entry) bool { return e.key == old.key })
			if e.unsupported && !old.unsupported && !old.mistyped && old.key.name == e.key.name && !kept {
				return fmt.Errorf("%s has become a %s, which is not supported: correct the kind, or put the new object into another file", old.key, e.key.kind)
			}
		}
	}
	return nil
}

// setProblem sets the problem, and reports whether it has changed.
func (f *file) setProblem(problem string) (changed bool) {
	changed = f.problem != problem
	f.problem = problem
	return changed
}

// unsettled reports whether the directory must be read again after maxWait, even without a change.
func (r *reader) unsettled() bool {
	for _, f := range r.files {
		if f.problem == noObject {
			return true
		}
	}
	return len(r.missing) > 0
}

// missingExpired reports whether an object has been missing for at least maxWait.
func (r *reader) missingExpired() bool {
	for _, since := range r.missing {
		if time.Since(since) >= maxWait {
			return true
		}
	}
	return false
}

// load reads a file, which may be a symbolic link inside the directory. The stamp is taken before the
// content is read.
func load(root *os.Root, name string) ([]byte, stamp, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // do not wait for the writer of a pipe
	if err != nil {
		return nil, stamp{}, fmt.Errorf("%w: the file must be a readable file of this directory", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, stamp{}, err
	}
	current := stampOf(info)
	if !info.Mode().IsRegular() {
		return nil, current, fmt.Errorf("not a regular file (%s): remove or rename it", info.Mode().Type())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if len(data) > maxSize {
		return nil, current, fmt.Errorf("the file has more than %d MiB: split it into several files", maxSize>>20)
	}
	return data, current, err
}

// merge combines the objects of all files.
func (r *reader) merge() *Objects {
	m := &merger{
		last: r.last, started: r.complete, objects: &Objects{Complete: r.found},
		byKey: map[key]metav1.Object{}, files: map[key]string{}, uids: map[key]key{}, typos: map[string]string{},
	}
	switch {
	case r.problem != "":
		m.addProblem(r.dir, "", r.problem)
	case len(r.files) == 0 && !r.complete: // the directory may not be mounted yet
		m.addProblem(r.dir, "", "the directory has no manifests: until it has one, nothing is unmounted or deleted")
		m.objects.Complete = false
	}
	names := slices.Sorted(maps.Keys(r.files))
	for _, name := range names {
		m.addFileProblem(filepath.Join(r.dir, name), r.files[name])
	}
	// An object that was in the same file before takes precedence over a copy in another file.
	for _, known := range []bool{true, false} {
		for _, name := range names {
			path := filepath.Join(r.dir, name)
			for _, e := range r.files[name].entries {
				if known == r.isKnown(path, e) {
					m.addEntry(path, e)
				}
			}
		}
	}
	r.keepMissing(m)
	r.last, r.paths = m.byKey, m.files
	r.complete = r.complete || m.objects.Complete
	return m.objects
}

// isKnown reports whether a file contained an object, with the same UID, at the last merge.
func (r *reader) isKnown(path string, e entry) bool {
	return r.paths[e.key] == path && (e.object == nil || e.object.GetUID() == r.last[e.key].GetUID())
}

// keepMissing keeps objects that disappeared from the files for maxWait, because some programs remove
// a file before they write it again, and readdir(3) may miss a file that is being renamed. While an
// object of the same name has a mistyped kind, the missing object is kept longer.
func (r *reader) keepMissing(m *merger) {
	missing := make(map[key]time.Time)
	for k, o := range r.last {
		if m.byKey[k] != nil {
			continue
		}
		if path, mistyped := m.typos[k.name]; mistyped && m.put(k, o) == nil {
			m.addProblem(path, k.String(), "the object is in no file any more, and this file has an object of the same name with a mistyped kind: until the kind is corrected, the last valid version of the object applies")
			continue
		}
		since, known := r.missing[k]
		if !known {
			since = time.Now()
		}
		if time.Since(since) < maxWait && m.put(k, o) == nil {
			missing[k] = since
		}
	}
	r.missing = missing
}

// merger combines the objects of all files. It decides which version of each object applies.
type merger struct {
	last    map[key]metav1.Object // the objects of the last merge
	started bool                  // Objects were complete once
	objects *Objects
	byKey   map[key]metav1.Object
	files   map[key]string    // the file of each object
	uids    map[key]key       // the object of each UID; the UID is the name in the map's key
	typos   map[string]string // the files of objects with a mistyped kind, keyed by the objects' names
}

func (m *merger) addProblem(file, object, message string) {
	m.objects.Problems = append(m.objects.Problems, Problem{file, object, message})
}

// addFileProblem adds the problem of a file, if it has one.
func (m *merger) addFileProblem(path string, f *file) {
	switch {
	case f.problem != "" && f.valid:
		m.addProblem(path, "", f.problem+": until this is fixed, the last valid version of the file applies")
	case f.problem != "":
		m.addProblem(path, "", f.problem+": until this is fixed, nothing is unmounted or deleted, because this file may declare volumes in use")
		m.objects.Complete = false
	}
}

const lastApplies = ": until this is fixed, the last valid version of the object applies"

// addEntry adds the object of an entry. If the object is not valid, it adds the last valid version and a
// problem.
func (m *merger) addEntry(path string, e entry) {
	object := e.object
	if object != nil && m.last[e.key] != nil {
		if problem := immutableChange(m.last[e.key], object); problem != "" {
			e.problem, object = problem, nil
		}
	}
	if object == nil {
		if object = m.last[e.key]; object == nil {
			m.leaveOut(path, e)
			return
		}
		m.addProblem(path, e.key.String(), e.problem+lastApplies)
	}
	if first, duplicate := m.files[e.key]; duplicate {
		m.addProblem(path, e.key.String(), fmt.Sprintf("%s contains the same object and takes precedence: remove one of them", first))
		return
	}
	if err := m.put(e.key, object); err != nil {
		e.problem = err.Error()
		if last := m.last[e.key]; last == nil || m.put(e.key, last) != nil {
			m.leaveOut(path, e)
			return
		}
		m.addProblem(path, e.key.String(), e.problem+lastApplies)
	}
	m.files[e.key] = path
}

// put adds an object. It returns an error if another object of its kind has the same UID.
func (m *merger) put(k key, object metav1.Object) error {
	uid := key{kind: k.kind, name: string(object.GetUID())}
	if other, duplicate := m.uids[uid]; duplicate {
		return fmt.Errorf("metadata.uid: %q is the UID of %s: remove this field, or change its value", uid.name, other)
	}
	m.uids[uid], m.byKey[k] = k, object
	kinds[k.kind].put(m.objects, object)
	return nil
}

// leaveOut omits an object that was never valid. If Objects were never complete, they stay incomplete,
// because an earlier manager may have mounted the volumes of the object.
func (m *merger) leaveOut(path string, e entry) {
	if e.mistyped {
		m.typos[e.key.name] = path
	}
	if e.unsupported || m.started {
		m.addProblem(path, e.key.String(), e.problem+": the object is ignored")
		return
	}
	m.addProblem(path, e.key.String(), e.problem+": until this is fixed, nothing is unmounted or deleted")
	m.objects.Complete = false
}
