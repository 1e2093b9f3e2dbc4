package main

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/confine"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/trace/otlp"
)

// The values of --services.
const (
	controllerService = "controller"
	nodeService       = "node"
)

func newDriverCommand() *cobra.Command {
	o := driver.Options{Version: version, Kinds: kinds, Worker: reexec.Self, PodUID: os.Getenv("POD_UID"), Namespace: os.Getenv("POD_NAMESPACE")}
	cmd := &cobra.Command{
		Use:     "driver",
		GroupID: serviceGroup,
		Short:   "Serve CSI on a Unix socket",
		Long: `Runs the CSI driver until SIGTERM or SIGINT. After the first signal it completes the
calls that are running, for at most 20 seconds. A second signal ends it immediately.
Volumes stay mounted when it ends.

The flags describe the process. All other settings are in the configuration file.`,
		Example: `  # A machine without a cluster: all services for this node.
  trivet driver --node-id web-1 --plugins-registry /var/lib/trivet/volume-manager/plugins_registry

  # A cluster: one driver for the node services on each node, and one for the controller.
  trivet driver --services node --node-id worker-1 --config node.yaml
  trivet driver --services controller --config controller.yaml`,
	}
	flags := cmd.Flags()
	flags.StringVar(&o.NodeID, "node-id", "", "`name` of this node, in Kubernetes that of its Node object; unused with --services controller")
	flags.StringSliceVar(&o.Services, "services", []string{controllerService, nodeService}, "CSI `services` to serve: controller,node if there is only one node; in a cluster, node on each node and controller in one place")
	must(cmd.RegisterFlagCompletionFunc("services", cobra.FixedCompletions([]string{"controller,node", controllerService, nodeService}, cobra.ShellCompDirectiveNoFileComp)))
	config, stateDir, endpoint := configFlag(cmd), stateDirFlag(cmd), endpointFlag(cmd)
	directoryFlag(cmd, &o.Registry, "plugins-registry", "", "`directory` where a kubelet or trivet volume-manager finds drivers: the driver registers itself there; empty: node-driver-registrar registers the driver")
	flags.StringVar(&o.Name, "driver-name", cmp.Or(os.Getenv(driverNameVariable), driver.DefaultName), "`name` of the driver, as in StorageClasses; $"+driverNameVariable+" overrides the default")
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9810", "`host:port` of /metrics, /healthz and /readyz; empty for none")
	log := logFlags(cmd)
	cmd.RunE = func(*cobra.Command, []string) (err error) {
		o.Endpoint, o.StateDir, o.Log = *endpoint, filepath.Clean(*stateDir), *log
		if err := o.Log.Apply(); err != nil {
			return err
		}
		confineDriver() // before the configuration is read, because a pipe can be read only once
		if o.Config, err = loadConfig(*config, o.StateDir); err != nil {
			return err
		}
		return runDriver(o)
	}
	return cmd
}

// flushTime is how long a driver that ends sends its last spans.
const flushTime = 3 * time.Second

func runDriver(o driver.Options) error {
	if slices.Equal(o.Services, []string{controllerService}) && os.Getenv("GOGC") == "" {
		// Most of the memory is used by up to thousands of connections. A lower percentage limits the
		// garbage beside them.
		debug.SetGCPercent(25)
	}
	defer klog.Flush()
	ctx, stop := untilSignal()
	defer stop()
	stopTraces := otlp.Start(context.WithoutCancel(ctx), otlp.Process{Version: o.Version, Node: o.NodeID})
	defer stopTraces(flushTime)
	return driver.Run(ctx, o)
}

// confineDriver drops the privileges that the driver does not need. If the driver has such capabilities, the program starts
// again. An error does not end the driver, because pods wait for their volumes, and a kernel can lack seccomp.
func confineDriver() {
	kept, dropErr := confine.DropCapabilities()
	filterErr := confine.RefuseCalls()
	log := klog.Background().WithValues("capabilities", kept, "capabilitiesDropped", dropErr == nil, "callsRefused", filterErr == nil)
	if err := errors.Join(dropErr, filterErr); err != nil {
		log.Error(err, "The driver has more privileges than it needs", "advice", "run a kernel with CONFIG_SECCOMP_FILTER, and let the container and the security modules of the node allow the call")
		return
	}
	log.Info("Confined the driver")
}
