// Package store stores PersistentVolumes and PersistentVolumeClaims on disk: one JSON file for
// each, durable before a call returns. A file contains the object as kubectl shows it, spec and
// status.
//
// The package does not interpret the objects. Open reads the files; later reads use memory. Only one
// process may write the files.
package store

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	strict "sigs.k8s.io/json"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
)

// Store holds claims and volumes. It stores copies of the objects. The caller must not change returned
// objects. Store is safe for concurrent use, except that two calls must not write the same object at the same
// time.
type Store struct {
	volumes *kind[*corev1.PersistentVolume]
	claims  *kind[*corev1.PersistentVolumeClaim]
}

// Open reads the directories persistentvolumes and persistentvolumeclaims below dir, and creates
// missing ones. A file that cannot be read is not an error; Problems returns it.
func Open(dir string) (*Store, error) {
	volumes, err := openKind(filepath.Join(dir, "persistentvolumes"), "PersistentVolume",
		func() *corev1.PersistentVolume { return &corev1.PersistentVolume{} })
	if err != nil {
		return nil, err
	}
	claims, err := openKind(filepath.Join(dir, "persistentvolumeclaims"), "PersistentVolumeClaim",
		func() *corev1.PersistentVolumeClaim { return &corev1.PersistentVolumeClaim{} })
	if err != nil {
		return nil, errors.Join(err, volumes.root.Close())
	}
	return &Store{volumes: volumes, claims: claims}, nil
}

// Close closes the directories. Writes fail afterwards.
func (s *Store) Close() error { return errors.Join(s.volumes.root.Close(), s.claims.root.Close()) }

// Volume returns a volume; nil if it does not exist. It returns an error if the file cannot be read.
func (s *Store) Volume(name string) (*corev1.PersistentVolume, error) {
	return s.volumes.get(types.NamespacedName{Name: name})
}

// Volumes returns the readable volumes, sorted by name.
func (s *Store) Volumes() []*corev1.PersistentVolume { return s.volumes.all() }

// PutVolume creates or replaces a volume durably. A file that cannot be read is not replaced.
func (s *Store) PutVolume(v *corev1.PersistentVolume) error { return s.volumes.put(v.DeepCopy()) }

// RemoveVolume removes a volume durably. A missing volume is not an error. A file that cannot be read
// is not removed.
func (s *Store) RemoveVolume(name string) error {
	return s.volumes.remove(types.NamespacedName{Name: name})
}

// Claim returns a claim; nil if it does not exist. It returns an error if the file cannot be read.
func (s *Store) Claim(key types.NamespacedName) (*corev1.PersistentVolumeClaim, error) {
	return s.claims.get(key)
}

// Claims returns the readable claims, sorted by namespace and name.
func (s *Store) Claims() []*corev1.PersistentVolumeClaim { return s.claims.all() }

// PutClaim creates or replaces a claim durably. A file that cannot be read is not replaced.
func (s *Store) PutClaim(c *corev1.PersistentVolumeClaim) error { return s.claims.put(c.DeepCopy()) }

// RemoveClaim removes a claim durably. A missing claim is not an error. A file that cannot be read is
// not removed.
func (s *Store) RemoveClaim(key types.NamespacedName) error { return s.claims.remove(key) }

// Problems returns the files that could not be read when the store was opened, sorted by name.
// The store does not change these files.
func (s *Store) Problems() []manifest.Problem {
	problems := append(s.volumes.problems(), s.claims.problems()...)
	slices.SortFunc(problems, func(a, b manifest.Problem) int { return cmp.Compare(a.File, b.File) })
	return problems
}

const suffix = ".json"

// object is a PersistentVolume or a PersistentVolumeClaim.
type object interface {
	metav1.Object
	runtime.Object
}

// kind holds the objects of one kind.
type kind[T object] struct {
	// name is the kind in the objects, such as PersistentVolume.
	name string
	// root is the directory of the files.
	root *os.Root
	// empty returns a new empty object.
	empty func() T

	mu sync.RWMutex
	// objects are keyed by the names of their files.
	objects map[string]T
	// broken holds the errors of files that cannot be read, keyed by their names. Such files are never
	// written.
	broken map[string]error
}

// openKind reads a directory, and creates a missing one. Only root can access the directory, because
// its files contain the locations of volumes.
func openKind[T object](dir, name string, empty func() T) (*kind[T], error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	k := &kind[T]{name: name, root: root, empty: empty, objects: map[string]T{}, broken: map[string]error{}}
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	for _, entry := range entries {
		file := entry.Name()
		if strings.HasSuffix(file, suffix+atomicfile.Temporary) { // left by a killed writer
			continue
		}
		if o, err := k.read(file); err != nil {
			k.broken[file] = err
		} else {
			k.objects[file] = o
		}
	}
	return k, nil
}

// read reads a file. It rejects unknown fields, because they would be lost when the object is written
// again.
func (k *kind[T]) read(file string) (o T, err error) {
	data, err := k.root.ReadFile(file)
	if err != nil {
		return o, err
	}
	o = k.empty()
	unknown, err := strict.UnmarshalStrict(data, o)
	if err == nil && len(unknown) > 0 {
		err = unknown[0]
	}
	if err != nil {
		return o, err
	}
	if got, want := o.GetObjectKind().GroupVersionKind(), corev1.SchemeGroupVersion.WithKind(k.name); got != want {
		return o, fmt.Errorf("the kind is %q, want %q", got, want)
	}
	if want := fileOf(keyOf(o)); file != want {
		return o, fmt.Errorf("the file contains %s %s and must be named %s: rename it", k.name, keyOf(o), want)
	}
	return o, nil
}

func keyOf(o object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// maxName is the maximal length of a file name (NAME_MAX, linux/limits.h) without suffixes.
const maxName = 255 - len(suffix) - len(atomicfile.Temporary)

// fileOf returns the name of an object's file. The name is unique, because neither a namespace nor an
// object's name contains an underscore. A name that is too long is replaced with its hash.
func fileOf(key types.NamespacedName) string {
	name := key.Name
	if key.Namespace != "" {
		name = key.Namespace + "_" + name
	}
	if len(name) > maxName {
		name = fmt.Sprintf("_%x", sha256.Sum256([]byte(name)))
	}
	return name + suffix
}

func (k *kind[T]) get(key types.NamespacedName) (T, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	file := fileOf(key)
	return k.objects[file], k.readError(file)
}

// readError returns the error of a file that could not be read, or nil. The caller holds mu.
func (k *kind[T]) readError(file string) error {
	if err := k.broken[file]; err != nil {
		return fmt.Errorf("%s cannot be read: %w: fix the file, or move it away, and restart the volume manager", filepath.Join(k.root.Name(), file), err)
	}
	return nil
}

func (k *kind[T]) all() []T {
	k.mu.RLock()
	defer k.mu.RUnlock()
	all := make([]T, 0, len(k.objects))
	for _, file := range slices.Sorted(maps.Keys(k.objects)) {
		all = append(all, k.objects[file])
	}
	return all
}

// put stores o. The caller must not use o afterwards.
func (k *kind[T]) put(o T) error {
	if _, err := k.get(keyOf(o)); err != nil {
		return err
	}
	o.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(k.name))
	data, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return err
	}
	file := fileOf(keyOf(o))
	if err := atomicfile.Write(k.root, file, append(data, '\n')); err != nil {
		return fmt.Errorf("%s %s: %w", k.name, keyOf(o), err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.objects[file] = o
	return nil
}

func (k *kind[T]) remove(key types.NamespacedName) error {
	if _, err := k.get(key); err != nil {
		return err
	}
	file := fileOf(key)
	if err := k.root.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := atomicfile.Sync(k.root, "."); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.objects, file)
	return nil
}

func (k *kind[T]) problems() (problems []manifest.Problem) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for file := range k.broken {
		path := filepath.Join(k.root.Name(), file)
		problems = append(problems, manifest.Problem{File: path, Object: k.name, Message: k.readError(file).Error()})
	}
	return problems
}
