package manifest_test

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
	"github.com/trivet-csi/trivet/volumemanager/manifest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const pod = `apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {version: %q}}
spec:
  containers: [{name: app, volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, emptyDir: {}}]
`

// aPod is a document.
func aPod(name, version string) string { return "---\n" + fmt.Sprintf(pod, name, version) }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace is as an editor does it.
func replace(t *testing.T, path, text string) {
	t.Helper()
	write(t, path+"~", text)
	if err := os.Rename(path+"~", path); err != nil {
		t.Fatal(err)
	}
}

type watched struct {
	t    *testing.T
	ch   <-chan *manifest.Objects
	last *manifest.Objects
}

func watch(t *testing.T, dir string) *watched { return resynced(t, dir, time.Hour) }

func resynced(t *testing.T, dir string, resync time.Duration) *watched {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ch, err := manifest.Watch(ctx, dir, resync)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		for range ch { // to its end
		}
	})
	return &watched{t: t, ch: ch}
}

// until waits for Objects that are as wanted.
func (w *watched) until(what string, wanted func(o *manifest.Objects) bool) *manifest.Objects {
	w.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case w.last = <-w.ch:
			if wanted(w.last) {
				return w.last
			}
		case <-deadline:
			w.t.Fatalf("not seen: %s; the last: %s", what, describe(w.last))
		}
	}
}

func describe(o *manifest.Objects) string {
	if o == nil {
		return "nothing"
	}
	return fmt.Sprintf("complete %t, pods %v, problems %v", o.Complete, versions(o), o.Problems)
}

// versions are the pods, sorted, each name=version.
func versions(o *manifest.Objects) (all []string) {
	for name, pod := range o.Pods {
		all = append(all, name.Name+"="+pod.Labels["version"])
	}
	slices.Sort(all)
	return all
}

func has(pods ...string) func(*manifest.Objects) bool {
	return func(o *manifest.Objects) bool {
		return o.Complete && slices.Equal(versions(o), pods) && len(o.Problems) == 0
	}
}

// hasBut is with one problem, whose text has words.
func hasBut(complete bool, words string, pods ...string) func(*manifest.Objects) bool {
	return func(o *manifest.Objects) bool {
		return o.Complete == complete && slices.Equal(versions(o), pods) && len(o.Problems) == 1 &&
			strings.Contains(fmt.Sprint(o.Problems[0]), words)
	}
}

func TestWatchChanges(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, aPod("one", "1")+aPod("two", "1"))
	w := watch(t, dir)
	first := w.until("the first", has("one=1", "two=1"))

	replace(t, a, aPod("one", "2")+aPod("two", "1"))
	second := w.until("an edit", has("one=2", "two=1"))
	if got := versions(first); !slices.Equal(got, []string{"one=1", "two=1"}) {
		t.Errorf("what was given out before became %v", got)
	}
	id := types.NamespacedName{Namespace: "default", Name: "one"}
	if was, is := first.Pods[id].UID, second.Pods[id].UID; was != is || was == "" {
		t.Errorf("UID %q became %q by an edit", was, is)
	}
	write(t, a, aPod("one", "3"))
	w.until("a write in place", has("one=3"))
	write(t, filepath.Join(dir, "b.json"), `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "three", "labels": {"version": "1"}}, "spec": {"containers": [{"name": "app"}]}}`)
	w.until("another file", has("one=3", "three=1"))
	if err := os.Remove(a); err != nil {
		t.Fatal(err)
	}
	w.until("a file less", has("three=1"))
}

// TestWatchBroken: a file that is broken counts with what it had, as long as it is.
func TestWatchBroken(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	text := aPod("one", "2") + aPod("two", "2")
	write(t, a, aPod("one", "1")+aPod("two", "1"))
	write(t, filepath.Join(dir, "b.yaml"), aPod("other", "1"))
	w := watch(t, dir)
	w.until("the first", has("one=1", "other=1", "two=1"))
	write(t, a, text[:len(text)-20])
	w.until("half a file", hasBut(true, "document 2", "one=1", "other=1", "two=1"))
	write(t, a, text)
	w.until("all of it", has("one=2", "other=1", "two=2"))
	write(t, a, "")
	w.until("an empty file", hasBut(true, "it is empty", "one=2", "other=1", "two=2"))
	write(t, a, "# nothing\n")
	w.until("a comment", hasBut(true, "it has no object", "one=2", "other=1", "two=2"))
	w.until("a file that stays without", has("other=1"))
	write(t, a, aPod("one", "3")+"unknown: true\n")
	w.until("a broken file that had nothing", hasBut(true, "unknown field", "other=1"))
	write(t, a, aPod("one", "3"))
	w.until("a file that is mended", has("one=3", "other=1"))
}

// TestWatchBrokenSince: what was broken from the start on may have anything.
func TestWatchBrokenSince(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, "kind: Pod\nmetadata: [")
	write(t, filepath.Join(dir, "b.yaml"), aPod("other", "1"))
	w := watch(t, dir)
	w.until("a broken file", hasBut(false, "nothing is taken down", "other=1"))
	write(t, a, aPod("Not_A_Name", "1"))
	w.until("an object that is not valid", hasBut(false, "metadata.name", "other=1"))
	write(t, a, aPod("one", "1"))
	w.until("a good one", has("one=1", "other=1"))
	write(t, a, aPod("Not_A_Name", "1"))
	w.until("another that is not valid, later", hasBut(true, "it is left out", "other=1"))
	write(t, a, "kind: Service\napiVersion: v1\nmetadata: {name: one}\n")
	w.until("a kind that is not read", hasBut(true, "PersistentVolumeClaim", "other=1"))
}

// TestWatchInvalid: an object that is not valid any more stays as it was, also when its
// file gets another name; the others of its file do not.
func TestWatchInvalid(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, aPod("one", "1")+aPod("two", "1"))
	w := watch(t, dir)
	w.until("the first", has("one=1", "two=1"))
	bad := strings.Replace(aPod("one", "2"), "name: data, emptyDir: {}", "name: data", 1)
	replace(t, a, bad+aPod("two", "2"))
	w.until("a volume without a source", hasBut(true, "spec.volumes[0]", "one=1", "two=2"))
	if err := os.Rename(a, filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	w.until("the same in another file", hasBut(true, "b.yaml", "one=1", "two=2"))
	if err := os.Remove(filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	w.until("nothing", has())
}

const frozen = `apiVersion: v1
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

// hasFrozen is with the values of both objects, and so many problems that say words.
func hasFrozen(port, key string, problems int, words string) func(*manifest.Objects) bool {
	return func(o *manifest.Objects) bool {
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

// TestWatchImmutable: the content of what is immutable, and that it is, cannot be changed;
// it can be removed, and added anew.
func TestWatchImmutable(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	put := func(port, key string, immutable bool) {
		replace(t, file, fmt.Sprintf(frozen, port, immutable, key, immutable))
	}
	put("80", "k", false)
	w := watch(t, dir)
	w.until("the first", hasFrozen("80", "k", 0, ""))
	put("81", "l", false)
	w.until("an edit", hasFrozen("81", "l", 0, ""))
	put("82", "m", true)
	w.until("an edit that makes them immutable", hasFrozen("82", "m", 0, ""))
	put("83", "n", true)
	w.until("an edit of what is immutable", hasFrozen("82", "m", 2, "immutable"))
	put("82", "m", false)
	w.until("making it mutable", hasFrozen("82", "m", 2, "immutable"))
	replace(t, file, strings.Replace(fmt.Sprintf(frozen, "82", true, "m", true), "name: web", "name: web, labels: {a: b}", 1))
	w.until("an edit of labels", func(o *manifest.Objects) bool {
		return hasFrozen("82", "m", 0, "")(o) && o.ConfigMaps[types.NamespacedName{Namespace: "default", Name: "web"}].Labels["a"] == "b"
	})
	replace(t, file, aPod("one", "1"))
	w.until("a removal", func(o *manifest.Objects) bool { return len(o.ConfigMaps)+len(o.Secrets) == 0 })
	put("90", "z", true)
	w.until("what is made anew", hasFrozen("90", "z", 0, ""))
}

func TestWatchDirectory(t *testing.T) {
	above := t.TempDir()
	dir := filepath.Join(above, "manifests")
	w := watch(t, dir)
	w.until("no directory", hasBut(false, "cannot be read"))
	fill := func(to, pod string) {
		t.Helper()
		if err := os.Mkdir(to, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(to, "a.yaml"), aPod(pod, "1"))
	}
	fill(dir, "one")
	w.until("a directory", has("one=1"))
	if err := os.Rename(dir, dir+".old"); err != nil {
		t.Fatal(err)
	}
	w.until("none again", hasBut(true, "cannot be read", "one=1"))
	fill(dir+".new", "two")
	if err := os.Rename(dir+".new", dir); err != nil {
		t.Fatal(err)
	}
	w.until("another directory", has("two=1"))
	write(t, filepath.Join(dir, "b.yaml"), aPod("three", "1"))
	w.until("a change in it", has("three=1", "two=1"))
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir+".old", dir); err != nil {
		t.Fatal(err)
	}
	w.until("a link to the first", has("one=1"))
	write(t, filepath.Join(dir, "c.yaml"), aPod("four", "1"))
	w.until("a change behind the link", has("four=1", "one=1"))
}

// TestWatchDataLink: a mounted ConfigMap changes by one rename.
func TestWatchDataLink(t *testing.T) {
	dir := t.TempDir()
	version := func(n string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, "..v"+n), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "..v"+n, "a.yaml"), aPod("one", n))
		if err := os.Symlink("..v"+n, filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("1")
	if err := os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	w := watch(t, dir)
	w.until("the first", has("one=1"))
	version("2")
	w.until("the swap", has("one=2"))
}

// TestWatchResync: what happens below the directory is nobody's event.
func TestWatchResync(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "below"), 0o700); err != nil {
		t.Fatal(err)
	}
	a := filepath.Join(dir, "below", "a.yaml")
	write(t, a, aPod("one", "1"))
	if err := os.Symlink("below/a.yaml", filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	w := resynced(t, dir, 50*time.Millisecond)
	w.until("the first", has("one=1"))
	write(t, a, aPod("one", "2"))
	w.until("a change behind a link", has("one=2"))
}

// TestWatchWithoutInotify: changes are seen later, and at once when there is an instance.
func TestWatchWithoutInotify(t *testing.T) {
	testenv.RequireRoot(t)
	const inside, limit = "TRIVET_TEST_WITHOUT_INOTIFY", "/proc/sys/user/max_inotify_instances"
	if os.Getenv(inside) == "" {
		// The limit is that of a user namespace (user_namespaces(7), namespaces(7)).
		again := exec.Command("/proc/self/exe", "-test.run=^TestWatchWithoutInotify$")
		again.Env = append(os.Environ(), inside+"=1")
		ids := []syscall.SysProcIDMap{{Size: 1}}
		again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
		if out, err := again.CombinedOutput(); err != nil {
			t.Errorf("%v:\n%s", err, out)
		}
		return
	}
	write(t, limit, "0")
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, aPod("one", "1"))
	w := watch(t, dir)
	w.until("the first", hasBut(true, "fs.inotify.max_user_instances", "one=1"))
	write(t, a, aPod("one", "2"))
	w.until("a change", hasBut(true, "fs.inotify.max_user_instances", "one=2"))
	write(t, limit, "1")
	w.until("an instance", has("one=2"))
	write(t, a, aPod("one", "3"))
	w.until("a change that is told", has("one=3"))
}

// TestWatchSlowReader: there is one value to be had, and it is the latest.
func TestWatchSlowReader(t *testing.T) {
	dir := t.TempDir()
	a := filepath.Join(dir, "a.yaml")
	write(t, a, aPod("one", "0"))
	slow, quick := watch(t, dir), watch(t, dir)
	quick.until("the first", has("one=0"))
	for i := 1; i <= 3; i++ {
		replace(t, a, aPod("one", fmt.Sprint(i)))
		quick.until("an edit", has(fmt.Sprintf("one=%d", i)))
	}
	var before string
	for {
		o := slow.until("any", func(o *manifest.Objects) bool { return o.Complete })
		if now := versions(o)[0]; now < before {
			t.Fatalf("%s came after %s", now, before)
		} else if before = now; now == "one=3" {
			return
		}
	}
}

// TestWatchStrange: what is no manifest is not waited for, not followed out of the
// directory, and in nobody's way.
func TestWatchStrange(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write(t, filepath.Join(outside, "out.yaml"), aPod("outside", "1"))
	write(t, filepath.Join(dir, "good.yaml"), aPod("one", "1"))
	write(t, filepath.Join(dir, ".hidden.yaml"), "]")
	write(t, filepath.Join(dir, "README.md"), "]")
	w := watch(t, dir)
	w.until("the first", has("one=1"))
	strange := filepath.Join(dir, "strange.yaml")
	for words, plant := range map[string]func() error{
		"of this directory":  func() error { return os.Symlink(filepath.Join(outside, "out.yaml"), strange) },
		"no such file":       func() error { return os.Symlink("nothing", strange) },
		"not a regular file": func() error { return syscall.Mkfifo(strange, 0o600) },
		"regular file (d":    func() error { return os.Mkdir(strange, 0o700) },
		"more than 10 MiB":   func() error { return os.WriteFile(strange, make([]byte, 10<<20+1), 0o600) },
		"not UTF-8":          func() error { return os.WriteFile(strange, []byte{0xff, 0xfe, 'a', 0}, 0o600) },
	} {
		if err := plant(); err != nil {
			t.Fatal(err)
		}
		w.until(words, hasBut(false, words, "one=1"))
		if err := os.Remove(strange); err != nil {
			t.Fatal(err)
		}
		w.until("it is gone", has("one=1"))
	}
}
