package main

import (
	"cmp"
	"context"
	"flag"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// backends are all there are: a new one is a folder and a line here.
var backends = []func(*pool.Set) backend.Backend{
	loop.New,
	nfs.New,
	local.New,
}

func runDriver(args []string) error {
	flags := flag.NewFlagSet("trivet driver", flag.ContinueOnError)
	o := driver.Options{Version: version, Backends: backends, PodUID: os.Getenv("POD_UID"), Namespace: os.Getenv("POD_NAMESPACE")}
	endpoint, config, stateDir := endpointFlag(flags), configFlag(flags), stateDirFlag(flags)
	flags.StringVar(&o.NodeID, "node-id", "", "`name` of this node, in Kubernetes that of its Node object; not for the controller service alone")
	services := flags.String("services", "controller,node", "CSI services to serve: both on one node; of many, node on each and controller once for all")
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9810", "`host:port` of /metrics, /healthz and /readyz; empty for none")
	flags.StringVar(&o.Registry, "plugins-registry", "", "`directory` where a kubelet or trivet volume-manager looks for drivers, to register there; empty: node-driver-registrar does")
	flags.StringVar(&o.Name, "driver-name", cmp.Or(os.Getenv(driverNameVariable), driver.DefaultName), "`name` of the driver, as in StorageClasses; $"+driverNameVariable+" comes before the default")
	klog.InitFlags(flags)
	if err := parse(flags, args); err != nil {
		return err
	}
	o.Endpoint = *endpoint
	o.Services = strings.Split(*services, ",")
	o.StateDir = filepath.Clean(*stateDir)
	o.Worker = []string{ownProgram, workerCommand, "--v=" + flags.Lookup("v").Value.String()}
	var err error
	if o.Config, err = driver.LoadConfig(*config, *config == defaultConfig, o.StateDir); err != nil {
		return err
	}
	if *services == "controller" && os.Getenv("GOGC") == "" {
		// Hundreds of connections are most of its memory: less garbage beside them.
		debug.SetGCPercent(50)
	}
	defer klog.Flush()
	// After the first signal a second one ends the process at once.
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer restore()
	context.AfterFunc(ctx, restore)
	return driver.Run(ctx, o)
}
