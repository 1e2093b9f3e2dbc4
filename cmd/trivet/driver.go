package main

import (
	"cmp"
	"flag"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/reexec"
)

func runDriver(args []string) error {
	flags := flag.NewFlagSet("trivet driver", flag.ContinueOnError)
	o := driver.Options{Version: version, Kinds: kinds, PodUID: os.Getenv("POD_UID"), Namespace: os.Getenv("POD_NAMESPACE")}
	endpoint, config, stateDir := endpointFlag(flags), configFlag(flags), stateDirFlag(flags)
	flags.StringVar(&o.NodeID, "node-id", "", "`name` of this node, in Kubernetes that of its Node object; unused with --services controller")
	services := flags.String("services", "controller,node", "CSI services to serve: controller,node if there is only one node; in a cluster, node on each node and controller in one place")
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9810", "`host:port` of /metrics, /healthz and /readyz; empty for none")
	flags.StringVar(&o.Registry, "plugins-registry", "", "`directory` where a kubelet or trivet volume-manager finds drivers: the driver registers itself there; empty: node-driver-registrar registers the driver")
	flags.StringVar(&o.Name, "driver-name", cmp.Or(os.Getenv(driverNameVariable), driver.DefaultName), "`name` of the driver, as in StorageClasses; $"+driverNameVariable+" overrides the default")
	klog.InitFlags(flags)
	if err := parse(flags, args); err != nil {
		return err
	}
	o.Endpoint = *endpoint
	o.Services = strings.Split(*services, ",")
	o.StateDir = filepath.Clean(*stateDir)
	o.Worker, o.LogLevel = reexec.Self, flags.Lookup("v").Value.String()
	var err error
	if o.Config, err = loadConfig(*config, o.StateDir); err != nil {
		return err
	}
	if *services == "controller" && os.Getenv("GOGC") == "" {
		// Most of the memory is used by hundreds of connections. A lower percentage limits the garbage
		// beside them.
		debug.SetGCPercent(50)
	}
	defer klog.Flush()
	ctx, stop := untilSignal()
	defer stop()
	return driver.Run(ctx, o)
}
