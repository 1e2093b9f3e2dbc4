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
	lives = flag.Int("lives", 20, "lives of pods under kill -9")
	seed  = flag.Uint64("seed", 0, "of what is random; 0: the time")
	// Another driver, and its registrar.
	otherDriver    = flag.String("other-driver", "", "`path` of hostpathplugin, of kubernetes-csi/csi-driver-host-path")
	otherRegistrar = flag.String("other-registrar", "", "`path` of csi-node-driver-registrar, of kubernetes-csi/node-driver-registrar")
)

const (
	// patience is how long anything may take that is waited for.
	patience = 2 * time.Minute
	nodeName = "node-1"
	// driverVariable names the program, where it cannot be built.
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

// until repeats what fails, and returns its last error when patience is over.
func until(what func() error) error {
	return retry.For(context.Background(), patience, func() (bool, error) {
		err := what()
		return err != nil && !errors.Is(err, errFinal), err
	})
}

// errFinal is of what no patience mends.
var errFinal = errors.New("that is final")

// eventually is until, which has to succeed.
func eventually(t *testing.T, what func() error) {
	t.Helper()
	must(t, until(what))
}
