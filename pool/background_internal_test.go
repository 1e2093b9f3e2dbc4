package pool

import (
	"strings"
	"testing"
)

// TestBackgroundRate: the rate is configurable, and an error names the key.
func TestBackgroundRate(t *testing.T) {
	for text, want := range map[string]int64{"": DefaultBackgroundRate, "10Mi": 10 << 20, "1Mi": 1 << 20} {
		if got, err := (Config{BackgroundBytesPerSecond: text}).backgroundRate(); got != want || err != nil {
			t.Errorf("backgroundBytesPerSecond %q: got rate %d and error %v, want %d", text, got, err, want)
		}
	}
	const key = "backgroundBytesPerSecond"
	for _, c := range []Config{
		{Name: "p", Directory: Directory{Path: "/p"}, BackgroundBytesPerSecond: "fast"},
		{Name: "p", Directory: Directory{Path: "/p"}, BackgroundBytesPerSecond: "1023Ki"},
		{Name: "p", NFS: &NFS{Server: "server.example", Export: "/export"}, BackgroundBytesPerSecond: "10Mi"},
	} {
		if got, err := c.Validate(); got != key || err == nil || !strings.HasPrefix(err.Error(), key) {
			t.Errorf("%+v: got key %q and error %v, want %s", c, got, err, key)
		}
	}
}

// TestBackground: a task in a pool of a node has a budget, and one in a pool on an export has none.
func TestBackground(t *testing.T) {
	p, _ := openPlain(t)
	if p.Background(p.trash) == nil {
		t.Error("a task in a pool of a node has no budget")
	}
	if (Config{NFS: &NFS{}}).Background(p.dir) != nil {
		t.Error("a task in a pool on an export has a budget")
	}
}
