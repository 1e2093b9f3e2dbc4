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

// Worker is the program of driver.Options.Worker: the running program, if Main is its main
// function.
func Worker() string { return reexec.Self }

// Main is testenv.Main for a program that its drivers start as a child process, too: as the
// worker of an nfs pool, and as the guardian of a freeze.
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
