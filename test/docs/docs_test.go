package docs_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/docs"
)

const root = "../.."

// commands returns the blocks of shell commands in the documentation, by name.
func commands(t *testing.T) map[string]docs.Block {
	t.Helper()
	blocks, err := docs.Commands(root)
	if err != nil {
		t.Fatal(err)
	}
	return blocks
}

// checkQuote fails if the block is Go code that its file does not contain.
func checkQuote(b docs.Block) error {
	if b.Language != "go" {
		return nil
	}
	file, err := os.ReadFile(filepath.Join(root, b.File))
	if err == nil && !strings.Contains(string(file), b.Text) {
		err = fmt.Errorf("%s does not contain the block: copy the code from the file again\n%s", b.File, b.Text)
	}
	return err
}

// TestPlan checks that each block has a known language and valid content, and that each block of
// commands is either in a session of the plan or in Nowhere.
func TestPlan(t *testing.T) {
	all, err := docs.Read(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all {
		if !slices.Contains([]string{"sh", "yaml", "text", "go"}, b.Language) {
			t.Errorf("%s: got language %q, want sh, yaml, text or go", b.Name, b.Language)
		}
		if err := checkQuote(b); err != nil {
			t.Errorf("%s: %v", b.Name, err)
		}
		if err := parsesAsYAML(b); err != nil {
			t.Errorf("%s: %v", b.Name, err)
		}
	}
	run := map[string]bool{}
	for _, s := range slices.Concat(docs.Machine, docs.Cluster, slices.Collect(maps.Values(docs.Parts))) {
		for _, step := range s.Steps {
			run[step.Block] = true
		}
	}
	for name := range commands(t) {
		if _, excused := docs.Nowhere[name]; excused == run[name] {
			t.Errorf("%s: got in a session: %t, in Nowhere: %t, want exactly one of them", name, run[name], excused)
		}
	}
	for name := range docs.Nowhere {
		if _, ok := commands(t)[name]; !ok {
			t.Errorf("Nowhere contains %s, but the documentation has no such block: remove it", name)
		}
	}
}

// parsesAsYAML fails if the block is YAML that cannot be parsed.
func parsesAsYAML(b docs.Block) error {
	if b.Language != "yaml" {
		return nil
	}
	d := yaml.NewDecoder(strings.NewReader(b.Text))
	for {
		var v any
		if err := d.Decode(&v); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// TestMachine runs each session of docs.Machine on a clean machine for each filesystem.
func TestMachine(t *testing.T) {
	testenv.RequireRoot(t)
	for _, s := range docs.Machine {
		for _, filesystem := range s.Filesystems {
			t.Run(s.Name+" "+filesystem, func(t *testing.T) { runOnMachine(t, s, filesystem) })
		}
	}
}

// runOnMachine runs a session with machine.sh, which shares only the build caches, the program and the
// test binary with this machine.
func runOnMachine(t *testing.T, s docs.Session, filesystem string) {
	script, err := s.Script(commands(t))
	if err != nil {
		t.Fatal(err)
	}
	machine, err := filepath.Abs("machine.sh")
	if err != nil {
		t.Fatal(err)
	}
	cache := strings.TrimSpace(testenv.Run(t, "go", "env", "GOCACHE"))
	modules := strings.TrimSpace(testenv.Run(t, "go", "env", "GOMODCACHE"))
	tests, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(machine, newFilesystem(t, filesystem), "bash", "-c", script)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "TRIVET="+program, "TESTS="+tests,
		"SHARED="+strings.Join([]string{cache, modules, filepath.Dir(program), filepath.Dir(tests)}, " "))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// newFilesystem mounts a new filesystem of a kind. A btrfs has simple quotas.
func newFilesystem(t *testing.T, kind string) string {
	t.Helper()
	if kind == "btrfs" {
		return testenv.SimpleQuotas(t, "8G")
	}
	return testenv.Filesystem(t, kind, "8G")
}

var (
	// ownCommand matches a trivet command in a block, also one in a container or in a synopsis.
	ownCommand = regexp.MustCompile(`(?m)(?:^|-- |\| |&& |/)trivet ((?:driver|volumes|doctor|pool|volume-manager|version|completion)\b[^#|;&\n]*)`)
	// alternative matches the second and later values in a synopsis, such as |yaml in json|yaml.
	alternative = regexp.MustCompile(`\|[a-z]+`)
	// optional makes a command of a synopsis: it removes the brackets, and replaces TIME by a duration.
	optional = strings.NewReplacer("[", "", "]", "", "TIME", "1s")
)

// TestParse checks that the program accepts the flags of all its commands in the documentation,
// including those that no test runs.
func TestParse(t *testing.T) {
	all, err := docs.Read(root)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, b := range all {
		text := alternative.ReplaceAllString(b.Text, "")
		for _, match := range ownCommand.FindAllStringSubmatch(text, -1) {
			found++
			if err := parses(strings.Fields(optional.Replace(match[1]))); err != nil {
				t.Errorf("%s: trivet %s: %v", b.Name, match[1], err)
			}
		}
	}
	if found < 20 {
		t.Errorf("got %d commands, want at least 20: the pattern does not match them any more", found)
	}
}

// parses runs a command with --help after its words, or before the last word if that may be an
// argument. Help is printed only if the flags before it are valid.
func parses(words []string) error {
	err := printsHelp(append(words, "--help"))
	if last := len(words) - 1; err != nil && !strings.HasPrefix(words[last], "-") {
		return printsHelp(slices.Insert(words, last, "--help"))
	}
	return err
}

// printsHelp fails unless the program accepts the words, which contain --help.
func printsHelp(words []string) error {
	out, err := exec.Command(program, words...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// TestMakeTargets checks that make has the targets that the blocks of commands name.
func TestMakeTargets(t *testing.T) {
	for _, b := range commands(t) {
		for line := range strings.Lines(b.Text) {
			words, _, _ := strings.Cut(line, "#")
			words, _, _ = strings.Cut(words, "&&")
			if target, isMake := strings.CutPrefix(strings.TrimSpace(words), "make "); isMake {
				testenv.Run(t, "make", append([]string{"-n", "-C", root}, strings.Fields(target)...)...)
			}
		}
	}
}
