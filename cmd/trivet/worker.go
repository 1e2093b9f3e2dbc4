package main

import (
	"context"
	"flag"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/worker"
)

// workerCommand runs a process that the driver has started, and nobody else does: it
// is not in the usage. The pool's name is there for those who list processes.
const workerCommand = "worker"

// ownProgram runs the program that this process runs, also when another has been
// installed in its place.
const ownProgram = "/proc/self/exe"

func runWorker(args []string) error {
	flags := flag.NewFlagSet("trivet worker", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	// A signal to all of a terminal's processes or of a container's: the driver
	// drains its calls first.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	job, err := worker.ReadJob(os.Stdin)
	if err != nil {
		return err
	}
	defer klog.Flush()
	return driver.RunWorker(context.Background(), job, backends)
}
