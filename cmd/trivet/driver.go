package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

const defaultConfig = "/etc/trivet/config.yaml"

// backends are all there are: a new one is a folder and a line here.
var backends = []func(*pool.Set) backend.Backend{
	loop.New,
}

func runDriver(args []string) error {
	flags := flag.NewFlagSet("trivet driver", flag.ContinueOnError)
	o := driver.Options{Version: version, Backends: backends}
	flags.StringVar(&o.Endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "`unix:///path` of the CSI socket; the default is $CSI_ENDPOINT")
	flags.StringVar(&o.NodeID, "node-id", "", "`name` of this node, in Kubernetes that of its Node object")
	config := flags.String("config", defaultConfig, "configuration `file`; if the default one is not there, one pool below the state directory is served")
	flags.StringVar(&o.StateDir, "state-dir", "/var/lib/trivet", "`directory` of this node's state")
	services := flags.String("services", "controller,node", "CSI services to serve: controller, node or both")
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9810", "`host:port` of /metrics, /healthz and /readyz; empty for none")
	flags.StringVar(&o.Name, "driver-name", "csi.trivet.dev", "`name` of the driver, as in StorageClasses")
	klog.InitFlags(flags)
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: flags begin with --", flags.Arg(0))
	}
	o.Services = strings.Split(*services, ",")
	o.StateDir = filepath.Clean(o.StateDir)
	var err error
	if o.Config, err = driver.LoadConfig(*config, *config == defaultConfig, o.StateDir); err != nil {
		return err
	}
	defer klog.Flush()
	// After the first signal a second one ends the process at once.
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer restore()
	context.AfterFunc(ctx, restore)
	return driver.Run(ctx, o)
}
