package emptydir

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

type host struct {
	plugins.Host
	root string
}

func (h host) Paths() plugins.Paths { return plugins.Paths{Root: h.root} }

// TestForgetLiving: the record of a volume that has come back meanwhile stays, also if it
// cannot be read.
func TestForgetLiving(t *testing.T) {
	p := New(host{root: t.TempDir()})
	v, err := p.volume("data", "pod")
	must(t, err)
	file := p.records() + "/" + v.key + suffix
	must(t, p.save(v.key, &record{}))
	must(t, os.MkdirAll(v.path, 0o700))
	must(t, p.forget(v.key))
	if _, err := os.Stat(file); err != nil {
		t.Errorf("the record of a living volume: %v", err)
	}
	must(t, os.WriteFile(file, []byte("{"), 0o600))
	must(t, p.forget(v.key))
	must(t, p.save(v.key, &record{}))
	must(t, os.Remove(v.path))
	must(t, p.forget(v.key))
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("that of one that is gone: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
