package export

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestProcessEnded: a process that has the PID of an ended process is not that process.
func TestProcessEnded(t *testing.T) {
	c := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	start, err := startOf(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	p := processID{c.Process.Pid, start}
	if again, err := parseProcessID(p.String()); err != nil || again != p {
		t.Errorf("%v was read as %v, %v", p, again, err)
	}
	if p.ended() {
		t.Error("a running process has ended")
	}
	if earlier := (processID{p.pid, p.start - 1}); !earlier.ended() {
		t.Error("an earlier process with the PID has not ended")
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	if !p.ended() {
		t.Error("the process has not ended after its end")
	}
}

// TestOwnBases: a base mount of an earlier process with this process's PID is not its own.
func TestOwnBases(t *testing.T) {
	b, err := newBases(t.TempDir(), "nas", false)
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(b.dir, b.prefix+self().String()+".1")
	earlier := filepath.Join(b.dir, b.prefix+processID{os.Getpid(), self().start - 1}.String()+".1")
	for _, dir := range []string{own, earlier} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got := slices.Collect(b.own()); !slices.Equal(got, []string{own}) {
		t.Errorf("the own base mounts are %q", got)
	}
}

// TestBasesWithoutStartTime: base mounts of a version that recorded only PIDs are removed, and never count as
// those of this process.
func TestBasesWithoutStartTime(t *testing.T) {
	testenv.RequireRoot(t)
	b, err := newBases(t.TempDir(), "nas", false)
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(b.dir, b.prefix+strconv.Itoa(os.Getpid())+".1")
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.UMOUNT_NOFOLLOW) })
	if got := slices.Collect(b.own()); len(got) != 0 {
		t.Errorf("the own base mounts are %q", got)
	}
	b.clear(t.Context())
	for end := time.Now().Add(inheritTime); ; time.Sleep(time.Millisecond) {
		_, err := os.Lstat(at)
		if errors.Is(err, fs.ErrNotExist) {
			return
		}
		if err != nil || time.Now().After(end) {
			t.Fatalf("%s was not removed: %v", at, err)
		}
	}
}

// TestProcessEndedWithoutStartTime: a running process may have made a base mount of an earlier version if it was
// started before this process.
func TestProcessEndedWithoutStartTime(t *testing.T) {
	c := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	for name, tc := range map[string]struct {
		pid   int
		ended bool
	}{
		"started before": {os.Getppid(), false},
		"this one":       {os.Getpid(), true},
		"started later":  {c.Process.Pid, true},
	} {
		p, err := parseProcessID(strconv.Itoa(tc.pid))
		if err != nil || p.ended() != tc.ended {
			t.Errorf("%s: %+v, %v: ended is %v", name, p, err, p.ended())
		}
	}
}
