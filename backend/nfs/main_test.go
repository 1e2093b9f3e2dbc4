package nfs_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/worker"
)

// workerCommand has this program be the worker process of a driver under test.
const workerCommand = "worker"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == workerCommand {
		if err := runWorker(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}

func runWorker() error {
	job, err := worker.ReadJob(os.Stdin)
	if err != nil {
		return err
	}
	return driver.RunWorker(context.Background(), job, []func(*pool.Set) backend.Backend{nfs.New})
}
