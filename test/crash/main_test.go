package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// crashingVariable names the driver's binary with the crash points on, where it
// cannot be built.
const crashingVariable = "TRIVET_TEST_CRASHING"

// crashing is the driver's binary with the crash points on.
var crashing = os.Getenv(crashingVariable)

func TestMain(m *testing.M) { os.Exit(run(m)) }

// run puts all that the tests make below one folder, so that what they leak can
// be told from what others on this machine do.
func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "trivet-crash-")
	if err != nil {
		return fail(err)
	}
	if err := os.Setenv("TMPDIR", dir); err != nil {
		return fail(err)
	}
	code := buildAndRun(m, dir)
	if err := leaks(dir); err != nil {
		return fail(err) // the folder stays: it has something mounted in it
	}
	if err := os.RemoveAll(dir); err != nil {
		return fail(err)
	}
	return code
}

func buildAndRun(m *testing.M, dir string) int {
	if crashing == "" {
		crashing = filepath.Join(dir, "trivet")
		if err := build(crashing, "-tags", "crashpoints"); err != nil {
			return fail(err)
		}
	}
	return m.Run()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "FAIL:", err)
	return 1
}

func build(to string, flags ...string) error {
	args := append([]string{"build", "-o", to}, flags...)
	cmd := exec.Command("go", append(args, "github.com/trivet-csi/trivet/cmd/trivet")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

const (
	// patience is how long anything may take that is waited for; far more than
	// it does, since other tests run beside these.
	patience = 2 * time.Minute
	interval = 2 * time.Millisecond
)

// poll tries until there is no error, and returns the last one when patience is
// over. An error that is final ends it at once.
func poll(try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := try(ctx)
		var end finalError
		if err == nil || errors.As(err, &end) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("still so after %v: %w", patience, err)
		case <-tick.C:
		}
	}
}

// finalError is one that trying again does not mend.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// must ends the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
