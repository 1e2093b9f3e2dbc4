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

// manyFiles creates files of one pod each, with four volumes, that are old enough to have stamps.
func manyFiles(tb testing.TB, n int) (dir string) {
	tb.Helper()
	dir = tb.TempDir()
	for i := range n {
		edit(tb, dir, i, "1")
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		info, err := os.Stat(filepath.Join(dir, fmt.Sprintf("%d.yaml", n-1)))
		must(tb, err)
		if stampOf(info) != (stamp{}) {
			return dir
		}
		if time.Now().After(deadline) {
			tb.Fatal("the last file has no stamp")
		}
	}
}

func edit(tb testing.TB, dir string, i int, version string) {
	tb.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: pod-%d, labels: {version: %q}}\nspec:\n  containers: [{name: app}]\n  volumes:\n", i, version)
	for v := range 4 {
		text += fmt.Sprintf("  - name: v%d\n    emptyDir: {sizeLimit: 1Gi}\n", v)
	}
	must(tb, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600))
}

// TestReread: only changed files are decoded again.
func TestReread(t *testing.T) {
	const n = 1000
	dir := manyFiles(t, n)
	r := reader{dir: dir}
	first := r.read(nil)
	if len(first.Pods) != n || !first.Complete || len(first.Problems) > 0 {
		t.Fatalf("%d pods, complete %t, %v", len(first.Pods), first.Complete, first.Problems)
	}
	if again := r.read(nil); again != nil {
		t.Error("Objects without a change")
	}
	edit(t, dir, 7, "2")
	second := r.read(nil)
	if second == nil {
		t.Fatal("no Objects after a change")
	}
	for name, pod := range second.Pods {
		if edited := name.Name == "pod-7"; (pod != first.Pods[name]) != edited || (pod.Labels["version"] == "2") != edited {
			t.Errorf("%s: the same object %t, version %s", name, pod == first.Pods[name], pod.Labels["version"])
		}
	}
	// Writing the same content again is no change.
	edit(t, dir, 8, "1")
	if again := r.read(nil); again != nil {
		t.Error("Objects after the same content was written")
	}
}

// TestRereadAtOnce: changes within one timestamp and of the same size are noticed.
func TestRereadAtOnce(t *testing.T) {
	dir := t.TempDir()
	r := reader{dir: dir}
	id := types.NamespacedName{Namespace: "default", Name: "pod-0"}
	for i := range 50 {
		want := fmt.Sprint(i % 10)
		edit(t, dir, 0, want)
		if o := r.read(nil); o == nil || o.Pods[id].Labels["version"] != want {
			t.Fatalf("version %s was not read", want)
		}
	}
}

// BenchmarkReread measures a read of 1000 files after none, one or all have changed.
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

// reread writes files, removes those with an empty text, reads the directory, and returns the pods,
// each as name=uid.
func reread(t *testing.T, r *reader, files ...string) (pods []string, o *Objects) {
	t.Helper()
	for i := 0; i < len(files); i += 2 {
		name := filepath.Join(r.dir, files[i])
		if files[i+1] == "" {
			must(t, os.Remove(name))
		} else {
			must(t, os.WriteFile(name, []byte(files[i+1]), 0o600))
		}
	}
	if o = r.read(nil); o == nil {
		t.Fatal("no Objects")
	}
	for name, pod := range o.Pods {
		pods = append(pods, name.Name+"="+string(pod.UID))
	}
	slices.Sort(pods)
	return pods, o
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func uidPod(kind, name, uid string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: %s\nmetadata: {name: %s, uid: %q}\nspec: {containers: [{name: app}]}\n", kind, name, uid)
}

// TestMissing: a missing object stays for patience, unless another has its UID.
func TestMissing(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	if pods, _ := reread(t, r, "a.yaml", ""); !slices.Equal(pods, []string{"one=1", "two=2"}) || !r.unsettled() {
		t.Errorf("after a removal: %v", pods)
	}
	if o := r.read(nil); o != nil {
		t.Errorf("without a change: %v", o.Pods)
	}
	for k := range r.missing {
		r.missing[k] = r.missing[k].Add(-patience)
	}
	if pods, _ := reread(t, r); !slices.Equal(pods, []string{"two=2"}) || r.unsettled() {
		t.Errorf("after patience: %v", pods)
	}
	if pods, _ := reread(t, r, "b.yaml", uidPod("Pod", "three", "2")); !slices.Equal(pods, []string{"three=2"}) {
		t.Errorf("another name: %v", pods)
	}
}

// TestCopied: a known object takes precedence over a copy of its manifest.
func TestCopied(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "b.yaml", uidPod("Pod", "one", "1"), "c.yaml", uidPod("Pod", "two", "2"))
	for what, text := range map[string]string{"name": uidPod("Pod", "one", "3"), "uid": uidPod("Pod", "other", "1")} {
		if pods, o := reread(t, r, "a.yaml", text); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") {
			t.Errorf("a copy with the same %s: %v, %v", what, pods, o.Problems)
		}
	}
	if pods, o := reread(t, r, "a.yaml", "", "b.yaml", uidPod("Pod", "one", "2")); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 {
		t.Errorf("UID of another pod: %v, %v", pods, o.Problems)
	}
}

// TestMistypedKind: the last valid version of an object with a mistyped kind stays, in its file or in
// another. An unsupported kind that exists is no mistake.
func TestMistypedKind(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	for _, files := range [][]string{
		{"a.yaml", uidPod("Pood", "one", "1")},
		{"a.yaml", "", "c.yaml", uidPod("Pood", "one", "1")},
		{"c.yaml", uidPod("PodList", "one", "1")},
	} {
		for range 2 { // it stays at the next read too
			pods, o := reread(t, r, files...)
			if !slices.Equal(pods, []string{"one=1", "two=2"}) || !o.Complete || len(o.Problems) != 2 || r.unsettled() {
				t.Errorf("%v: %v, complete %t, %v", files, pods, o.Complete, o.Problems)
			}
			files = []string{"b.yaml", uidPod("Pod", "two", "2") + "# again\n"}
		}
		reread(t, r, "b.yaml", uidPod("Pod", "two", "2"))
	}
	if _, o := reread(t, r, "c.yaml", uidPod("Pod", "one", "1")+uidPod("Service", "one", "4")); len(o.Problems) != 1 || r.files["c.yaml"].problem != "" {
		t.Errorf("a Service of its name: %v", o.Problems)
	}
	if pods, o := reread(t, r, "c.yaml", uidPod("Service", "one", "4")); !slices.Equal(pods, []string{"one=1", "two=2"}) || !strings.Contains(o.Problems[0].Message, "has become a Service") {
		t.Errorf("a Service in its place: %v, %v", pods, o.Problems)
	}
}

// TestMistypedAtStart: Objects are incomplete while an object of the start has a mistyped kind. An
// unsupported kind that exists, or may exist, does not matter.
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
		_, o := reread(t, r, "a.yaml", fmt.Sprintf(object, kind[0], kind[1]))
		if o.Complete || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") || !strings.Contains(o.Problems[0].Message, "until it is fixed, nothing is unmounted or deleted") {
			t.Errorf("%s: complete %t, %v", kind, o.Complete, o.Problems)
		}
		if _, o := reread(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || len(o.Problems) != 0 {
			t.Errorf("%s fixed: complete %t, %v", kind, o.Complete, o.Problems)
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
		if _, o := reread(t, r, "a.yaml", fmt.Sprintf(object, kind[0], kind[1])); !o.Complete || len(o.Problems) != 1 {
			t.Errorf("%s: complete %t, %v", kind, o.Complete, o.Problems)
		}
	}
}

// TestNotMounted: objects are not removed while the filesystem of the directory is not mounted.
func TestNotMounted(t *testing.T) {
	testenv.RequireRoot(t)
	r := &reader{dir: t.TempDir()}
	if _, o := reread(t, r); o.Complete || len(o.Problems) != 1 {
		t.Errorf("no manifests: complete %t, %v", o.Complete, o.Problems)
	}
	memory, err := mount.Memory("manifests", mount.MemoryFor(1<<20), mount.Options{})
	must(t, err)
	must(t, errors.Join(memory.MoveTo(r.dir), memory.Close()))
	t.Cleanup(func() { _ = mount.Unmount(r.dir) })
	if pods, o := reread(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || !slices.Equal(pods, []string{"one=1"}) {
		t.Errorf("mounted: complete %t, %v", o.Complete, pods)
	}
	must(t, mount.Unmount(r.dir))
	if pods, o := reread(t, r); !o.Complete || !slices.Equal(pods, []string{"one=1"}) || len(o.Problems) != 1 || len(r.missing) != 0 {
		t.Errorf("unmounted: %v, %v", pods, o.Problems)
	}
}
