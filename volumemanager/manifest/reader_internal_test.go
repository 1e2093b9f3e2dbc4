package manifest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// manyFiles makes files of one pod each, with four volumes, as if they were old.
func manyFiles(tb testing.TB, n int) (dir string) {
	tb.Helper()
	dir = tb.TempDir()
	for i := range n {
		edit(tb, dir, i, "1")
	}
	deadline := time.Now().Add(10 * time.Second)
	for { // until timestamps tell changes apart
		info, err := os.Stat(filepath.Join(dir, fmt.Sprintf("%d.yaml", n-1)))
		if err != nil {
			tb.Fatal(err)
		}
		if stampOf(info) != (stamp{}) {
			return dir
		}
		if time.Now().After(deadline) {
			tb.Fatal("a file never gets old")
		}
	}
}

func edit(tb testing.TB, dir string, i int, version string) {
	tb.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: pod-%d, labels: {version: %q}}\nspec:\n  containers: [{name: app}]\n  volumes:\n", i, version)
	for v := range 4 {
		text += fmt.Sprintf("  - name: v%d\n    emptyDir: {sizeLimit: 1Gi}\n", v)
	}
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600); err != nil {
		tb.Fatal(err)
	}
}

// TestReread: only what changed is decoded again.
func TestReread(t *testing.T) {
	const n = 1000
	dir := manyFiles(t, n)
	r := reader{dir: dir}
	first := r.read(nil)
	if len(first.Pods) != n || !first.Complete || len(first.Problems) > 0 {
		t.Fatalf("%d pods, complete %t, %v", len(first.Pods), first.Complete, first.Problems)
	}
	if again := r.read(nil); again != nil {
		t.Error("nothing changed, and there are Objects")
	}
	edit(t, dir, 7, "2")
	second := r.read(nil)
	if second == nil {
		t.Fatal("a change is not seen")
	}
	for name, pod := range second.Pods {
		if edited := name.Name == "pod-7"; (pod != first.Pods[name]) != edited || (pod.Labels["version"] == "2") != edited {
			t.Errorf("%s: the same object %t, version %s", name, pod == first.Pods[name], pod.Labels["version"])
		}
	}
	// A file that is written again with what it had is no change.
	edit(t, dir, 8, "1")
	if again := r.read(nil); again != nil {
		t.Error("a file was written as it was, and there are Objects")
	}
}

// TestRereadAtOnce: two changes within one timestamp, and of one size, are two.
func TestRereadAtOnce(t *testing.T) {
	dir := t.TempDir()
	r := reader{dir: dir}
	id := types.NamespacedName{Namespace: "default", Name: "pod-0"}
	for i := range 50 {
		want := fmt.Sprint(i % 10)
		edit(t, dir, 0, want)
		if o := r.read(nil); o == nil || o.Pods[id].Labels["version"] != want {
			t.Fatalf("version %s is not seen", want)
		}
	}
}

// BenchmarkReread is a look at 1000 files of which none, one or all changed.
func BenchmarkReread(b *testing.B) {
	const n = 1000
	for name, changes := range map[string]int{"none": 0, "one": 1, "all": n} {
		b.Run(name, func(b *testing.B) {
			dir := manyFiles(b, n)
			r := reader{dir: dir}
			r.read(nil)
			b.ResetTimer()
			for i := range b.N {
				b.StopTimer()
				for c := range changes {
					edit(b, dir, c, fmt.Sprint("again", i))
				}
				b.StartTimer()
				if o := r.read(nil); (o == nil) != (changes == 0) {
					b.Fatal(o)
				}
			}
		})
	}
}

// look writes files (empty: removes), reads the directory, and returns the pods, each as
// name=uid.
func look(t *testing.T, r *reader, files ...string) (pods []string, o *Objects) {
	t.Helper()
	for i := 0; i < len(files); i += 2 {
		name := filepath.Join(r.dir, files[i])
		if files[i+1] == "" {
			if err := os.Remove(name); err != nil {
				t.Fatal(err)
			}
		} else if err := os.WriteFile(name, []byte(files[i+1]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if o = r.read(nil); o == nil {
		t.Fatal("nothing changed")
	}
	for name, pod := range o.Pods {
		pods = append(pods, name.Name+"="+string(pod.UID))
	}
	slices.Sort(pods)
	return pods, o
}

func uidPod(kind, name, uid string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: %s\nmetadata: {name: %s, uid: %q}\nspec: {containers: [{name: app}]}\n", kind, name, uid)
}

// TestMissed: what is in no file any more counts for a while, unless another has its UID.
func TestMissed(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	look(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	if pods, _ := look(t, r, "a.yaml", ""); !slices.Equal(pods, []string{"one=1", "two=2"}) || !r.unsettled() {
		t.Errorf("a file is gone: %v", pods)
	}
	if o := r.read(nil); o != nil {
		t.Errorf("it is gone still: %v", o.Pods)
	}
	for k := range r.missed {
		r.missed[k] = r.missed[k].Add(-patience)
	}
	if pods, _ := look(t, r); !slices.Equal(pods, []string{"two=2"}) || r.unsettled() {
		t.Errorf("it is gone for long: %v", pods)
	}
	if pods, _ := look(t, r, "b.yaml", uidPod("Pod", "three", "2")); !slices.Equal(pods, []string{"three=2"}) {
		t.Errorf("another name: %v", pods)
	}
}

// TestCopied: a copy of a manifest that is being edited takes nothing from it.
func TestCopied(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	look(t, r, "b.yaml", uidPod("Pod", "one", "1"), "c.yaml", uidPod("Pod", "two", "2"))
	for what, text := range map[string]string{"name": uidPod("Pod", "one", "3"), "uid": uidPod("Pod", "other", "1")} {
		if pods, o := look(t, r, "a.yaml", text); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") {
			t.Errorf("a copy with the same %s: %v, %v", what, pods, o.Problems)
		}
	}
	if pods, o := look(t, r, "a.yaml", "", "b.yaml", uidPod("Pod", "one", "2")); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 {
		t.Errorf("another's uid: %v, %v", pods, o.Problems)
	}
}

// TestMistypedKind: an object whose kind is mistyped stays as it was, in its file and in
// another; a kind that exists is no mistake.
func TestMistypedKind(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	look(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	for _, files := range [][]string{
		{"a.yaml", uidPod("Pood", "one", "1")},
		{"a.yaml", "", "c.yaml", uidPod("Pood", "one", "1")},
		{"c.yaml", uidPod("PodList", "one", "1")},
	} {
		for range 2 { // as long as it takes
			pods, o := look(t, r, files...)
			if !slices.Equal(pods, []string{"one=1", "two=2"}) || !o.Complete || len(o.Problems) != 2 || r.unsettled() {
				t.Errorf("%v: %v, complete %t, %v", files, pods, o.Complete, o.Problems)
			}
			files = []string{"b.yaml", uidPod("Pod", "two", "2") + "# again\n"}
		}
		look(t, r, "b.yaml", uidPod("Pod", "two", "2"))
	}
	if _, o := look(t, r, "c.yaml", uidPod("Pod", "one", "1")+uidPod("Service", "one", "4")); len(o.Problems) != 1 || r.files["c.yaml"].problem != "" {
		t.Errorf("a Service of its name: %v", o.Problems)
	}
	if pods, o := look(t, r, "c.yaml", uidPod("Service", "one", "4")); !slices.Equal(pods, []string{"one=1", "two=2"}) || !strings.Contains(o.Problems[0].Message, "has become a Service") {
		t.Errorf("a Service in its place: %v, %v", pods, o.Problems)
	}
}

// TestMistypedAtStart: what had a mistyped kind when the manager was started may have
// been anything; what has one that there is, or may be, is none of those that are read.
func TestMistypedAtStart(t *testing.T) {
	const object = "apiVersion: %s\nkind: %s\nmetadata: {name: data}\n"
	for _, kind := range [][2]string{
		{"v1", "PersistentVolumeClam"},
		{"v1", "pod"},
		{"v1", "PersistentVolumeClaimList"},
		{"", "Deployment"},
		{"storage.k8s.io/v1beta1", "StorageClas"},
		{"snapshot.storage.k8s.io/v1", "VolumeSnapshots"},
	} {
		r := &reader{dir: t.TempDir()}
		_, o := look(t, r, "a.yaml", fmt.Sprintf(object, kind[0], kind[1]))
		if o.Complete || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") || !strings.Contains(o.Problems[0].Message, "until it is mended, nothing is taken down or deleted") {
			t.Errorf("%s: complete %t, %v", kind, o.Complete, o.Problems)
		}
		if _, o := look(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || len(o.Problems) != 0 {
			t.Errorf("%s is mended: complete %t, %v", kind, o.Complete, o.Problems)
		}
	}
	for _, kind := range [][2]string{
		{"v1", "Service"},
		{"apps/v1", "Deployment"},
		{"example.com/v1", "Anything"},
		{"storage.k8s.io/v1beta1", "VolumeAttributesClass"},
		{"snapshot.storage.k8s.io/v1", "VolumeSnapshotClass"},
	} {
		r := &reader{dir: t.TempDir()}
		if _, o := look(t, r, "a.yaml", fmt.Sprintf(object, kind[0], kind[1])); !o.Complete || len(o.Problems) != 1 {
			t.Errorf("%s: complete %t, %v", kind, o.Complete, o.Problems)
		}
	}
}

// TestNotMounted: a directory in which nothing is mounted, yet or any more, says nothing.
func TestNotMounted(t *testing.T) {
	testenv.RequireRoot(t)
	r := &reader{dir: t.TempDir()}
	if _, o := look(t, r); o.Complete || len(o.Problems) != 1 {
		t.Errorf("no manifests: complete %t, %v", o.Complete, o.Problems)
	}
	memory, err := mount.Memory("manifests", mount.MemoryFor(1<<20), mount.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(memory.MoveTo(r.dir), memory.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mount.Unmount(r.dir) })
	if pods, o := look(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || !slices.Equal(pods, []string{"one=1"}) {
		t.Errorf("mounted: complete %t, %v", o.Complete, pods)
	}
	if err := mount.Unmount(r.dir); err != nil {
		t.Fatal(err)
	}
	if pods, o := look(t, r); !o.Complete || !slices.Equal(pods, []string{"one=1"}) || len(o.Problems) != 1 || len(r.missed) != 0 {
		t.Errorf("mounted no more: %v, %v", pods, o.Problems)
	}
}
