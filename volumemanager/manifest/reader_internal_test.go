package manifest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
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
