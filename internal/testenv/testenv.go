// Package testenv provides the environment of tests: root, filesystems on real loop devices, and a check for
// leaked mounts, loop devices and files. It uses the tools of the system, not the code under test.
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

// withoutVariable lists the features that a run omits, separated by commas: root, network, ext4-growth,
// other-driver, promtool, browser, history (CONTRIBUTING.md).
const withoutVariable = "TRIVET_TEST_WITHOUT"

// IsWithout reports whether this run omits a feature.
func IsWithout(feature string) bool {
	return slices.Contains(strings.Split(os.Getenv(withoutVariable), ","), feature)
}

// Require skips a test if the run omits a feature.
func Require(tb testing.TB, feature string) {
	tb.Helper()
	if IsWithout(feature) {
		tb.Skipf("%s omits %s", withoutVariable, feature)
	}
}

// RequireRoot fails a test that does not run as root. If TRIVET_TEST_WITHOUT omits root, it skips the test
// for every user.
func RequireRoot(tb testing.TB) {
	tb.Helper()
	Require(tb, "root")
	if os.Getuid() != 0 {
		tb.Fatalf("this test mounts, attaches devices or changes owners: run it as root, or set %s=root to skip it", withoutVariable)
	}
}

// Run runs a program and returns its output. It fails the test if the program fails.
func Run(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// Mkfs creates a filesystem. The last argument is the image or device. Mkfs repeats mkfs.btrfs if it fails
// because another loop device was removed while it read the mount table.
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

// Output runs a program in a directory, and returns its output whether or not it fails.
func Output(dir string, words ...string) (string, error) {
	c := exec.Command(words[0], words[1:]...)
	c.Dir, c.Env = dir, append(os.Environ(), "LC_ALL=C")
	out, err := c.CombinedOutput()
	return string(out), err
}

// Filesystem creates a filesystem on a loop device, mounts it until the test ends, and returns the mount point.
// size has the format of truncate(1).
func Filesystem(tb testing.TB, fsType, size string, mountOptions ...string) string {
	tb.Helper()
	return filesystem(tb, fsType, size, nil, mountOptions...)
}

// filesystem does the same as Filesystem with options of mkfs.
func filesystem(tb testing.TB, fsType, size string, mkfs []string, mountOptions ...string) string {
	tb.Helper()
	RequireRoot(tb)
	dir := filepath.Join(tb.TempDir(), "mnt")
	Run(tb, "truncate", "-s", size, ImageOf(dir))
	Mkfs(tb, fsType, append(mkfs, ImageOf(dir))...)
	if err := os.Mkdir(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	mount(tb, dir, mountOptions...)
	tb.Cleanup(func() { unmount(tb, dir) })
	return dir
}

// ImageOf returns the image of a filesystem that this package mounted at a directory.
func ImageOf(dir string) string { return filepath.Join(filepath.Dir(dir), "disk") }

// mount mounts the image of a filesystem at its directory.
func mount(tb testing.TB, dir string, options ...string) {
	tb.Helper()
	Run(tb, "mount", "-o", strings.Join(append([]string{"loop"}, options...), ","), ImageOf(dir), dir)
}

// unmount retries, because programs of a driver that is ending may have files open.
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

// State lists the resources that a test may leak.
type State struct {
	Mounts []string // mount points
	Loops  []string // loop devices with their images
	Files  int      // number of open files
}

// Snapshot lists the mounts and loop devices below the directory for temporary files, and counts the open
// files of this process. The tests of other packages run concurrently in other directories (Main).
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
		// A device that was freed after the glob has no file.
		if file, err := os.ReadFile(l); err == nil && strings.HasPrefix(string(file), os.TempDir()+"/") {
			s.Loops = append(s.Loops, strings.Split(l, "/")[3]+" of "+strings.TrimSpace(string(file)))
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	s.Files = len(fds)
	return s, err
}

// Leaked returns an error that lists the resources in s that are not in before. It tolerates a few open
// files, because the Go runtime opens some (the poller, the random device).
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
		leaks = append(leaks, fmt.Sprintf("%d open files (before the tests: %d)", s.Files, before.Files))
	}
	if len(leaks) == 0 {
		return nil
	}
	return fmt.Errorf("the tests did not remove: %s", strings.Join(leaks, ", "))
}

// Main runs the tests of a package (m is a *testing.M) in a separate directory and mount namespace, and
// fails the package if they leak state.
func Main(m interface{ Run() int }) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		code = 1
	}
	os.Exit(code)
}

// run does the same as Main, but returns the exit status.
func run(m interface{ Run() int }) (code int, err error) {
	if err := mountns.Enter(); err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("", "trivet-test-")
	if err != nil {
		return 1, err
	}
	// Unlike RemoveAll, Remove fails if a mount remains in the directory, and deletes nothing in that mount.
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
