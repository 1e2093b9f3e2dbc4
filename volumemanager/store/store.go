package store

import (
	"cmp"
	"errors"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
)

// Store has claims and volumes. Those it returns are shared, and never changed; those it
// is given are copied. It is safe for concurrent use, but for two writes of one object.
type Store struct {
	volumes *kind[*corev1.PersistentVolume]
	claims  *kind[*corev1.PersistentVolumeClaim]
}

// Open reads what is below dir, in persistentvolumes and persistentvolumeclaims, which it
// makes if they are not there. A file that cannot be read fails nothing: see Problems.
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

// Close gives the directories back. Nothing can be written after.
func (s *Store) Close() error { return errors.Join(s.volumes.root.Close(), s.claims.root.Close()) }

// Volume is nil if there is none. An error is of a file that is there and cannot be read.
func (s *Store) Volume(name string) (*corev1.PersistentVolume, error) {
	return s.volumes.get(types.NamespacedName{Name: name})
}

// Volumes are sorted by name. Those that cannot be read are not among them.
func (s *Store) Volumes() []*corev1.PersistentVolume { return s.volumes.all() }

// PutVolume makes or replaces one; it is durable then. What cannot be read is not
// replaced.
func (s *Store) PutVolume(v *corev1.PersistentVolume) error { return s.volumes.put(v.DeepCopy()) }

// RemoveVolume removes one, or finds it gone; that is durable then. What cannot be read
// is not removed.
func (s *Store) RemoveVolume(name string) error {
	return s.volumes.remove(types.NamespacedName{Name: name})
}

// Claim is nil if there is none. An error is of a file that is there and cannot be read.
func (s *Store) Claim(key types.NamespacedName) (*corev1.PersistentVolumeClaim, error) {
	return s.claims.get(key)
}

// Claims are sorted by namespace and name. Those that cannot be read are not among them.
func (s *Store) Claims() []*corev1.PersistentVolumeClaim { return s.claims.all() }

// PutClaim is as PutVolume.
func (s *Store) PutClaim(c *corev1.PersistentVolumeClaim) error { return s.claims.put(c.DeepCopy()) }

// RemoveClaim is as RemoveVolume.
func (s *Store) RemoveClaim(key types.NamespacedName) error { return s.claims.remove(key) }

// Problems are the files that could not be read when the store was opened, sorted by
// name. They stay as they are, and so does what they are about.
func (s *Store) Problems() []manifest.Problem {
	problems := append(s.volumes.problems(), s.claims.problems()...)
	slices.SortFunc(problems, func(a, b manifest.Problem) int { return cmp.Compare(a.File, b.File) })
	return problems
}
