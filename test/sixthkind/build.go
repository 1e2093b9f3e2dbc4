package sixthkind

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// Build builds the trivet program at a path, with Kind added to cmd/trivet/kinds.go. It writes the
// changed file beside the program. It passes flags to go build.
func Build(path string, flags ...string) error {
	mod, err := exec.Command("go", "env", "GOMOD").Output() // the path of go.mod
	if err != nil {
		return err
	}
	kinds := filepath.Join(filepath.Dir(string(mod)), "cmd/trivet/kinds.go")
	source, err := os.ReadFile(kinds)
	if err != nil {
		return err
	}
	changed := strings.NewReplacer(
		"import (\n", "import (\n\t\"github.com/trivet-csi/trivet/test/sixthkind\"\n",
		"\n}", "\n\tsixthkind.Kind,\n}",
	).Replace(string(source))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{kinds: path + ".kinds.go"}})
	if err != nil {
		return err
	}
	err = errors.Join(os.WriteFile(path+".kinds.go", []byte(changed), 0o600), os.WriteFile(path+".json", overlay, 0o600))
	if err != nil {
		return err
	}
	return testenv.Build(path, append(flags, "-overlay", path+".json")...)
}
