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

// Store holds claims and volumes. The caller must not change objects that it returns. It copies
// the objects that it is given. It is safe for concurrent use, except two writes of one object.
type Store struct {
	volumes *kind[*corev1.PersistentVolume]
	claims  *kind[*corev1.PersistentVolumeClaim]
}

// Open reads the directories persistentvolumes and persistentvolumeclaims below dir, and creates
// missing ones. A file that cannot be read is no error: see Problems.
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

// Volume returns a volume, nil if there is none. It returns an error if the file cannot be read.
func (s *Store) Volume(name string) (*corev1.PersistentVolume, error) {
	return s.volumes.get(types.NamespacedName{Name: name})
}

// Volumes returns the readable volumes, sorted by name.
func (s *Store) Volumes() []*corev1.PersistentVolume { return s.volumes.all() }

// PutVolume creates or replaces a volume durably. A file that cannot be read is not replaced.
func (s *Store) PutVolume(v *corev1.PersistentVolume) error { return s.volumes.put(v.DeepCopy()) }

// RemoveVolume removes a volume durably; it returns nil if there is none. A file that cannot be
// read is not removed.
func (s *Store) RemoveVolume(name string) error {
	return s.volumes.remove(types.NamespacedName{Name: name})
}

// Claim returns a claim, nil if there is none. It returns an error if the file cannot be read.
func (s *Store) Claim(key types.NamespacedName) (*corev1.PersistentVolumeClaim, error) {
	return s.claims.get(key)
}

// Claims returns the readable claims, sorted by namespace and name.
func (s *Store) Claims() []*corev1.PersistentVolumeClaim { return s.claims.all() }

// PutClaim creates or replaces a claim as PutVolume does a volume.
func (s *Store) PutClaim(c *corev1.PersistentVolumeClaim) error { return s.claims.put(c.DeepCopy()) }

// RemoveClaim removes a claim as RemoveVolume does a volume.
func (s *Store) RemoveClaim(key types.NamespacedName) error { return s.claims.remove(key) }

// Problems returns the files that could not be read when the store was opened, sorted by name.
// Neither the files nor their volumes are changed.
func (s *Store) Problems() []manifest.Problem {
	problems := append(s.volumes.problems(), s.claims.problems()...)
	slices.SortFunc(problems, func(a, b manifest.Problem) int { return cmp.Compare(a.File, b.File) })
	return problems
}
