package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
)

const suffix = ".json"

type object interface {
	metav1.Object
	runtime.Object
}

// kind holds the objects of one kind, keyed by the names of their files.
type kind[T object] struct {
	name  string
	root  *os.Root
	empty func() T

	mu      sync.RWMutex
	objects map[string]T
	// broken holds the errors of files that cannot be read. They are never written.
	broken map[string]error
}

// openKind creates the directory. Only root can read it: it shows where volumes are.
func openKind[T object](dir, name string, empty func() T) (*kind[T], error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	k := &kind[T]{name: name, root: root, empty: empty, objects: map[string]T{}, broken: map[string]error{}}
	if err := k.load(); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return k, nil
}

func (k *kind[T]) load() error {
	entries, err := fs.ReadDir(k.root.FS(), ".")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		file := entry.Name()
		if strings.HasSuffix(file, suffix+".tmp") { // left by a killed writer
			continue
		}
		if o, err := k.read(file); err != nil {
			k.broken[file] = err
		} else {
			k.objects[file] = o
		}
	}
	return nil
}

func (k *kind[T]) read(file string) (o T, err error) {
	data, err := k.root.ReadFile(file)
	if err != nil {
		return o, err
	}
	o, err = k.decode(data)
	if err != nil {
		return o, err
	}
	if right := fileOf(keyOf(o)); file != right {
		return o, fmt.Errorf("it contains %s %s, whose file must be named %s: rename the file", k.name, keyOf(o), right)
	}
	return o, nil
}

// decode is strict: a field that it ignored would be lost when the object is written again.
func (k *kind[T]) decode(data []byte) (o T, err error) {
	o = k.empty()
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(o); err != nil {
		return o, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return o, errors.New("more than one object")
	}
	if got, want := o.GetObjectKind().GroupVersionKind(), corev1.SchemeGroupVersion.WithKind(k.name); got != want {
		return o, fmt.Errorf("kind %q is not %q", got, want)
	}
	return o, nil
}

func keyOf(o object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// longest is the maximal length of a file name (NAME_MAX, linux/limits.h) without suffixes.
const longest = 255 - len(suffix) - len(".tmp")

// fileOf is unambiguous, because neither a namespace nor a name contains an underscore. The name
// of an object may be longer than a file name can be.
func fileOf(key types.NamespacedName) string {
	name := key.Name
	if key.Namespace != "" {
		name = key.Namespace + "_" + name
	}
	if len(name) > longest {
		name = fmt.Sprintf("_%x", sha256.Sum256([]byte(name)))
	}
	return name + suffix
}

func (k *kind[T]) get(key types.NamespacedName) (T, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	file := fileOf(key)
	return k.objects[file], k.readable(file)
}

// readable returns the error of a file that could not be read. mu is held.
func (k *kind[T]) readable(file string) error {
	if err := k.broken[file]; err != nil {
		return fmt.Errorf("%s cannot be read: %w: fix the file, or move it away, and restart", filepath.Join(k.root.Name(), file), err)
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
		err := k.readable(file)
		problems = append(problems, manifest.Problem{File: filepath.Join(k.root.Name(), file), Object: k.name, Message: err.Error()})
	}
	return problems
}
