package driver

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// TestProcessGone: a process that has the ID of one that ended is not that one.
func TestProcessGone(t *testing.T) {
	c := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	start, err := startOf(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	p := process{c.Process.Pid, start}
	if again, err := parseProcess(p.String()); err != nil || again != p {
		t.Errorf("%v was read as %v, %v", p, again, err)
	}
	if p.gone() {
		t.Error("it is gone while it runs")
	}
	if earlier := (process{p.pid, p.start - 1}); !earlier.gone() {
		t.Error("one that was started earlier is not gone")
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	if !p.gone() {
		t.Error("it is not gone after its end")
	}
}

// TestOwnBases: a base mount of an earlier process with this one's ID is not its own.
func TestOwnBases(t *testing.T) {
	b, err := newBases(t.TempDir(), "nas", false)
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(b.dir, b.prefix+self().String()+".1")
	earlier := filepath.Join(b.dir, b.prefix+process{os.Getpid(), self().start - 1}.String()+".1")
	for _, dir := range []string{own, earlier} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got := slices.Collect(b.own()); !slices.Equal(got, []string{own}) {
		t.Errorf("its own are %q", got)
	}
}
