package driver

import (
	"context"
	"flag"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/linux/freeze"
)

// Roles returns the roles of the processes that a driver starts.
func Roles(kinds backend.Kinds) map[string]reexec.Role {
	return map[string]reexec.Role{
		export.Role: func(in reexec.Input) error { return runWorker(in, kinds) },
		freeze.Role: freeze.Guard,
	}
}

func runWorker(in reexec.Input, kinds backend.Kinds) error {
	// A terminal or a container runtime sends these signals to all processes. The driver drains
	// its calls and then ends the worker.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	job, err := export.ReadJob(in.Decode)
	if err != nil {
		return err
	}
	defer klog.Flush()
	if job.LogLevel != "" {
		flags := flag.NewFlagSet("", flag.ContinueOnError)
		klog.InitFlags(flags)
		if err := flags.Set("v", job.LogLevel); err != nil {
			return err
		}
	}
	return export.Run(context.Background(), job, in.Conn, kinds, func(kubeletDir, driver, volumeID string) string {
		return kube.Kubelet{Dir: kubeletDir}.StagingPath(driver, volumeID)
	})
}
