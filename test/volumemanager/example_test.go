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

// TestExample runs the example in docs/volume-manager.md twice, and checks that the paths in its units
// are those of the pod's volumes.
func TestExample(t *testing.T) {
	m := newMachineWithDriver(t)
	m.remove("classes") // the example has other classes
	for range 2 {
		m.runExample()
	}
	p := m.await("web")
	m.wantPaths("web.service", p, "data")
	m.wantPaths("web.container", p, "data", "config")
	if config, err := os.ReadFile(filepath.Join(p["config"].Path, "site.conf")); err != nil || string(config) != "root = /data\n" {
		t.Errorf("site.conf: got %q, error %v; want root = /data", config, err)
	}
	if log, err := os.ReadFile(filepath.Join(p["data"].Path, "log")); err != nil || strings.Count(string(log), "\n") != 2 {
		t.Errorf("log of two runs: got %q, error %v; want 2 lines", log, err)
	}
	m.removeAll()
	must(t, m.checkPool(0))
}

// runExample runs the script with this manager's directories in place of the default ones.
func (m *machine) runExample() {
	m.t.Helper()
	dir := m.t.TempDir()
	script := strings.ReplaceAll(example(m.t, "web.sh"), "/etc/trivet/manifests", m.manifests)
	must(m.t, os.WriteFile(filepath.Join(dir, "web.sh"), []byte(script), 0o700))
	must(m.t, os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(example(m.t, "web.yaml")), 0o600))
	// The script runs `trivet volume-manager wait`. The wrapper adds the root directory of this manager.
	wrapper := fmt.Sprintf("#!/bin/sh\nshift 2\nexec %q volume-manager wait --root-dir %q \"$@\"\n", program, m.root)
	must(m.t, os.WriteFile(filepath.Join(dir, "trivet"), []byte(wrapper), 0o700))
	c := exec.Command(filepath.Join(dir, "web.sh"))
	c.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := c.CombinedOutput(); err != nil {
		m.t.Fatalf("web.sh: got error %v, output: %s", err, out)
	}
}

// wantPaths fails the test unless a unit contains the paths of a pod's volumes, in this order.
func (m *machine) wantPaths(unit string, p pod, volumes ...string) {
	m.t.Helper()
	found := regexp.MustCompile(`/var/lib/trivet/volume-manager(/pods/[^:\s]+)`).FindAllStringSubmatch(example(m.t, unit), -1)
	if len(found) != len(volumes) {
		m.t.Fatalf("%s: got paths %q, want %d", unit, found, len(volumes))
	}
	for i, volume := range volumes {
		if got := m.root + found[i][1]; got != p[volume].Path {
			m.t.Errorf("%s: path of volume %s: got %s, want %s", unit, volume, got, p[volume].Path)
		}
	}
}

// example returns the content of a file of the example.
func example(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(examples + name)
	must(t, err)
	return string(text)
}
