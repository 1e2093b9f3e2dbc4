package driver

import (
	"context"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/trace/otlp"
	"github.com/trivet-csi/trivet/linux/freeze"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// sharedPools returns the nfs pools, which all nodes can reach.
func (o Options) sharedPools() []pool.Config {
	return slices.DeleteFunc(slices.Clone(o.Config.Pools), func(c pool.Config) bool { return !c.Shared() })
}

// workers returns the options of the worker processes of nfs pools.
func (o Options) workers() export.Options {
	job := export.Job{
		DriverName: o.Name, Version: o.Version, Log: o.Log, NodeID: o.NodeID, StateDir: o.StateDir,
		Controller: o.serves("controller"), MaxVolumes: o.Config.MaxVolumesPerNode,
		MountsDir: filepath.Join(o.StateDir, "nfs"),
	}
	if k := o.Config.Kubernetes; k != nil {
		job.KubeletDir = k.KubeletDir
		job.MountsDir = filepath.Join(k.KubeletDir, "plugins", o.Name, "nfs")
	}
	return export.Options{Pools: o.sharedPools(), Kinds: o.Kinds, Job: job, Program: o.Worker, Refused: o.withoutNFS()}
}

// withoutNFS returns the reason why no export may be mounted for pods, or nil if exports may be
// mounted.
func (o Options) withoutNFS() error {
	if k := o.Config.Kubernetes; k == nil || k.NFS || len(o.sharedPools()) > 0 {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "it is on an NFS server, but kubernetes.nfs of the configuration is false, because the mount would hang forever when the driver's pod is replaced: set the chart's value nfs.enabled, which gives the pod the network of the node")
}

// PoolNames returns the names of pools.
func PoolNames(pools []pool.Config) []string {
	var all []string
	for _, c := range pools {
		all = append(all, c.Name)
	}
	return all
}

// Roles returns the functions of the child processes that a driver starts, by role.
func Roles(kinds backend.Kinds) map[string]reexec.Role {
	return map[string]reexec.Role{
		export.Role: func(in reexec.Input) error { return runWorker(in, kinds) },
		freeze.Role: freeze.Guard,
	}
}

// workerFlushTime is how long a worker that ends sends its last spans. The driver kills a worker that does not end soon.
const workerFlushTime = 500 * time.Millisecond

// runWorker is the main function of a worker process (export.Role).
func runWorker(in reexec.Input, kinds backend.Kinds) error {
	// A terminal or a container runtime sends these signals to all processes. The driver drains
	// its calls and then ends the worker.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	job, err := export.ReadJob(in.Decode)
	if err != nil {
		return err
	}
	defer klog.Flush()
	if err := job.Log.Apply(); err != nil {
		return err
	}
	stop := otlp.Start(context.Background(), otlp.Process{Version: job.Version, Node: job.NodeID})
	defer stop(workerFlushTime)
	return export.Run(context.Background(), job, in.Conn, kinds, func(kubeletDir, driver, volumeID string) string {
		return kube.Kubelet{Dir: kubeletDir}.StagingPath(driver, volumeID)
	})
}
