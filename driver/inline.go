package driver

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// cleanUpInterval is the time between two attempts to remove orphaned inline volumes.
const cleanUpInterval = 10 * time.Second

// cleanUpInline removes orphaned inline volumes: those of before a restart of the node, and those
// that a driver was creating when it was killed. The kubelet does not unpublish all of them.
func (d *Driver) cleanUpInline(ctx context.Context) {
	if d.pools.AwaitReady(ctx) != nil {
		return
	}
	tick := time.NewTicker(cleanUpInterval)
	defer tick.Stop()
	logged := ""
	for {
		err := d.node.CleanUpInline(ctx, cleanUpInterval)
		if err == nil || ctx.Err() != nil {
			return
		}
		if err.Error() != logged {
			logged = err.Error()
			klog.FromContext(ctx).Error(err, "Removing orphaned inline volumes failed; retrying", "interval", cleanUpInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
