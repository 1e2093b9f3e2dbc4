package driver

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
)

// thaw thaws what a driver left frozen that was killed in the middle of a snapshot, once
// the pools are open.
func thaw(ctx context.Context, pools *pool.Set, backends *backend.Registry) {
	if pools.AwaitReady(ctx) != nil {
		return
	}
	for _, b := range backend.As[backend.Thawer](backends) {
		if err := b.Thaw(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Thawing what a driver left frozen failed")
		}
	}
}
