package volumemanager

import (
	"context"
	"errors"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

var (
	lives = flag.Int("lives", 20, "number of pods that TestKilled runs while it kills the manager and the driver")
	seed  = flag.Uint64("seed", 0, "seed of the random numbers; 0 means the current time")
	// TestOtherDriver runs a third-party driver and its registrar.
	otherDriver    = flag.String("other-driver", "", "`path` of hostpathplugin, of kubernetes-csi/csi-driver-host-path")
	otherRegistrar = flag.String("other-registrar", "", "`path` of csi-node-driver-registrar, of kubernetes-csi/node-driver-registrar")
)

const (
	// waitLimit is the time limit of until and of waiting for a pod.
	waitLimit = 2 * time.Minute
	nodeName  = "node-1"
	// driverVariable is the environment variable with the path of the program. If it is not set, the
	// program is built.
	driverVariable = "TRIVET_TEST_DRIVER"
)

// program is the binary under test.
var program = os.Getenv(driverVariable)

func TestMain(m *testing.M) { testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &program}) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until calls a function until it returns nil or errFinal, for at most waitLimit. It returns the last
// error.
func until(do func() error) error {
	return retry.For(context.Background(), waitLimit, func() (bool, error) {
		err := do()
		return err != nil && !errors.Is(err, errFinal), err
	})
}

// errFinal is an error that until does not retry.
var errFinal = errors.New("not retried")

// eventually fails the test if until returns an error.
func eventually(t *testing.T, do func() error) {
	t.Helper()
	must(t, until(do))
}
