package frozen_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// currentVariable is the path of a driver of the current code, for machines that cannot build one.
const currentVariable = "TRIVET_TEST_PROGRAM"

// current is the path of the driver of the current code.
var current = os.Getenv(currentVariable)

func TestMain(m *testing.M) {
	testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &current})
}

// releaseFile contains the commit of the frozen driver.
const releaseFile = "release"

// buildRelease builds the driver of the commit in releaseFile, from the history of the repository, and returns its path.
func buildRelease(t *testing.T) string {
	t.Helper()
	testenv.Require(t, "history")
	b, err := os.ReadFile(releaseFile)
	if err != nil {
		t.Fatal(err)
	}
	commit := strings.TrimSpace(string(b))
	dir := t.TempDir()
	archive, tree, program := filepath.Join(dir, "tree.tar"), filepath.Join(dir, "tree"), filepath.Join(dir, "trivet")
	// The repository may belong to another user than root, who runs the tests.
	out, err := exec.Command("git", "-c", "safe.directory=*", "-C", "../..", "archive", "-o", archive, commit).CombinedOutput()
	if err != nil {
		t.Fatalf("commit %s of %s: %v: %s: fetch the history of the repository (git fetch --unshallow), or omit these tests with TRIVET_TEST_WITHOUT=history", commit, releaseFile, err, out)
	}
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	testenv.Run(t, "tar", "-C", tree, "-xf", archive)
	build := exec.Command("go", "build", "-trimpath", "-o", program, "./cmd/trivet")
	build.Dir, build.Env = tree, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the driver of commit %s: %v\n%s", commit, err, out)
	}
	return program
}
