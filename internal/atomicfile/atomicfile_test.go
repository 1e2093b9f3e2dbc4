package atomicfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/internal/atomicfile"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// The temporary file of a killed writer is replaced.
	if err := os.WriteFile(filepath.Join(dir, "record.tmp"), []byte("half and much longer"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, content := range []string{"old", "new", ""} {
		if err := atomicfile.Write(root, "record", []byte(content)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "record")); string(b) != content || err != nil {
			t.Errorf("wrote %q, read %q: %v", content, b, err)
		}
	}
	if err := atomicfile.Write(root, "missing/record", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a missing directory: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestWriteOverLink: a link or a pipe with the name of the temporary file is replaced. The link is not followed,
// and the pipe is not opened.
func TestWriteOverLink(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("another's"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, plant := range map[string]func(path string) error{
		"link": func(path string) error { return os.Symlink("other", path) },
		"pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		if err := plant(filepath.Join(dir, "record.tmp")); err != nil {
			t.Fatal(err)
		}
		if err := atomicfile.Write(root, "record", []byte(name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "record")); string(b) != name || err != nil {
			t.Errorf("%s: read %q, %v", name, b, err)
		}
	}
	if b, err := os.ReadFile(other); string(b) != "another's" || err != nil {
		t.Errorf("the other file contains %q, %v", b, err)
	}
}

// TestWriteFails: a failed write keeps the old content, and removes the temporary file.
func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := os.Mkdir(filepath.Join(dir, "record"), 0o700); err != nil { // a rename cannot replace it
		t.Fatal(err)
	}
	if err := atomicfile.Write(root, "record", []byte("new")); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}
