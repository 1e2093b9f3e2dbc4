package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Build builds the trivet program statically, with -trimpath as in releases, so that packages are not compiled twice. flags are flags of
// go build.
func Build(path string, flags ...string) error {
	args := append([]string{"build", "-trimpath", "-o", path}, flags...)
	cmd := exec.Command("go", append(args, "github.com/trivet-csi/trivet/cmd/trivet")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

// WithProgram builds the trivet program before it runs the tests of a package. It is an argument of Main.
type WithProgram struct {
	*testing.M
	// Path is the path of the program. If *Path is empty, Run builds the program and sets *Path.
	Path *string
	// Build builds the program at a path with Flags. If it is nil, the function Build is used.
	Build func(path string, flags ...string) error
	Flags []string
	// Root is true if all tests that use the program need root. If the run omits root, the program is not built.
	Root bool
}

// Run implements the interface that Main takes.
func (p WithProgram) Run() int {
	if *p.Path != "" || p.Root && IsWithout("root") {
		return p.M.Run()
	}
	dir, err := os.MkdirTemp("", "bin")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		*p.Path = filepath.Join(dir, "trivet")
		if p.Build == nil {
			p.Build = Build
		}
		err = p.Build(*p.Path, p.Flags...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		return 1
	}
	return p.M.Run()
}
