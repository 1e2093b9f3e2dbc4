package backendtest

import (
	"fmt"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Worker returns the value for driver.Options.Worker: the running test program, whose TestMain
// must call Main.
func Worker() string { return reexec.Self }

// Main is testenv.Main for a test program that its drivers also start as a child process: as the worker of an nfs
// pool, and as the guardian of a freeze.
func Main(m *testing.M, kinds ...backend.Kind) {
	isChild, err := reexec.Run(os.Args, driver.Roles(kinds))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if !isChild {
		testenv.Main(m)
	}
}
