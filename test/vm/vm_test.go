// Package vm runs in a virtual machine what the kernel of a build machine may
// not do. See README.md.
package vm

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	module = "../.."

	sanityTest = "^TestSanity$"
	growthTest = "^TestConformance$/^ext4$/Growth$"

	// The guest gives up first, and says where it was. The host may also have to
	// build, and to download a kernel.
	guestLimit = "240"
	hostLimit  = 10 * time.Minute

	// onDisk runs a command with its temporary files on the guest's disk: the
	// root there is an overlay, on which no loop device has direct I/O.
	onDisk = `mkfs.xfs -q /dev/vda && mount /dev/vda /mnt && TMPDIR=/mnt exec "$@"`
)

// suites are what runs in the VM. Of the tests named in want, one at least must
// have passed.
var suites = []struct {
	name string
	pkg  string
	args []string
	want *regexp.Regexp
}{
	{
		name: "sanity",
		pkg:  "./test/sanity",
		args: []string{"-test.run", sanityTest, "-kinds", "ext4"},
		want: regexp.MustCompile(`(?m)^--- PASS: TestSanity `),
	},
	{
		name: "growth",
		pkg:  "./backend/loop",
		args: []string{"-test.run", growthTest},
		want: regexp.MustCompile(`(?m)^ +--- PASS: TestConformance/ext4/\w+Growth `),
	},
}

var skipped = regexp.MustCompile(`(?m)^ *--- SKIP: .*`)

func TestVM(t *testing.T) {
	dependOnSources(t)
	ctx := interruptible(t)
	for _, s := range suites {
		t.Run(s.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(ctx, hostLimit)
			defer cancel()
			binary := build(ctx, t, s.pkg)
			guest := []string{"--disk", "8G", "--timeout", guestLimit, "--", "bash", "-c", onDisk, "bash", binary, "-test.v"}
			out := run(ctx, t, exec.CommandContext(ctx, "./vm.sh", append(guest, s.args...)...))
			t.Log(out)
			if !s.want.MatchString(out) {
				t.Errorf("nothing in the output matches %s: no test ran", s.want)
			}
			for _, line := range skipped.FindAllString(out, -1) {
				t.Errorf("left out: %s", strings.TrimSpace(line))
			}
		})
	}
}

// dependOnSources lists every folder of the module, so that a cached result of
// this package is not good any more when a source changes.
func dependOnSources(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(module, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && path != module && strings.HasPrefix(e.Name(), ".") {
			return fs.SkipDir
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// interruptible ends what the test runs when the test is told to end, so that
// its clean-up is done.
func interruptible(t *testing.T) context.Context {
	t.Helper()
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	t.Cleanup(stop)
	return ctx
}

// build makes a static test binary of a package, without the race detector,
// which the guest is too slow for.
func build(ctx context.Context, t *testing.T, pkg string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), filepath.Base(pkg)+".test")
	c := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, pkg)
	c.Dir = module
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	run(ctx, t, c)
	return binary
}

// run runs a command to its end and returns its output. It fails the test if
// the command fails or takes too long.
func run(ctx context.Context, t *testing.T, c *exec.Cmd) string {
	t.Helper()
	// The kernel sends Pdeathsig when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.WaitDelay = 10 * time.Second
	if c.Env == nil {
		c.Env = os.Environ()
	}
	c.Env = append(c.Env, "TMPDIR="+t.TempDir())
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", filepath.Base(c.Path), errors.Join(context.Cause(ctx), err), &out)
	}
	return out.String()
}
