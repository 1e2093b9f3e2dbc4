package backend

import (
	"context"

	"k8s.io/klog/v2"
)

// Thaw thaws what a process left frozen that was killed during a snapshot, once ready has
// returned nil: then the pools are open.
func (r *Registry) Thaw(ctx context.Context, ready func(context.Context) error) {
	if ready(ctx) != nil {
		return
	}
	for _, b := range As[Thawer](r) {
		if err := b.Thaw(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Thawing the filesystems that a killed process left frozen failed")
		}
	}
}
