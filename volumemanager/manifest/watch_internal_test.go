package manifest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// pod is the manifest of a pod, formatted with its name and the value of its label version.
const pod = `apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {version: %q}}
spec:
  containers: [{name: app, volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, emptyDir: {}}]
`

// podDocument returns a YAML document with a pod, whose label version tells versions of the pod apart.
func podDocument(name, version string) string { return "---\n" + fmt.Sprintf(pod, name, version) }

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

// replace renames a new file over the file at path, as editors do.
func replace(t *testing.T, path, text string) {
	t.Helper()
	write(t, path+"~", text)
	must(t, os.Rename(path+"~", path))
}

// watched receives the Objects of a directory.
type watched struct {
	t    *testing.T
	ch   <-chan *Objects
	last *Objects
}

// watch watches a directory until the test ends, without a resync.
func watch(t *testing.T, dir string) *watched { return watchWithResync(t, dir, time.Hour) }

func watchWithResync(t *testing.T, dir string, resync time.Duration) *watched {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ch, err := Watch(ctx, dir, resync)
	must(t, err)
	t.Cleanup(func() {
		cancel()
		for range ch { // until Watch closes the channel
		}
	})
	return &watched{t: t, ch: ch}
}

// until waits for Objects that satisfy a condition.
func (w *watched) until(what string, condition func(o *Objects) bool) *Objects {
	w.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case w.last = <-w.ch:
			if condition(w.last) {
				return w.last
			}
		case <-deadline:
			w.t.Fatalf("%s: the expected Objects were not received; the last Objects: %s", what, describe(w.last))
		}
	}
}

func describe(o *Objects) string {
	if o == nil {
		return "none"
	}
	return fmt.Sprintf("complete %t, pods %v, problems %v", o.Complete, versions(o), o.Problems)
}

// versions returns the pods, sorted, each as name=version.
func versions(o *Objects) (all []string) {
	for name, pod := range o.Pods {
		all = append(all, name.Name+"="+pod.Labels["version"])
	}
	slices.Sort(all)
	return all
}

// has returns a condition: Objects are complete, have these pods, and have no problems.
func has(pods ...string) func(*Objects) bool {
	return func(o *Objects) bool {
		return o.Complete && slices.Equal(versions(o), pods) && len(o.Problems) == 0
	}
}

// hasProblem returns a condition: Objects are complete or incomplete as given, have these pods, and have
// one problem, which contains words.
func hasProblem(complete bool, words string, pods ...string) func(*Objects) bool {
	return func(o *Objects) bool {
		return o.Complete == complete && slices.Equal(versions(o), pods) && len(o.Problems) == 1 &&
			strings.Contains(fmt.Sprint(o.Problems[0]), words)
	}
}

// TestWatchChanges: new, changed and removed files are noticed. Objects that were sent do not change.
func TestWatchChanges(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, podDocument("one", "1")+podDocument("two", "1"))
	w := watch(t, dir)
	first := w.until("the first read", has("one=1", "two=1"))

	replace(t, a, podDocument("one", "2")+podDocument("two", "1"))
	second := w.until("an edit", has("one=2", "two=1"))
	if got := versions(first); !slices.Equal(got, []string{"one=1", "two=1"}) {
		t.Errorf("pods of the first Objects after the edit: got %v, want one=1 and two=1 as before", got)
	}
	id := types.NamespacedName{Namespace: "default", Name: "one"}
	if before, after := first.Pods[id].UID, second.Pods[id].UID; before != after || before == "" {
		t.Errorf("UID after the edit: got %q, want %q", after, before)
	}
	write(t, a, podDocument("one", "3"))
	w.until("a write to the existing file", has("one=3"))
	write(t, filepath.Join(dir, "b.json"), `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "three", "labels": {"version": "1"}}, "spec": {"containers": [{"name": "app"}]}}`)
	w.until("another file", has("one=3", "three=1"))
	must(t, os.Remove(a))
	w.until("a removed file", has("three=1"))
}

// TestWatchInvalidFile: the last valid version of an invalid file applies.
func TestWatchInvalidFile(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	text := podDocument("one", "2") + podDocument("two", "2")
	write(t, a, podDocument("one", "1")+podDocument("two", "1"))
	write(t, filepath.Join(dir, "b.yaml"), podDocument("other", "1"))
	w := watch(t, dir)
	w.until("the first read", has("one=1", "other=1", "two=1"))
	write(t, a, text[:len(text)-20])
	w.until("an incomplete file", hasProblem(true, "document 2", "one=1", "other=1", "two=1"))
	write(t, a, text)
	w.until("the complete file", has("one=2", "other=1", "two=2"))
	write(t, a, "")
	w.until("an empty file", hasProblem(true, "the file is empty", "one=2", "other=1", "two=2"))
	write(t, a, "# nothing\n")
	w.until("a file with only a comment", hasProblem(true, "the file has no objects", "one=2", "other=1", "two=2"))
	w.until("the second read of the file with only a comment", has("other=1"))
	write(t, a, podDocument("one", "3")+"unknown: true\n")
	w.until("an invalid file that had no objects", hasProblem(true, "unknown field", "other=1"))
	write(t, a, podDocument("one", "3"))
	w.until("a fixed file", has("one=3", "other=1"))
}

// TestWatchInvalidAtStart: while one of the first files or objects is invalid, Objects are incomplete.
func TestWatchInvalidAtStart(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, "kind: Pod\nmetadata: [")
	write(t, filepath.Join(dir, "b.yaml"), podDocument("other", "1"))
	w := watch(t, dir)
	w.until("an invalid file", hasProblem(false, "nothing is unmounted", "other=1"))
	write(t, a, podDocument("Not_A_Name", "1"))
	w.until("an invalid object", hasProblem(false, "metadata.name", "other=1"))
	write(t, a, podDocument("one", "1"))
	w.until("a valid object", has("one=1", "other=1"))
	write(t, a, podDocument("Not_A_Name", "1"))
	w.until("an invalid object later", hasProblem(true, "the object is ignored", "other=1"))
	write(t, a, "kind: Service\napiVersion: v1\nmetadata: {name: one}\n")
	w.until("an unsupported kind", hasProblem(true, "PersistentVolumeClaim", "other=1"))
}

// TestWatchInvalidObject: the last valid version of an invalid object applies, also after the file is
// renamed. Changes of other objects in the file apply.
func TestWatchInvalidObject(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, podDocument("one", "1")+podDocument("two", "1"))
	w := watch(t, dir)
	w.until("the first read", has("one=1", "two=1"))
	bad := strings.Replace(podDocument("one", "2"), "name: data, emptyDir: {}", "name: data", 1)
	replace(t, a, bad+podDocument("two", "2"))
	w.until("a volume without a source", hasProblem(true, "spec.volumes[0]", "one=1", "two=2"))
	must(t, os.Rename(a, filepath.Join(dir, "b.yaml")))
	w.until("the renamed file", hasProblem(true, "b.yaml", "one=1", "two=2"))
	must(t, os.Remove(filepath.Join(dir, "b.yaml")))
	w.until("the removed file", has())
}

const immutableObjects = `apiVersion: v1
kind: ConfigMap
metadata: {name: web}
data: {port: %q}
immutable: %t
---
apiVersion: v1
kind: Secret
metadata: {name: tls}
stringData: {key: %q}
immutable: %t
`

// hasValues returns a condition: the ConfigMap has the port, the Secret has the key, and there are
// this many problems, each of which contains words.
func hasValues(port, key string, problems int, words string) func(*Objects) bool {
	return func(o *Objects) bool {
		web, tls := types.NamespacedName{Namespace: "default", Name: "web"}, types.NamespacedName{Namespace: "default", Name: "tls"}
		for _, p := range o.Problems {
			if !strings.Contains(p.Message, words) {
				return false
			}
		}
		return len(o.Problems) == problems && o.Complete && o.ConfigMaps[web] != nil && o.ConfigMaps[web].Data["port"] == port &&
			o.Secrets[tls] != nil && string(o.Secrets[tls].Data["key"]) == key
	}
}

// TestWatchImmutable: neither the data of an immutable object nor its field immutable can change. The
// object can be removed and added again with other data.
func TestWatchImmutable(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	put := func(port, key string, immutable bool) {
		replace(t, file, fmt.Sprintf(immutableObjects, port, immutable, key, immutable))
	}
	put("80", "k", false)
	w := watch(t, dir)
	w.until("the first read", hasValues("80", "k", 0, ""))
	put("81", "l", false)
	w.until("an edit", hasValues("81", "l", 0, ""))
	put("82", "m", true)
	w.until("an edit that makes them immutable", hasValues("82", "m", 0, ""))
	put("83", "n", true)
	w.until("an edit of the data", hasValues("82", "m", 2, "immutable"))
	put("82", "m", false)
	w.until("an edit that makes them mutable", hasValues("82", "m", 2, "immutable"))
	replace(t, file, strings.Replace(fmt.Sprintf(immutableObjects, "82", true, "m", true), "name: web", "name: web, labels: {a: b}", 1))
	w.until("an edit of labels", func(o *Objects) bool {
		return hasValues("82", "m", 0, "")(o) && o.ConfigMaps[types.NamespacedName{Namespace: "default", Name: "web"}].Labels["a"] == "b"
	})
	replace(t, file, podDocument("one", "1"))
	w.until("a removal", func(o *Objects) bool { return len(o.ConfigMaps)+len(o.Secrets) == 0 })
	put("90", "z", true)
	w.until("new objects", hasValues("90", "z", 0, ""))
}

// TestWatchMissingParent: a directory that is created after the start is read, also if its parent did not exist.
func TestWatchMissingParent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etc", "manifests")
	w := watch(t, dir)
	w.until("no parent", hasProblem(false, "cannot be read"))
	must(t, os.MkdirAll(dir, 0o700))
	write(t, filepath.Join(dir, "a.yaml"), podDocument("one", "1"))
	w.until("a directory", has("one=1"))
	write(t, filepath.Join(dir, "b.yaml"), podDocument("two", "1"))
	w.until("a change", has("one=1", "two=1"))
}

// TestWatchDirectory: the directory can be created, removed, and replaced with another directory or a
// link. While it is missing, its last content applies.
func TestWatchDirectory(t *testing.T) {
	above := t.TempDir()
	dir := filepath.Join(above, "manifests")
	w := watch(t, dir)
	w.until("no directory", hasProblem(false, "cannot be read"))
	fill := func(to, pod string) {
		t.Helper()
		must(t, os.Mkdir(to, 0o700))
		write(t, filepath.Join(to, "a.yaml"), podDocument(pod, "1"))
	}
	fill(dir, "one")
	w.until("a directory", has("one=1"))
	must(t, os.Rename(dir, dir+".old"))
	w.until("a removed directory", hasProblem(true, "cannot be read", "one=1"))
	fill(dir+".new", "two")
	must(t, os.Rename(dir+".new", dir))
	w.until("another directory", has("two=1"))
	write(t, filepath.Join(dir, "b.yaml"), podDocument("three", "1"))
	w.until("a change in the other directory", has("three=1", "two=1"))
	must(t, os.RemoveAll(dir))
	must(t, os.Symlink(dir+".old", dir))
	w.until("a link to the first directory", has("one=1"))
	write(t, filepath.Join(dir, "c.yaml"), podDocument("four", "1"))
	w.until("a change of the link's target", has("four=1", "one=1"))
}

// TestWatchDataLink: a change of a mounted ConfigMap, which is one rename of the link ..data, is noticed.
func TestWatchDataLink(t *testing.T) {
	dir := t.TempDir()
	version := func(n string) {
		t.Helper()
		must(t, os.Mkdir(filepath.Join(dir, "..v"+n), 0o700))
		write(t, filepath.Join(dir, "..v"+n, "a.yaml"), podDocument("one", n))
		must(t, os.Symlink("..v"+n, filepath.Join(dir, "..tmp")))
		must(t, os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")))
	}
	version("1")
	must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")))
	w := watch(t, dir)
	w.until("the first read", has("one=1"))
	version("2")
	w.until("the rename", has("one=2"))
}

// TestWatchResync: a change in a subdirectory causes no event and is read after the resync period.
func TestWatchResync(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "below"), 0o700))
	a := filepath.Join(dir, "below", "a.yaml")
	write(t, a, podDocument("one", "1"))
	must(t, os.Symlink("below/a.yaml", filepath.Join(dir, "a.yaml")))
	w := watchWithResync(t, dir, 50*time.Millisecond)
	w.until("the first read", has("one=1"))
	write(t, a, podDocument("one", "2"))
	w.until("a change of a link's target", has("one=2"))
}

// TestWatchWithoutInotify: without an inotify instance, changes are noticed by polling.
func TestWatchWithoutInotify(t *testing.T) {
	testenv.RequireRoot(t)
	const inside, limit = "TRIVET_TEST_WITHOUT_INOTIFY", "/proc/sys/user/max_inotify_instances"
	if os.Getenv(inside) == "" {
		// Each user namespace has its own limit (namespaces(7)).
		again := exec.Command("/proc/self/exe", "-test.run=^TestWatchWithoutInotify$")
		again.Env = append(os.Environ(), inside+"=1")
		ids := []syscall.SysProcIDMap{{Size: 1}}
		again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
		if out, err := again.CombinedOutput(); err != nil {
			t.Errorf("the test in a user namespace: got %v, want no error; output:\n%s", err, out)
		}
		return
	}
	write(t, limit, "0")
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, podDocument("one", "1"))
	w := watch(t, dir)
	w.until("the first read", hasProblem(true, "fs.inotify.max_user_instances", "one=1"))
	write(t, a, podDocument("one", "2"))
	w.until("a change", hasProblem(true, "fs.inotify.max_user_instances", "one=2"))
	write(t, limit, "1")
	w.until("a raised limit", has("one=2"))
	write(t, a, podDocument("one", "3"))
	w.until("a change with an event", has("one=3"))
}

// TestWatchSlowReader: a slow receiver gets the latest Objects.
func TestWatchSlowReader(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, podDocument("one", "0"))
	slow, quick := watch(t, dir), watch(t, dir)
	quick.until("the first", has("one=0"))
	for i := 1; i <= 3; i++ {
		replace(t, a, podDocument("one", fmt.Sprint(i)))
		quick.until("an edit", has(fmt.Sprintf("one=%d", i)))
	}
	var before string
	for {
		o := slow.until("any complete Objects", func(o *Objects) bool { return o.Complete })
		if now := versions(o)[0]; now < before {
			t.Fatalf("the receiver got %s after %s, want no earlier version", now, before)
		} else if before = now; now == "one=3" {
			return
		}
	}
}

// TestWatchNotManifests: files that are not manifests do not block the reader, and links out of the
// directory are not followed.
func TestWatchNotManifests(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write(t, filepath.Join(outside, "out.yaml"), podDocument("outside", "1"))
	write(t, filepath.Join(dir, "good.yaml"), podDocument("one", "1"))
	write(t, filepath.Join(dir, ".hidden.yaml"), "]")
	write(t, filepath.Join(dir, "README.md"), "]")
	w := watch(t, dir)
	w.until("the first read", has("one=1"))
	other := filepath.Join(dir, "other.yaml")
	for words, create := range map[string]func() error{
		"of this directory":  func() error { return os.Symlink(filepath.Join(outside, "out.yaml"), other) },
		"no such file":       func() error { return os.Symlink("nothing", other) },
		"not a regular file": func() error { return syscall.Mkfifo(other, 0o600) },
		"regular file (d":    func() error { return os.Mkdir(other, 0o700) },
		"more than 10 MiB":   func() error { return os.WriteFile(other, make([]byte, 10<<20+1), 0o600) },
		"not UTF-8":          func() error { return os.WriteFile(other, []byte{0xff, 0xfe, 'a', 0}, 0o600) },
	} {
		must(t, create())
		w.until(words, hasProblem(false, words, "one=1"))
		must(t, os.Remove(other))
		w.until("the removal of other.yaml", has("one=1"))
	}
}
