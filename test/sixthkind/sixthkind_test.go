package sixthkind_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { backendtest.Main(m, targets.Backends...) }

func TestConformance(t *testing.T) { targets.Run(t, "sixth") }

// TestDemo runs the demo with a program that has the kind: the program of this tree with one
// more line in cmd/trivet/kinds.go.
func TestDemo(t *testing.T) {
	testenv.Require(t, "root")
	const root = "../.."
	kinds, err := filepath.Abs(root + "/cmd/trivet/kinds.go")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(kinds)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.NewReplacer(
		"import (\n", "import (\n\t\"github.com/trivet-csi/trivet/test/sixthkind\"\n",
		"\n}", "\n\tsixthkind.Kind,\n}",
	).Replace(string(source))
	dir := t.TempDir()
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{kinds: dir + "/kinds.go"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"kinds.go": []byte(changed), "overlay.json": overlay} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	binary := filepath.Join(dir, "trivet")
	if err := testenv.Build(binary, "-overlay", dir+"/overlay.json"); err != nil {
		t.Fatal(err)
	}
	out := testenv.Run(t, "go", "run", root+"/test/demo", "--binary", binary, "--backend", "sixth", "--fs-type", "")
	for _, want := range []string{"NodePublishVolume", "written by one pod, read by another", "Nothing is left"} {
		if !strings.Contains(out, want) {
			t.Errorf("the demo does not print %q:\n%s", want, out)
		}
	}
	t.Log(out)
}
