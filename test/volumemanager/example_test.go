package volumemanager

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
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

// exampleChecks are the files of the examples, in the order in which TestExamples adds them, and the checks
// of their volumes.
var exampleChecks = []struct {
	file  string
	check func(*machine)
}{
	{"classes", func(*machine) {}},
	{"site", (*machine).checkSite},
	{"database", (*machine).checkDatabase},
	{"database-copy", (*machine).checkDatabaseCopy},
	{"database-restored", (*machine).checkDatabaseRestored},
	{"build", (*machine).checkBuild},
	{"agent", (*machine).checkAgent},
	{"media", (*machine).checkMedia},
}

// TestExamples adds all manifests of the examples except web.yaml, which TestExample adds, checks their
// volumes, and removes them. The manager must report no problems.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob(examples + "*.yaml")
	must(t, err)
	if len(files) != len(exampleChecks)+1 {
		t.Errorf("got examples %q, want web.yaml and those in exampleChecks: add a check for the others", files)
	}
	m := newMachineWithDriver(t)
	for _, e := range exampleChecks {
		m.putExample(e.file)
		e.check(m)
		m.awaitStatus(func(s volumemanager.Status) error {
			if len(s.Problems) > 0 {
				return fmt.Errorf("%s.yaml: got problems %+v, want none", e.file, s.Problems)
			}
			return nil
		})
	}
	m.deleteSnapshots()
	m.removeAll("pvc-database")
	must(t, m.checkPool(1))
}

// putExample adds a file of the example after replacements in its text: old, new, old, new.
func (m *machine) putExample(file string, replacements ...string) {
	m.t.Helper()
	m.put(file, strings.NewReplacer(replacements...).Replace(example(m.t, file+".yaml")))
}

// checkSite checks that the directory belongs to the group of the pod, and keeps its content when the
// manifest is removed and added again.
func (m *machine) checkSite() {
	m.t.Helper()
	p := m.await("site")["content"]
	var st syscall.Stat_t
	must(m.t, syscall.Stat(p.Path, &st))
	if len(p.SubPaths) != 2 || st.Gid != 101 || st.Mode&0o777 != 0o770 {
		m.t.Fatalf("got subPaths %+v, group %d and mode %o of the directory; want two, 101 and 770", p.SubPaths, st.Gid, st.Mode)
	}
	write(m.t, p.SubPaths[0].Path)
	m.remove("site")
	m.awaitRemoved("site")
	m.awaitNoClaims()
	m.putExample("site")
	wantWritten(m.t, "the directory of a claim that was added again", m.await("site")["content"].SubPaths[0].Path)
}

// awaitNoClaims waits until all claims are removed.
func (m *machine) awaitNoClaims() {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		if len(s.Claims) > 0 {
			return fmt.Errorf("got claims %+v, want none", s.Claims)
		}
		return nil
	})
}

// checkDatabase checks the paths in the quadlet, and expands the volume while it is in use.
func (m *machine) checkDatabase() {
	m.t.Helper()
	p := m.await("database")
	m.wantPaths("database.container", p, "data", "password")
	if password, err := os.ReadFile(filepath.Join(p["password"].Path, "password")); err != nil || string(password) != "change-me" {
		m.t.Errorf("password: got %q, error %v; want change-me", password, err)
	}
	write(m.t, p["data"].Path)
	m.putExample("database", "storage: 1Gi", "storage: 2Gi")
	m.checkGrown(kind{name: "database", larger: "2Gi"}, p["data"].Path)
}

func (m *machine) checkDatabaseCopy() {
	m.t.Helper()
	wantWritten(m.t, "the copy of the database", m.await("backup")["data"].Path)
}

// checkDatabaseRestored replaces the ID of the snapshot, which does not exist, by that of a new snapshot.
func (m *machine) checkDatabaseRestored() {
	m.t.Helper()
	m.awaitVolume("restored", "data", state.Pending, "01234567")
	m.remove("database-restored")
	m.awaitRemoved("restored")
	m.putExample("database-restored", "loop:default.01234567:before-upgrade", m.createSnapshot("database"))
	wantWritten(m.t, "the restored database", m.await("restored")["data"].Path)
}

// checkBuild checks the limits of both emptyDirs.
func (m *machine) checkBuild() {
	m.t.Helper()
	p := m.await("build")
	m.checkLimit(p["work"], "512Mi")
	if got := sizeOf(m.t, p["tmp"].Path); got != 64<<20 {
		m.t.Errorf("size of volume tmp: got %d, want 64 MiB", got)
	}
}

// checkAgent checks that the directory contains all sources, and that a changed setting appears in it.
func (m *machine) checkAgent() {
	m.t.Helper()
	dir := m.await("agent")["config"].Path
	for _, setting := range []string{`"30s"`, `"60s"`} {
		m.putExample("agent", `"30s"`, setting)
		for file, want := range map[string]string{"agent.toml": "interval = " + setting, "password": "change-me", "labels": `rack="r7"`, "token": "."} {
			eventually(m.t, func() error {
				content, err := os.ReadFile(filepath.Join(dir, file))
				if err == nil && !strings.Contains(string(content), want) {
					err = fmt.Errorf("%s: got %q, want text with %q", file, content, want)
				}
				return err
			})
		}
	}
}

// checkMedia checks that the claim is bound. test/vm runs a server for the plugin; here no server answers.
func (m *machine) checkMedia() {
	m.t.Helper()
	m.putExample("media", "nas.lan", "127.0.0.1")
	m.awaitClaim("media", "Bound", "")
	m.awaitVolume("media", "media", state.Failed, "127.0.0.1")
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
