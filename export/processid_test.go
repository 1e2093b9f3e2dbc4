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

// TestProcessEnded: a process has ended even if another process has its PID.
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
		t.Errorf("parsed ID: got %v, %v; want %v", again, err, p)
	}
	if p.ended() {
		t.Error("running process: got ended, want not ended")
	}
	if earlier := (processID{p.pid, p.start - 1}); !earlier.ended() {
		t.Error("earlier process with the same PID: got not ended, want ended")
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	if !p.ended() {
		t.Error("killed process: got not ended, want ended")
	}
}

// TestOwnBases: own omits the base mount of an earlier process with the same PID as this process.
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
	if got := b.own(); !slices.Equal(got, []string{own}) {
		t.Errorf("own base mounts: got %q, want %q", got, own)
	}
}

// TestBasesWithoutStartTime: a base mount of an earlier version, whose path contains only a PID, is removed
// and does not count as a mount of this process.
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
	if got := b.own(); len(got) != 0 {
		t.Errorf("own base mounts: got %q, want none", got)
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

// TestProcessEndedWithoutStartTime: if the start time of a process is not known, a process with its PID counts
// as that process only if it was started before this process.
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
		"this process":   {os.Getpid(), true},
		"started later":  {c.Process.Pid, true},
	} {
		p, err := parseProcessID(strconv.Itoa(tc.pid))
		if err != nil || p.ended() != tc.ended {
			t.Errorf("%s: got %+v with ended %t, %v; want %t", name, p, p.ended(), err, tc.ended)
		}
	}
}
