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

// manyFiles creates n files of one pod with four volumes each, and waits until they have stamps.
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
			tb.Fatal("the last file still has a zero stamp")
		}
	}
}

// edit writes the file of pod i.
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
		t.Fatalf("first read: got %d pods, complete %t, problems %v; want %d pods, complete, no problems", len(first.Pods), first.Complete, first.Problems, n)
	}
	if again := r.read(nil); again != nil {
		t.Error("read returned Objects although nothing had changed")
	}
	edit(t, dir, 7, "2")
	second := r.read(nil)
	if second == nil {
		t.Fatal("read returned nil after a file had changed")
	}
	for name, pod := range second.Pods {
		if edited := name.Name == "pod-7"; (pod != first.Pods[name]) != edited || (pod.Labels["version"] == "2") != edited {
			t.Errorf("%s: got version %s, decoded again %t; want the new version only of pod-7, and only pod-7 decoded again", name, pod.Labels["version"], pod != first.Pods[name])
		}
	}
	// Writing the same content again is no change.
	edit(t, dir, 8, "1")
	if again := r.read(nil); again != nil {
		t.Error("read returned Objects although the content had not changed")
	}
}

// TestRereadAtOnce: a change is noticed even if the file keeps its size and its timestamps.
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

// BenchmarkReread measures a read of 1000 files of which none, one or all have changed.
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
					b.Fatalf("read returned Objects: got %t, want %t", o != nil, changes > 0)
				}
			}
		})
	}
}

// reread writes files, given as alternating names and texts, and removes those with an empty text. It
// reads the directory and returns the pods, each as name=uid.
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
		t.Fatal("read returned nil, want Objects")
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

// uidPod returns a YAML document with a pod, or with the same object of another kind.
func uidPod(kind, name, uid string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: %s\nmetadata: {name: %s, uid: %q}\nspec: {containers: [{name: app}]}\n", kind, name, uid)
}

// TestMissing: a missing object applies for maxWait, unless another object has its UID.
func TestMissing(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	if pods, _ := reread(t, r, "a.yaml", ""); !slices.Equal(pods, []string{"one=1", "two=2"}) || !r.unsettled() {
		t.Errorf("after the removal of a.yaml: got pods %v, unsettled %t; want both pods, true", pods, r.unsettled())
	}
	if o := r.read(nil); o != nil {
		t.Errorf("without a change: got pods %v, want nil", o.Pods)
	}
	for k := range r.missing {
		r.missing[k] = r.missing[k].Add(-maxWait)
	}
	if pods, _ := reread(t, r); !slices.Equal(pods, []string{"two=2"}) || r.unsettled() {
		t.Errorf("after maxWait: got pods %v, unsettled %t; want only two=2, false", pods, r.unsettled())
	}
	if pods, _ := reread(t, r, "b.yaml", uidPod("Pod", "three", "2")); !slices.Equal(pods, []string{"three=2"}) {
		t.Errorf("another pod with the UID of two: got pods %v, want only three=2", pods)
	}
}

// TestCopied: an object that was read before takes precedence over an object with the same name or UID in
// another file.
func TestCopied(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "b.yaml", uidPod("Pod", "one", "1"), "c.yaml", uidPod("Pod", "two", "2"))
	for what, text := range map[string]string{"name": uidPod("Pod", "one", "3"), "uid": uidPod("Pod", "other", "1")} {
		if pods, o := reread(t, r, "a.yaml", text); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") {
			t.Errorf("a copy with the same %s: got pods %v, problems %v; want the pods unchanged and a problem of a.yaml", what, pods, o.Problems)
		}
	}
	if pods, o := reread(t, r, "a.yaml", "", "b.yaml", uidPod("Pod", "one", "2")); !slices.Equal(pods, []string{"one=1", "two=2"}) || len(o.Problems) != 1 {
		t.Errorf("after an edit to the UID of another pod: got pods %v, problems %v; want the pods unchanged and one problem", pods, o.Problems)
	}
}

// TestMistypedKind: if the kind of an object is mistyped, in its file or in another file, the last
// valid version of the object applies. An unsupported kind that exists is not mistyped.
func TestMistypedKind(t *testing.T) {
	r := &reader{dir: t.TempDir()}
	reread(t, r, "a.yaml", uidPod("Pod", "one", "1"), "b.yaml", uidPod("Pod", "two", "2"))
	for _, files := range [][]string{
		{"a.yaml", uidPod("Pood", "one", "1")},
		{"a.yaml", "", "c.yaml", uidPod("Pood", "one", "1")},
		{"c.yaml", uidPod("PodList", "one", "1")},
	} {
		for range 2 { // the second read must not change the result
			pods, o := reread(t, r, files...)
			if !slices.Equal(pods, []string{"one=1", "two=2"}) || !o.Complete || len(o.Problems) != 2 || r.unsettled() {
				t.Errorf("%v: got pods %v, complete %t, unsettled %t, problems %v; want both pods, complete, settled, two problems", files, pods, o.Complete, r.unsettled(), o.Problems)
			}
			files = []string{"b.yaml", uidPod("Pod", "two", "2") + "# again\n"}
		}
		reread(t, r, "b.yaml", uidPod("Pod", "two", "2"))
	}
	if _, o := reread(t, r, "c.yaml", uidPod("Pod", "one", "1")+uidPod("Service", "one", "4")); len(o.Problems) != 1 || r.files["c.yaml"].problem != "" {
		t.Errorf("a Service with the name of the pod, beside the pod: got problems %v, want one of the object and none of the file", o.Problems)
	}
	if pods, o := reread(t, r, "c.yaml", uidPod("Service", "one", "4")); !slices.Equal(pods, []string{"one=1", "two=2"}) || !strings.Contains(o.Problems[0].Message, "has become a Service") {
		t.Errorf("a Service with the name of the pod, in place of the pod: got pods %v, problems %v; want both pods and a problem", pods, o.Problems)
	}
}

// TestMistypedAtStart: while an object in the first files has a mistyped kind, Objects are incomplete.
// An unsupported kind that exists, or may exist, does not make them incomplete.
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
		if o.Complete || len(o.Problems) != 1 || o.Problems[0].File != filepath.Join(r.dir, "a.yaml") || !strings.Contains(o.Problems[0].Message, "until this is fixed, nothing is unmounted or deleted") {
			t.Errorf("%s: got complete %t, problems %v; want incomplete, one problem of a.yaml", kind, o.Complete, o.Problems)
		}
		if _, o := reread(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || len(o.Problems) != 0 {
			t.Errorf("%s after the fix: got complete %t, problems %v; want complete, no problems", kind, o.Complete, o.Problems)
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
			t.Errorf("%s: got complete %t, problems %v; want complete, one problem", kind, o.Complete, o.Problems)
		}
	}
}

// TestNotMounted: the objects stay while the filesystem that contains the directory is unmounted.
func TestNotMounted(t *testing.T) {
	testenv.RequireRoot(t)
	r := &reader{dir: t.TempDir()}
	if _, o := reread(t, r); o.Complete || len(o.Problems) != 1 {
		t.Errorf("before the mount: got complete %t, problems %v; want incomplete, one problem", o.Complete, o.Problems)
	}
	memory, err := mount.Memory("manifests", mount.MemoryFor(1<<20), mount.Options{})
	must(t, err)
	must(t, errors.Join(memory.MoveTo(r.dir), memory.Close()))
	t.Cleanup(func() { _ = mount.Unmount(r.dir) })
	if pods, o := reread(t, r, "a.yaml", uidPod("Pod", "one", "1")); !o.Complete || !slices.Equal(pods, []string{"one=1"}) {
		t.Errorf("while mounted: got complete %t, pods %v; want complete, one=1", o.Complete, pods)
	}
	must(t, mount.Unmount(r.dir))
	if pods, o := reread(t, r); !o.Complete || !slices.Equal(pods, []string{"one=1"}) || len(o.Problems) != 1 || len(r.missing) != 0 {
		t.Errorf("after the unmount: got complete %t, pods %v, missing %v, problems %v; want complete, one=1, nothing missing, one problem", o.Complete, pods, r.missing, o.Problems)
	}
}
