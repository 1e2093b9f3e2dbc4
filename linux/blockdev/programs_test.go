package blockdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// TestProgramVersion: Version finds the version in the standard output or standard error of a program.
func TestProgramVersion(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for name, script := range map[string]string{
		"three-part": "echo 'three-part, part of tools v6.2.1 (5-Feb-2023)'", "stderr": "echo 'stderr 1.47.0' >&2", "silent": "true", "failing": "exit 3",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"three-part": "6.2.1", "stderr": "1.47.0", "silent": "", "failing": ""} {
		got, err := blockdev.Program{Name: name}.Version(t.Context())
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: got version %q, %v, want %q", name, got, err, want)
		}
	}
	if _, err := (blockdev.Program{Name: "none"}).Version(t.Context()); !errors.Is(err, command.ErrMissing) {
		t.Errorf("a missing program: got %v, want %v", err, command.ErrMissing)
	}
}
