package export

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
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

// TestParseProcessID: an ID without a start time is refused.
func TestParseProcessID(t *testing.T) {
	for _, s := range []string{"", "1", "1-", "1-0", "1-x", "x-1"} {
		if p, err := parseProcessID(s); err == nil {
			t.Errorf("%q: got %+v, want an error", s, p)
		}
	}
}
