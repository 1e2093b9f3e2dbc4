// Package release tests what a release contains: the container image, which the program in release/
// assembles, and, with `make test-release`, the files of a release and their publication.
package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

const root = "../.."

func TestMain(m *testing.M) { testenv.Main(m) }

// buildGo builds a program of a module in the repository, statically and with additional environment.
func buildGo(t *testing.T, module, program string, env ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X main.version=v1.2.3", "-o", out, program)
	cmd.Dir, cmd.Env = filepath.Join(root, module), append(append(os.Environ(), "CGO_ENABLED=0"), env...)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, output)
	}
	return out
}
