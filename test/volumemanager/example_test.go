package volumemanager

import (
	"os"
	"testing"
)

// TestExample: what the documentation begins with.
func TestExample(t *testing.T) {
	g := newTrivet(t)
	g.remove("classes") // the example has its own
	text, err := os.ReadFile("../../examples/volume-manager/web.yaml")
	must(t, err)
	g.put("web", string(text))
	p := g.await("web")
	for _, name := range []string{"data", "config", "cache"} {
		if _, err := os.Stat(p[name].Path); err != nil {
			t.Errorf("volume %s: %v", name, err)
		}
	}
	write(t, p["data"].Path)
	g.wantNothing()
	must(t, g.poolHas(0))
}
