// Package testenv gives tests what they run on: root, filesystems on real loop
// devices, and a check that nothing is left behind. It uses the system's own
// tools, not the code under test.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/mountns"
	"github.com/trivet-csi/trivet/internal/retry"
)

// withoutVariable names what a run leaves out, separated by commas: root, ext4-growth,
// other-driver, promtool (CONTRIBUTING.md).
const withoutVariable = "TRIVET_TEST_WITHOUT"

// IsWithout reports whether this run leaves something out.
func IsWithout(what string) bool {
	return slices.Contains(strings.Split(os.Getenv(withoutVariable), ","), what)
}

// Require skips a test if the run leaves out what it needs.
func Require(tb testing.TB, what string) {
	tb.Helper()
	if IsWithout(what) {
		tb.Skipf("%s leaves out %s", withoutVariable, what)
	}
}

// RequireRoot fails a test that does not run as root, unless TRIVET_TEST_WITHOUT leaves out
// root: then the test is skipped, for any user.
func RequireRoot(tb testing.TB) {
	tb.Helper()
	Require(tb, "root")
	if os.Getuid() != 0 {
		tb.Fatalf("this test mounts, attaches devices or changes owners: run it as root, or set %s=root to skip it", withoutVariable)
	}
}

// Run runs a program and fails the test if it fails.
func Run(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// Mkfs makes a filesystem; the last argument is the image or device. mkfs.btrfs fails if
// another's loop device goes while it looks at the mount table, and is run again then.
func Mkfs(tb testing.TB, fsType string, args ...string) {
	tb.Helper()
	words := append([]string{"mkfs." + fsType, "-q"}, args...)
	for {
		out, err := Output("", words...)
		if err == nil {
			return
		}
		if !strings.Contains(out, "cannot check mount status") {
			tb.Fatalf("%s: %v\n%s", strings.Join(words, " "), err, out)
		}
	}
}

// Output runs a program in a directory, and returns what it says however it ends.
func Output(dir string, words ...string) (string, error) {
	c := exec.Command(words[0], words[1:]...)
	c.Dir, c.Env = dir, append(os.Environ(), "LC_ALL=C")
	out, err := c.CombinedOutput()
	return string(out), err
}

// Filesystem mounts a new filesystem of a type and size (as truncate(1) has it)
// on a loop device, and returns where. It is gone when the test ends.
func Filesystem(tb testing.TB, fsType, size string, mountOptions ...string) string {
	tb.Helper()
	RequireRoot(tb)
	base := tb.TempDir()
	image, dir := filepath.Join(base, "disk"), filepath.Join(base, "mnt")
	Run(tb, "truncate", "-s", size, image)
	Mkfs(tb, fsType, image)
	if err := os.Mkdir(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	options := append([]string{"loop"}, mountOptions...)
	Run(tb, "mount", "-t", fsType, "-o", strings.Join(options, ","), image, dir)
	tb.Cleanup(func() { unmount(tb, dir) })
	return dir
}

// unmount waits a moment for programs that died with their driver: they have files open
// until they are gone.
func unmount(tb testing.TB, dir string) {
	tb.Helper()
	err := retry.For(context.Background(), 5*time.Second, func() (bool, error) {
		err := syscall.Unmount(dir, 0)
		return errors.Is(err, syscall.EBUSY), err
	})
	if err != nil {
		tb.Errorf("umount %s: %v", dir, err)
	}
}

// State is what a test may leak.
type State struct {
	Mounts []string
	Loops  []string
	Files  int
}

// Snapshot looks at the mounts and loop devices below the folder for temporary
// files, and at this process's open files. Other packages' tests run beside
// these, with folders of their own (see Main).
func Snapshot() (State, error) {
	var s State
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return s, err
	}
	for line := range strings.Lines(string(table)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, os.TempDir()+"/") {
			s.Mounts = append(s.Mounts, at)
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return s, err
	}
	for _, l := range loops {
		// One that is freed between the two looks is not there.
		if file, err := os.ReadFile(l); err == nil && strings.HasPrefix(string(file), os.TempDir()+"/") {
			s.Loops = append(s.Loops, strings.Split(l, "/")[3]+" of "+strings.TrimSpace(string(file)))
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	s.Files = len(fds)
	return s, err
}

// Leaked tells what s has that before had not. A few descriptors come with the
// runtime (its poller, the random device).
func (s State) Leaked(before State) error {
	var leaks []string
	for _, m := range s.Mounts {
		if !slices.Contains(before.Mounts, m) {
			leaks = append(leaks, "mount "+m)
		}
	}
	for _, l := range s.Loops {
		if !slices.Contains(before.Loops, l) {
			leaks = append(leaks, "loop device "+l)
		}
	}
	const runtimeFiles = 8
	if s.Files > before.Files+runtimeFiles {
		leaks = append(leaks, fmt.Sprintf("%d open files, %d at first", s.Files, before.Files))
	}
	if len(leaks) == 0 {
		return nil
	}
	return fmt.Errorf("left behind: %s", strings.Join(leaks, ", "))
}

// Main runs a package's tests, a *testing.M or more, in a folder and a mount namespace of
// their own, and fails the package if they left anything behind.
func Main(m interface{ Run() int }) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m interface{ Run() int }) (code int, err error) {
	if err := mountns.Enter(); err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("", "trivet-test-")
	if err != nil {
		return 1, err
	}
	// Nothing is removed below a mount: Remove fails there, as it should.
	defer func() { err = errors.Join(err, os.Remove(dir)) }()
	if err := os.Setenv("TMPDIR", dir); err != nil {
		return 1, err
	}
	before, err := Snapshot()
	if err != nil {
		return 1, err
	}
	code = m.Run()
	after, err := Snapshot()
	if err != nil {
		return 1, err
	}
	return code, after.Leaked(before)
}
