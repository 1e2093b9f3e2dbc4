package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/sixthkind"
)

// crashingVariable names the driver's binary with crash points. It is for machines that cannot
// build it.
const crashingVariable = "TRIVET_TEST_CRASHING"

// crashing is the driver's binary with the crash points on.
var crashing = os.Getenv(crashingVariable)

func TestMain(m *testing.M) {
	testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &crashing, Build: sixthkind.Build, Flags: []string{"-tags", "crashpoints"}})
}

const (
	// patience is the maximum of every wait. It is far more than any step takes, because other
	// tests run at the same time.
	patience = 2 * time.Minute
	interval = 2 * time.Millisecond
)

// poll calls try until it succeeds, and returns the last error after patience. A final error
// ends it at once. The short interval is a part of the tests: it finds states that last briefly.
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

// finalError is an error that a retry does not resolve.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// must ends the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
