package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
)

// Names of the files in a node's directory. The directory has the node's name.
const (
	configFile = "config.yaml"
	socketFile = "csi.sock"
	poolDir    = "pool"
)

// serveNodes runs the drivers of the nodes that have the given directories, until ctx ends.
func serveNodes(ctx context.Context, dirs []string) error {
	const optional = false // the configuration file must exist
	group, ctx := errgroup.WithContext(ctx)
	for _, dir := range dirs {
		config, err := driver.LoadConfig(filepath.Join(dir, configFile), optional, dir, nil)
		if err != nil {
			return err
		}
		o := driver.Options{
			Endpoint: "unix://" + filepath.Join(dir, socketFile), StateDir: dir, NodeID: filepath.Base(dir),
			Name: driver.DefaultName, Version: "scale", Services: []string{"node"}, Config: config,
			Kinds:          backend.Kinds{loop.Kind, local.Kind}, // those that a directory can contain
			HealthInterval: time.Hour,                            // otherwise, all drivers together examine thousands of volumes per second
		}
		group.Go(func() error {
			if err := driver.Run(ctx, o); err != nil {
				return fmt.Errorf("driver of %s: %w", o.NodeID, err)
			}
			return nil
		})
	}
	return group.Wait()
}
