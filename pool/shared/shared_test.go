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
	for content, reason := range map[string]string{`{"version":1,"client":"identity"}`: "names no node", `{"version":2,"surprise":true}`: "version 2, this driver reads version 1: run a driver that reads version 2", "letter": "invalid character"} {
		if err := os.WriteFile(filepath.Join(root, path), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := e.Registered("identity")
		if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), reason) {
			t.Errorf("file with %q: got %v, want ErrPrecondition with %q and %q", content, err, path, reason)
		}
	}
}

// TestLedgerPage: a page of another version is refused. A damaged page counts as empty.
func TestLedgerPage(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "ledger"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	e := &Export{Config: Config{Name: "nas"}, transactions: transactions{file: file}}
	for content, want := range map[string]string{
		"": "", "letter": "", `{"writer":"w/1"}`: "", `{"version":1,"writer":"w/1","growths":0}`: "w/1",
	} {
		writeLedger(t, file, content)
		if got, err := e.readPage(); err != nil || got.Writer != want {
			t.Errorf("page %q: got %+v, %v; want writer %q", content, got, err, want)
		}
	}
	const reason = ".trivet/ledger: record has version 2, this driver reads version 1: run a driver that reads version 2"
	writeLedger(t, file, `{"version":2,"writers":["w/1"]}`)
	if got, err := e.readPage(); !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), reason) {
		t.Errorf("page of version 2: got %+v, %v; want ErrPrecondition with %q", got, err, reason)
	}
}

func writeLedger(t *testing.T, file *os.File, content string) {
	t.Helper()
	if _, err := file.WriteAt([]byte(content), 0); err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(int64(len(content))); err != nil {
		t.Fatal(err)
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
