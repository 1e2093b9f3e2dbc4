package payload_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/payload"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestUpdate: SetUp updates changed keys, adds new ones, and removes old ones and unknown links.
func TestUpdate(t *testing.T) {
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.setBoth(map[string]string{"a": "1", "b": "2"})
			at := h.mount(t, v, newPod(), plugins.MounterArgs{})
			must(t, os.Symlink("nowhere", filepath.Join(at, "c")))
			must(t, os.Symlink("..data/b", filepath.Join(at, "accident")))
			h.setBoth(map[string]string{"b": "3", "c": "4"})
			h.mount(t, v, newPod(), plugins.MounterArgs{})
			wantContent(t, at, map[string]string{"b": "-rw-r--r-- 0:0 3", "c": "-rw-r--r-- 0:0 4"})
			wantLinks(t, at, 2)
			h.mount(t, v, newPod(), plugins.MounterArgs{FSGroup: new(int64(2000))})
			wantContent(t, at, map[string]string{"b": "-rw-r--r-- 0:2000 3", "c": "-rw-r--r-- 0:2000 4"})
			wantLinks(t, at, 2)
		})
	}
}

// TestKeyOfSubPath: if a new key has the name of a directory that a subPath has created, the directory
// stays, all other keys are updated, and each call of SetUp returns a warning.
func TestKeyOfSubPath(t *testing.T) {
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.setBoth(map[string]string{"a": "1"})
			at := h.mount(t, v, newPod(), plugins.MounterArgs{})
			dir := filepath.Join(at, "m")
			must(t, os.Mkdir(dir, 0o755))
			must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("kept"), 0o644))
			h.setBoth(map[string]string{"b": "2", "c": "2", "m": "2", "x": "2", "z": "2"})
			want := map[string]string{"m": "drwxr-xr-x 0:0", "m/file": "-rw-r--r-- 0:0 kept"}
			for _, key := range []string{"b", "c", "x", "z"} {
				want[key] = "-rw-r--r-- 0:0 2"
			}
			for range 3 {
				m := plugintest.Value(h.plugin(t, v).NewMounter(&plugins.Spec{Volume: &v}, newPod()))(t)
				must(t, m.SetUp(t.Context(), plugins.MounterArgs{}))
				wantContent(t, at, want)
				warnings := m.(plugins.Warner).Warnings()
				if len(warnings) != 1 || !strings.Contains(warnings[0], `"m"`) {
					t.Errorf("got warnings %q, want one for m", warnings)
				}
			}
			must(t, os.RemoveAll(dir))
			h.mount(t, v, newPod(), plugins.MounterArgs{})
			if got := content(t, at)["m"]; got != "-rw-r--r-- 0:0 2" {
				t.Errorf("m after the directory was removed: got %q, want the file with the text 2", got)
			}
		})
	}
}

// TestUpdateOfItems: SetUp replaces a file with a directory, and a directory with a file.
func TestUpdateOfItems(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	var at string
	for _, path := range []string{"x", "x/y", "x/y/z", "x"} {
		at = h.mount(t, configMapVolume("web", item("a", path)), newPod(), plugins.MounterArgs{})
		if got := content(t, at)[path]; got != "-rw-r--r-- 0:0 1" {
			t.Errorf("%s: got %q, want a file with the text 1", path, got)
		}
		wantLinks(t, at, 1)
	}
	h.mount(t, configMapVolume("web", item("a", "-")), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"-": "-rw-r--r-- 0:0 1"})
}

// TestUnchanged: nothing is written if the content is unchanged.
func TestUnchanged(t *testing.T) {
	for name, v := range map[string]corev1.Volume{"on disk": configMapVolume("web", item("a", "x/y")), "in memory": secretVolume("web", item("a", "x/y"))} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.setBoth(map[string]string{"a": "1"})
			args := plugins.MounterArgs{FSGroup: new(int64(2000))}
			at := h.mount(t, v, newPod(), args)
			before := attributes(t, at)
			h.mount(t, v, newPod(), args)
			if after := attributes(t, at); !maps.Equal(before, after) {
				t.Errorf("got attributes %v, want %v", after, before)
			}
		})
	}
}

// attributes returns the attributes of each file, directory and link, with the time of its last change
// but without that of its last access.
func attributes(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		found[path] = fmt.Sprintf("%+v", info.Sys())
		return err
	}))
	for path, s := range found {
		before, rest, _ := strings.Cut(s, "Atim:")
		_, rest, _ = strings.Cut(rest, "}")
		found[path] = before + rest
	}
	return found
}

// TestGrow: SetUp enlarges the filesystem in memory for larger content.
func TestGrow(t *testing.T) {
	h := newHost(t)
	for _, data := range []map[string]string{
		{"a": "small"},
		{"a": strings.Repeat("large ", 1<<20)},
		many(3000),
		{"a": "small"},
	} {
		h.secret("web", data)
		at := h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
		got := content(t, at)
		for name, value := range data {
			if got[name] != "-rw-r--r-- 0:0 "+value {
				t.Errorf("%s: got %d bytes including mode and owner, want a value of %d bytes", name, len(got[name]), len(value))
			}
		}
		wantLinks(t, at, len(data))
	}
}

// many returns n keys.
func many(n int) map[string]string {
	data := map[string]string{}
	for i := range n {
		data[strconv.Itoa(i)] = "value"
	}
	return data
}

// generation returns content number n: the text of each file consists of repetitions of n.
func generation(n int) map[string]string {
	data := map[string]string{}
	for _, key := range []string{"a", "b", "c", "d"} {
		data[key] = strings.Repeat(strconv.Itoa(n)+" ", 1+n%2000)
	}
	if n%2 == 0 {
		data["e"] = data["a"]
	}
	return data
}

// readGeneration reads one version of a volume, and returns its number. If another version becomes the
// current one meanwhile, it starts again.
func readGeneration(dir string) (n int, err error) {
	for {
		version, err := os.Readlink(filepath.Join(dir, "..data"))
		if err != nil {
			return 0, err
		}
		entries, err := os.ReadDir(filepath.Join(dir, version))
		got := map[string]string{}
		for _, e := range entries {
			var b []byte
			if b, err = os.ReadFile(filepath.Join(dir, version, e.Name())); err != nil {
				break
			}
			got[e.Name()] = string(b)
		}
		if current, _ := os.Readlink(filepath.Join(dir, "..data")); current != version {
			continue
		}
		if err != nil {
			return 0, err
		}
		first, _, _ := strings.Cut(got["a"], " ")
		n, err := strconv.Atoi(first)
		if err == nil && !maps.Equal(got, generation(n)) {
			err = fmt.Errorf("got %d files, of which a is in generation %d; want all files of that generation", len(got), n)
		}
		return n, err
	}
}

// TestReaders: while the content is replaced, a reader gets the old version or the new one, but no older
// version than it got before.
func TestReaders(t *testing.T) {
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.setBoth(generation(0))
			at := h.mount(t, v, newPod(), plugins.MounterArgs{})
			stop, result := make(chan struct{}), make(chan error, 1)
			go func() { result <- readUntil(at, stop) }()
			for n := range 300 {
				h.setBoth(generation(n))
				if _, err := h.setUp(t, v, newPod(), plugins.MounterArgs{}); err != nil {
					t.Error(err)
					break
				}
			}
			close(stop)
			must(t, <-result)
		})
	}
}

// readUntil reads versions until stop is closed. It returns an error if a version is incomplete, or older
// than the one before.
func readUntil(dir string, stop <-chan struct{}) error {
	last := 0
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		n, err := readGeneration(dir)
		if err != nil {
			return err
		}
		if n < last {
			return fmt.Errorf("got generation %d after generation %d, want no older generation", n, last)
		}
		last = n
	}
}

// writerDir is an environment variable. If it is set, it names a directory, and the test binary replaces
// the content of volumes below that directory until it is killed.
const writerDir = "TRIVET_TEST_PAYLOAD_WRITER"

// writeForever is the writer that writerDir describes. After each generation it prints its number.
func writeForever(dir string) {
	h := hostAt(dir)
	for n := 0; ; n++ {
		h.setBoth(generation(n))
		for _, v := range []corev1.Volume{configMapVolume("web"), secretVolume("web")} {
			if err := setUpOnce(h, v); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
		fmt.Println(n)
	}
}

// setUpOnce sets a volume up outside of a test.
func setUpOnce(h *host, v corev1.Volume) error {
	spec := &plugins.Spec{Volume: &v}
	p, err := plugins.Registry(payload.New(h)).ForSpec(spec)
	if err != nil {
		return err
	}
	m, err := p.NewMounter(spec, newPod())
	if err != nil {
		return err
	}
	return m.SetUp(context.Background(), plugins.MounterArgs{})
}

// TestKill: a process that is killed at any point leaves the old version or the new one. The next SetUp
// removes its leftovers.
func TestKill(t *testing.T) {
	h := newHost(t)
	volumes := []corev1.Volume{configMapVolume("web"), secretVolume("web")}
	for _, v := range volumes {
		t.Cleanup(func() { must(t, h.tearDown(t, v)) })
	}
	total := 0
	for range 30 {
		kill(t, h.Root)
		for _, v := range volumes {
			at := h.Paths().PodVolume("4711", h.plugin(t, v).Name(), "data")
			if _, err := readGeneration(at); err != nil {
				t.Error(err)
			}
			total += leftovers(t, at)
		}
	}
	t.Logf("found %d leftovers", total)
	h.setBoth(generation(1))
	for _, v := range volumes {
		at := h.mount(t, v, newPod(), plugins.MounterArgs{})
		if n, err := readGeneration(at); n != 1 || err != nil {
			t.Errorf("got generation %d, %v; want 1", n, err)
		}
		wantLinks(t, at, 4)
	}
}

// kill runs a writer (writerDir), and kills it at a random time after it has written each volume once.
func kill(t *testing.T, dir string) {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), writerDir+"="+dir)
	out := plugintest.Value(c.StdoutPipe())(t)
	must(t, c.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "0" {
		t.Errorf("got output %q of the writer, want 0", lines.Text())
	}
	for range rand.IntN(3) {
		lines.Scan()
	}
	time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	must(t, c.Process.Kill())
	_ = c.Wait()
}

// leftovers counts the hidden files in a volume except ..data and the current version.
func leftovers(t *testing.T, dir string) (n int) {
	t.Helper()
	entries := plugintest.Value(os.ReadDir(dir))(t)
	current := plugintest.Value(os.Readlink(filepath.Join(dir, "..data")))(t)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") && e.Name() != "..data" && e.Name() != current {
			n++
		}
	}
	return n
}

// TestLeftovers: SetUp restores the content of a volume in each state that a killed process or another
// program may leave.
func TestLeftovers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(at string) error
	}{
		{"an incomplete version", func(at string) error {
			return errors.Join(os.Mkdir(filepath.Join(at, "..part"), 0o700), os.WriteFile(filepath.Join(at, "..part", "a"), []byte("par"), 0o600))
		}},
		{"a version not yet linked", func(at string) error { return os.Mkdir(filepath.Join(at, "..next"), 0o755) }},
		{"a link not yet renamed", func(at string) error { return os.Symlink("..next", filepath.Join(at, "..data_tmp")) }},
		{"a missing link for users", func(at string) error { return os.Remove(filepath.Join(at, "a")) }},
		{"a missing link to the version", func(at string) error { return os.Remove(filepath.Join(at, "..data")) }},
		{"a missing version", func(at string) error {
			return errors.Join(os.Remove(filepath.Join(at, "..data")), os.Symlink("..missing", filepath.Join(at, "..data")))
		}},
		{"a link out of the volume", func(at string) error {
			return errors.Join(os.Remove(filepath.Join(at, "..data")), os.Symlink("../..", filepath.Join(at, "..data")))
		}},
		{"an empty directory", func(at string) error {
			entries, err := os.ReadDir(at)
			for _, e := range entries {
				err = errors.Join(err, os.RemoveAll(filepath.Join(at, e.Name())))
			}
			return err
		}},
		{"a changed file", func(at string) error { return os.WriteFile(filepath.Join(at, "a"), []byte("other"), 0o600) }},
	} {
		for kind, v := range onDiskAndInMemory() {
			t.Run(tc.name+" "+kind, func(t *testing.T) {
				h := newHost(t)
				h.setBoth(generation(1))
				at := h.mount(t, v, newPod(), plugins.MounterArgs{})
				must(t, tc.change(at))
				h.mount(t, v, newPod(), plugins.MounterArgs{})
				if n, err := readGeneration(at); n != 1 || err != nil {
					t.Errorf("got generation %d, %v; want 1", n, err)
				}
				wantLinks(t, at, 4)
			})
		}
	}
}

// TestReboot: after a reboot, which unmounts the filesystem in memory, SetUp writes the content again.
func TestReboot(t *testing.T) {
	h := newHost(t)
	h.secret("web", map[string]string{"a": "1"})
	at := h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, mount.Unmount(at))
	h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
}
