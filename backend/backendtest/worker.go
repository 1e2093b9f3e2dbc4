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

// Main replaces testenv.Main in a test program that uses Worker. The drivers in such a program start the program
// again as a child process: as the worker of an nfs pool, or as the process that thaws frozen filesystems if the
// driver dies (freeze.Guard). In a child process Main runs only that role.
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
