package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/store"
)

var data = types.NamespacedName{Namespace: "default", Name: "data"}

func open(t *testing.T, dir string) *store.Store {
	t.Helper()
	s, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func newVolume(name string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: "1"},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: "d", VolumeHandle: "h"},
			},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
}

func newClaim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data"}}
}

// TestLongNames: an object is stored even if its name is longer than a file name can be.
func TestLongNames(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	long := strings.Repeat("a", 253)
	claim := newClaim()
	claim.Name = long
	for range 2 { // the second write replaces the objects
		if err := errors.Join(first.PutVolume(newVolume(long)), first.PutVolume(newVolume(long[1:]+"b")), first.PutClaim(claim)); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, dir)
	if len(s.Problems()) > 0 || len(s.Volumes()) != 2 || s.Volumes()[0].Name != long && s.Volumes()[1].Name != long {
		t.Errorf("got problems %v, volumes %v; want no problems and both volumes", s.Problems(), s.Volumes())
	}
	if c, err := s.Claim(types.NamespacedName{Namespace: "default", Name: long}); err != nil || c == nil {
		t.Errorf("got claim %v, error %v; want the claim", c, err)
	}
	if err := s.RemoveVolume(long); err != nil || len(s.Volumes()) != 1 {
		t.Errorf("after RemoveVolume: got %d volumes, error %v; want 1", len(s.Volumes()), err)
	}
}

// TestStore: a new Store reads the objects that an earlier Store wrote and did not remove.
func TestStore(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	if err := errors.Join(
		first.PutVolume(newVolume("b")), first.PutVolume(newVolume("a")), first.PutVolume(newVolume("removed")), first.PutClaim(newClaim()),
		first.RemoveVolume("removed"), first.RemoveVolume("removed"),
	); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*store.Store{first, open(t, dir)} {
		if len(s.Problems()) > 0 {
			t.Errorf("got problems %v, want none", s.Problems())
		}
		volumes := s.Volumes()
		if len(volumes) != 2 || volumes[0].Name != "a" || volumes[1].Name != "b" {
			t.Fatalf("got volumes %v, want a and b", volumes)
		}
		if want := newVolume("a"); !equality.Semantic.DeepEqual(volumes[0].Spec, want.Spec) || volumes[0].Status != want.Status {
			t.Errorf("volume a: got %+v, want %+v", volumes[0], want)
		}
		if c, err := s.Claim(data); err != nil || c == nil || len(s.Claims()) != 1 {
			t.Errorf("got claim %v, error %v, %d claims; want the only claim", c, err, len(s.Claims()))
		}
		if v, err := s.Volume("removed"); err != nil || v != nil {
			t.Errorf("removed volume: got %v, error %v; want nil, nil", v, err)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "persistentvolumes", "a.json"))
	if err != nil || !strings.Contains(string(text), `"kind": "PersistentVolume"`) {
		t.Errorf("got error %v and this file, want the format of kubectl get -o json:\n%s", err, text)
	}
}

// TestUnreadable: an unreadable file is reported, and neither replaced nor removed.
func TestUnreadable(t *testing.T) {
	for name, content := range map[string]string{
		"empty":         "",
		"truncated":     `{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"na`,
		"unknown field": `{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"name":"v"},"spec":{"claimReff":{}}}`,
		"two objects":   `{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"name":"v"}}{}`,
		"other kind":    `{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"v"}}`,
		"other name":    `{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"name":"w"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "persistentvolumes", "v.json")
			if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(content), 0o600)); err != nil {
				t.Fatal(err)
			}
			s := open(t, dir)
			if p := s.Problems(); len(p) != 1 || p[0].File != file {
				t.Errorf("got problems %v, want one of %s", p, file)
			}
			if _, err := s.Volume("v"); err == nil {
				t.Error("Volume returned no error for an unreadable file")
			}
			if err := s.PutVolume(newVolume("v")); err == nil {
				t.Error("PutVolume returned no error for an unreadable file")
			}
			if err := s.RemoveVolume("v"); err == nil {
				t.Error("RemoveVolume returned no error for an unreadable file")
			}
			if b, err := os.ReadFile(file); err != nil || string(b) != content {
				t.Errorf("content of the file: got %q, error %v; want it unchanged", b, err)
			}
		})
	}
}

// TestKilledWriter: the temporary file of a killed writer is ignored.
func TestKilledWriter(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	if err := os.WriteFile(filepath.Join(dir, "persistentvolumeclaims", "default_data.json.tmp"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if len(s.Problems()) > 0 || len(s.Claims()) > 0 {
		t.Errorf("got problems %v, claims %v; want none", s.Problems(), s.Claims())
	}
	if err := s.PutClaim(newClaim()); err != nil {
		t.Error(err)
	}
}

// TestCopies: changing an object after it was stored does not change the stored object.
func TestCopies(t *testing.T) {
	s := open(t, t.TempDir())
	v := newVolume("v")
	if err := s.PutVolume(v); err != nil {
		t.Fatal(err)
	}
	v.Spec.CSI.VolumeHandle = "other"
	if got, err := s.Volume("v"); err != nil || got.Spec.CSI.VolumeHandle != "h" {
		t.Errorf("got volume %+v, error %v; want the stored handle h", got, err)
	}
}
