package shared

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestForeignClientFile: a file that no driver wrote in place of a client's file causes an error with its path and
// the reason.
func TestForeignClientFile(t *testing.T) {
	root := t.TempDir()
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	e := &Export{Config: Config{Name: "nas", Dir: dir}}
	path := clientPath("identity")
	if err := os.MkdirAll(filepath.Join(root, clientsDir), 0o700); err != nil {
		t.Fatal(err)
	}
	for content, reason := range map[string]string{`{"client":"identity"}`: "names no node", "letter": "invalid character"} {
		if err := os.WriteFile(filepath.Join(root, path), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := e.Registered("identity")
		if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), reason) {
			t.Errorf("file with %q: got %v, want ErrPrecondition with %q and %q", content, err, path, reason)
		}
	}
}

// FuzzEntry: parseEntry refuses a name, or returns all its parts.
func FuzzEntry(f *testing.F) {
	f.Add("v.0123.4096")
	f.Add("v.0123.4096.grow")
	f.Add("..")
	f.Fuzz(func(t *testing.T, s string) {
		e, ok := parseEntry(s)
		if ok && (e.bytes() < 0 || e.volume+"."+e.owner+"."+e.rest != s) {
			t.Errorf("%q: got %+v with %d bytes, want parts that make up the name and no negative size", s, e, e.bytes())
		}
	})
}
