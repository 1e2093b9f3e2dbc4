package driver

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// settleInterval is how often it is tried again to remove what is left of inline volumes.
const settleInterval = 10 * time.Second

// settleInline removes what is left of inline volumes: after the node was restarted, or
// the driver died while it made one. The kubelet may have forgotten them.
func (d *Driver) settleInline(ctx context.Context) {
	if d.pools.AwaitReady(ctx) != nil {
		return
	}
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	said := ""
	for {
		err := d.node.Settle(ctx, settleInterval)
		if err == nil || ctx.Err() != nil {
			return
		}
		if err.Error() != said {
			said = err.Error()
			klog.FromContext(ctx).Error(err, "Not all that is left of inline volumes could be removed; it is tried again")
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
