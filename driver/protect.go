package driver

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/cluster/status"
)

// protectClaims keeps copies of the claims of classes with the parameter protect, until ctx ends.
func (d *Driver) protectClaims(ctx context.Context) {
	o := d.options
	cluster, err := kubectl.InCluster(o.Namespace)
	if err != nil {
		klog.FromContext(ctx).Error(err, "The claims of classes are not protected")
		return
	}
	protector := move.ClassProtector{Cluster: cluster, PodUID: o.PodUID, Transfers: o.Kinds.Transfer}
	kube.NewClassProtection(kube.ClassProtectionOptions{
		Driver: o.Name, Namespace: o.Namespace, End: protector.End,
		Protect: func(ctx context.Context, all []kube.ProtectedClaim) []error {
			return protector.Protect(ctx, func() status.Report { return d.report(ctx) }, all)
		},
	}).Run(ctx, kube.InCluster)
}
