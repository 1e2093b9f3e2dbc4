package backendtest

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/freeze"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/worker"
)

const workerCommand = "worker"

// Worker runs the test program as the worker of an nfs pool, if Main is its main
// function.
func Worker() []string { return []string{"/proc/self/exe", workerCommand} }

// Main is testenv.Main of a program that is also what the drivers in it start: the worker
// of their nfs pools, and the guardian of what they freeze.
func Main(m *testing.M, backends ...func(*pool.Set) backend.Backend) {
	var err error
	switch {
	case len(os.Args) > 1 && os.Args[1] == workerCommand:
		err = runWorker(backends)
	case len(os.Args) > 1 && os.Args[1] == freeze.Command:
		err = freeze.Guard(os.Args[2:])
	default:
		testenv.Main(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runWorker(backends []func(*pool.Set) backend.Backend) error {
	job, err := worker.ReadJob(os.Stdin)
	if err != nil {
		return err
	}
	return driver.RunWorker(context.Background(), job, backends)
}
