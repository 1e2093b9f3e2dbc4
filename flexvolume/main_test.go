package flexvolume_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// program is the trivet program that the tests run.
var program = os.Getenv("TRIVET_TEST_DRIVER")

func TestMain(m *testing.M) { testenv.Main(testenv.WithProgram{M: m, Path: &program}) }

// kubelet runs the executable as a kubelet does: by a link in the plugin directory of a FlexVolume driver, with
// standard output and standard error combined.
type kubelet struct {
	t       *testing.T
	dir     string // directory of the pods
	plugins string // directory of the volume plugins
	state   string // state directory of the executable
	pool    string // directory of the pool
	socket  string // socket of a driver that a test may start; not that of the on-demand driver
}

// newKubelet returns a kubelet whose executable has one pool, on the filesystem mounted at a path. All volumes
// must be unmounted when the test ends.
func newKubelet(t *testing.T, filesystem string) *kubelet {
	t.Helper()
	k := &kubelet{t: t, dir: t.TempDir(), plugins: t.TempDir(), state: filepath.Join(filesystem, "state"), pool: filepath.Join(filesystem, "pool"), socket: filepath.Join(t.TempDir(), "csi.sock")}
	config := fmt.Sprintf("pools: [{name: flex, directory: {path: %s}, size: 1Gi}]\n", k.pool)
	for _, driver := range []string{"trivet", "loop", "local", "nfs"} {
		dir := filepath.Join(k.plugins, "trivet~"+driver)
		must(t, os.Mkdir(dir, 0o755))
		must(t, os.Symlink(program, filepath.Join(dir, driver)))
		must(t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	}
	t.Cleanup(func() { k.checkNothingLeft(); k.awaitIdle() })
	return k
}

// awaitIdle waits until no on-demand driver runs.
func (k *kubelet) awaitIdle() {
	k.t.Helper()
	locks, err := filepath.Glob(filepath.Join(k.state, "*.lock"))
	if err != nil {
		k.t.Error(err)
	}
	for _, path := range locks {
		f, err := os.Open(path)
		if err != nil {
			k.t.Error(err)
			continue
		}
		defer f.Close()
		if err := retry.For(context.Background(), 20*time.Second, func() (bool, error) {
			err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
			return err != nil, err
		}); err != nil {
			k.t.Errorf("an on-demand driver does not end: %v", err)
		}
	}
}

// on returns the kubelet for a subtest.
func (k *kubelet) on(t *testing.T) *kubelet {
	t.Helper()
	in := *k
	in.t = t
	return &in
}

// options returns the options that a kubelet passes for a volume, as JSON. extra contains the keys of other options,
// each followed by its value.
func options(extra ...string) string {
	o := map[string]string{
		"kubernetes.io/fsType": "", "kubernetes.io/readwrite": "rw", "kubernetes.io/pvOrVolumeName": "pv",
		"kubernetes.io/pod.name": "web", "kubernetes.io/pod.namespace": "shop", "kubernetes.io/serviceAccount.name": "default",
	}
	for i := 0; i < len(extra); i += 2 {
		o[extra[i]] = extra[i+1]
	}
	b, _ := json.Marshal(o) // a map of strings has no invalid values
	return string(b)
}

func (k *kubelet) command(driver string, words ...string) *exec.Cmd {
	c := exec.Command(filepath.Join(k.plugins, "trivet~"+driver, driver), words...)
	c.Env = append(os.Environ(), "TRIVET_FLEXVOLUME_STATE_DIR="+k.state, "TRIVET_FLEXVOLUME_ENDPOINT=unix://"+k.socket)
	return c
}

// call makes a call. The whole output must be one line with the answer.
func (k *kubelet) call(driver string, words ...string) flexvolume.Answer {
	k.t.Helper()
	out, err := k.command(driver, words...).CombinedOutput()
	var a flexvolume.Answer
	if e := json.Unmarshal(out, &a); e != nil || strings.Count(string(out), "\n") != 1 {
		k.t.Fatalf("%s %q: got output %q (%v), want one line of JSON", driver, words, out, err)
	}
	if (err == nil) != (a.Status == flexvolume.Success) {
		k.t.Errorf("%s %q: the exit status (%v) does not match the answer %+v", driver, words, err, a)
	}
	return a
}

// succeed makes a call that must succeed.
func (k *kubelet) succeed(driver string, words ...string) flexvolume.Answer {
	k.t.Helper()
	a := k.call(driver, words...)
	if a.Status != flexvolume.Success {
		k.t.Fatalf("%s %q: got %+v, want success", driver, words, a)
	}
	return a
}

// refuse makes a call that must fail with a message.
func (k *kubelet) refuse(says, driver string, words ...string) {
	k.t.Helper()
	a := k.call(driver, words...)
	if a.Status != flexvolume.Failure || !strings.Contains(a.Message, says) {
		k.t.Errorf("%s %q: got %+v, want a failure with %q", driver, words, a, says)
	}
}

// target creates the directory for the volume of a pod, as a kubelet does before a call to mount.
func (k *kubelet) target(pod string) string {
	k.t.Helper()
	dir := filepath.Join(k.dir, "pods", pod, "volumes", "trivet~trivet", "data")
	must(k.t, os.MkdirAll(dir, 0o750))
	return dir
}

// checkNothingLeft fails the test if the executable has staging mounts or records.
func (k *kubelet) checkNothingLeft() {
	for _, dir := range []string{"staged", "targets"} {
		left, err := os.ReadDir(filepath.Join(k.state, dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) || len(left) > 0 {
			k.t.Errorf("got %v, error %v in directory %s of the state, want no files", left, err, dir)
		}
	}
}

func (k *kubelet) write(path, text string) {
	k.t.Helper()
	must(k.t, os.WriteFile(path, []byte(text), 0o600))
}

// read fails the test unless a file has the wanted content.
func (k *kubelet) read(path, want string) {
	k.t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		k.t.Errorf("%s: got %q, error %v, want %q", path, b, err, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// runConcurrently runs do(0) to do(n-1) concurrently, and waits for them.
func runConcurrently(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// size returns the size of the filesystem at a path in bytes.
func size(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// TestStartPause: if the on-demand driver ends immediately with status 0, as it does if another process holds its lock, a
// call starts it again only after increasing delays.
func TestStartPause(t *testing.T) {
	starts := filepath.Join(t.TempDir(), "starts")
	e := flexvolume.Executable{
		StateDir: t.TempDir(), Socket: filepath.Join(t.TempDir(), "csi.sock"),
		OnDemand: flexvolume.OnDemand{Command: []string{"sh", "-c", "echo >> " + starts}, Socket: "driver.sock"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	a := e.Answer(ctx, []string{"unmount", t.TempDir()})
	if a.Status != flexvolume.Failure || !strings.Contains(a.Message, "the on-demand driver does not answer") {
		t.Errorf("got %+v, want a failure because the on-demand driver does not answer", a)
	}
	b, err := os.ReadFile(starts)
	must(t, err)
	if n := len(b); n < 2 || n > 3 { // after 0, 0.5 and 1.5 seconds
		t.Errorf("got %d starts of the on-demand driver, want 2 or 3", n)
	}
}
