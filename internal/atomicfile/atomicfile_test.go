package atomicfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/internal/atomicfile"
)

// TestWrite: Write replaces the content, and leaves no temporary file.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// The temporary file of a killed writer is replaced.
	if err := os.WriteFile(filepath.Join(dir, "record.tmp"), []byte("incomplete and much longer"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, content := range []string{"old", "new", ""} {
		if err := atomicfile.Write(root, "record", []byte(content)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "record")); string(b) != content || err != nil {
			t.Errorf("got content %q, %v, want %q", b, err, content)
		}
	}
	if err := atomicfile.Write(root, "missing/record", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Write to a missing directory: got %v, want ErrNotExist", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("got directory entries %v, %v, want only record", entries, err)
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
	if err := os.WriteFile(other, []byte("unchanged"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, create := range map[string]func(path string) error{
		"link": func(path string) error { return os.Symlink("other", path) },
		"pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		if err := create(filepath.Join(dir, "record.tmp")); err != nil {
			t.Fatal(err)
		}
		if err := atomicfile.Write(root, "record", []byte(name)); err != nil {
			t.Errorf("temporary file is a %s: got %v, want no error", name, err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "record")); string(b) != name || err != nil {
			t.Errorf("temporary file is a %s: got content %q, %v, want %q", name, b, err, name)
		}
	}
	if b, err := os.ReadFile(other); string(b) != "unchanged" || err != nil {
		t.Errorf("target of the link: got content %q, %v, want it unchanged", b, err)
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
	if err := os.Mkdir(filepath.Join(dir, "record"), 0o700); err != nil { // a rename cannot replace a directory
		t.Fatal(err)
	}
	if err := atomicfile.Write(root, "record", []byte("new")); err == nil {
		t.Error("Write with the name of a directory: got no error, want one")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("got directory entries %v, %v, want only record", entries, err)
	}
}
