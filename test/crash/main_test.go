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

// crashingVariable is the path of a driver with crash points, for machines that cannot build one.
const crashingVariable = "TRIVET_TEST_CRASHING"

// crashing is the path of the driver with crash points.
var crashing = os.Getenv(crashingVariable)

func TestMain(m *testing.M) {
	testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &crashing, Build: sixthkind.Build, Flags: []string{"-tags", "crashpoints"}})
}

const (
	// waitTimeout is the maximum duration of each wait. It is far more than any step takes, because other
	// tests run at the same time.
	waitTimeout = 2 * time.Minute
	// interval is the time between two calls of a function by poll.
	interval = 2 * time.Millisecond
)

// poll calls try until it succeeds or returns a finalError. After waitTimeout it returns the last
// error of try. The short interval lets the tests notice states that last only briefly.
func poll(try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
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
			return fmt.Errorf("timed out after %v: %w", waitTimeout, err)
		case <-tick.C:
		}
	}
}

// finalError wraps an error after which poll does not retry.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// must ends the test if err is not nil.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
