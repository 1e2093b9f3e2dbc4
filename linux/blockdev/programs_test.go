package blockdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

func TestProgramVersion(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	for name, script := range map[string]string{
		"dotted": "echo 'dotted, part of tools v6.2.1 (5-Feb-2023)'", "loud": "echo 'loud 1.47.0' >&2", "mute": "true", "failing": "exit 3",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"dotted": "6.2.1", "loud": "1.47.0", "mute": "", "failing": ""} {
		got, err := blockdev.Program{Name: name}.Version(t.Context())
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := (blockdev.Program{Name: "none"}).Version(t.Context()); !errors.Is(err, command.ErrMissing) {
		t.Errorf("a missing program: %v", err)
	}
}
