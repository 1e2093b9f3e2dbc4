package volumemanager

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const examples = "../../examples/volume-manager/"

// TestExample runs the first example of the documentation, and compares the paths in its services.
func TestExample(t *testing.T) {
	g := newTrivet(t)
	g.remove("classes") // the example has other classes
	for range 2 {
		g.runExample()
	}
	p := g.await("web")
	g.wantPaths("web.service", p, "data")
	g.wantPaths("web.container", p, "data", "config")
	if config, err := os.ReadFile(filepath.Join(p["config"].Path, "site.conf")); err != nil || string(config) != "root = /data\n" {
		t.Errorf("site.conf: %q, %v", config, err)
	}
	if log, err := os.ReadFile(filepath.Join(p["data"].Path, "log")); err != nil || strings.Count(string(log), "\n") != 2 {
		t.Errorf("two runs wrote %q, %v", log, err)
	}
	g.wantNothing()
	must(t, g.poolHas(0))
}

// runExample runs the script with this manager's directories in place of the default ones.
func (g *ground) runExample() {
	g.t.Helper()
	dir := g.t.TempDir()
	script := strings.ReplaceAll(example(g.t, "web.sh"), "/etc/trivet/manifests", g.manifests)
	must(g.t, os.WriteFile(filepath.Join(dir, "web.sh"), []byte(script), 0o700))
	must(g.t, os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(example(g.t, "web.yaml")), 0o600))
	wrapper := fmt.Sprintf("#!/bin/sh\nshift 2\nexec %q volume-manager wait --root-dir %q \"$@\"\n", program, g.root)
	must(g.t, os.WriteFile(filepath.Join(dir, "trivet"), []byte(wrapper), 0o700))
	c := exec.Command(filepath.Join(dir, "web.sh"))
	c.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := c.CombinedOutput(); err != nil {
		g.t.Fatalf("web.sh: %v: %s", err, out)
	}
}

// wantPaths compares the paths in a unit with those of a pod's volumes.
func (g *ground) wantPaths(unit string, p pod, volumes ...string) {
	g.t.Helper()
	found := regexp.MustCompile(`/var/lib/trivet/volume-manager(/pods/[^:\s]+)`).FindAllStringSubmatch(example(g.t, unit), -1)
	if len(found) != len(volumes) {
		g.t.Fatalf("%s has the paths %q", unit, found)
	}
	for i, volume := range volumes {
		if got := g.root + found[i][1]; got != p[volume].Path {
			g.t.Errorf("%s has %s for volume %s, which is at %s", unit, got, volume, p[volume].Path)
		}
	}
}

func example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(examples + name)
	must(t, err)
	return string(text)
}
