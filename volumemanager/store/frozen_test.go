package store_test

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenObjects: the claims and volumes that an earlier version stored are read.
func TestFrozenObjects(t *testing.T) {
	dir := t.TempDir()
	path := func(kind, name string) string { return filepath.Join(dir, kind, name) }
	v := newVolume("pv")
	v.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}
	v.Annotations = map[string]string{"trivet.dev/manifest": "true"}
	frozen.Format[*corev1.PersistentVolume]{
		Dir: "persistentvolumes",
		Read: func(b []byte) (*corev1.PersistentVolume, error) {
			if err := os.WriteFile(path("persistentvolumes", "pv.json"), b, 0o600); err != nil {
				return nil, err
			}
			return open(t, dir).Volume("pv")
		},
		Write: func(v *corev1.PersistentVolume) ([]byte, error) {
			if err := open(t, dir).PutVolume(v); err != nil {
				return nil, err
			}
			return os.ReadFile(path("persistentvolumes", "pv.json"))
		},
	}.Test(t, map[string]*corev1.PersistentVolume{"pv": v})

	c := &corev1.PersistentVolumeClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: data.Namespace, Name: data.Name, UID: "2"},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv", AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	frozen.Format[*corev1.PersistentVolumeClaim]{
		Dir: "persistentvolumeclaims",
		Read: func(b []byte) (*corev1.PersistentVolumeClaim, error) {
			if err := os.WriteFile(path("persistentvolumeclaims", "default_data.json"), b, 0o600); err != nil {
				return nil, err
			}
			return open(t, dir).Claim(data)
		},
		Write: func(c *corev1.PersistentVolumeClaim) ([]byte, error) {
			if err := open(t, dir).PutClaim(c); err != nil {
				return nil, err
			}
			return os.ReadFile(path("persistentvolumeclaims", "default_data.json"))
		},
	}.Test(t, map[string]*corev1.PersistentVolumeClaim{"default_data": c})
}
