package kube

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Unfit returns why the scheduler would not place a new pod with the specification of a pod on a node, or "". It examines
// the node selector, the node affinity and the taints, as if the node were not cordoned.
func (c *Client) Unfit(ctx context.Context, pod Meta, node string) (string, error) {
	p, err := get[v1.Pod](ctx, c.api.Resource(pods).Namespace(pod.Namespace), pod.Name)
	if err != nil {
		return "", err
	}
	n, err := get[v1.Node](ctx, c.api.Resource(nodes), node)
	if err != nil {
		return "", err
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(&p).Match(&n); err != nil || !fits {
		return "its nodeSelector or nodeAffinity does not select the node", err
	}
	keepsOff := func(t *v1.Taint) bool {
		return t.Effect != v1.TaintEffectPreferNoSchedule && t.Key != v1.TaintNodeUnschedulable
	}
	if taint, found := corev1.FindMatchingUntoleratedTaint(klog.FromContext(ctx), n.Spec.Taints, p.Spec.Tolerations, keepsOff, true); found {
		return fmt.Sprintf("it does not tolerate the taint %s of the node", taint.ToString()), nil
	}
	return "", nil
}

// ToleratesCordon reports whether new pods with the specification of a pod are also placed on cordoned nodes.
func (c *Client) ToleratesCordon(ctx context.Context, pod Meta) (bool, error) {
	p, err := get[v1.Pod](ctx, c.api.Resource(pods).Namespace(pod.Namespace), pod.Name)
	return corev1.TolerationsTolerateTaint(klog.FromContext(ctx), p.Spec.Tolerations, &v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}, true), err
}

// Reachable reports whether a volume can be reached from a node, by its node affinity.
func (c *Client) Reachable(ctx context.Context, persistentVolume, node string) (bool, error) {
	v, err := get[v1.PersistentVolume](ctx, c.api.Resource(persistentVolumes), persistentVolume)
	if err != nil {
		return false, err
	}
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return true, nil
	}
	n, err := get[v1.Node](ctx, c.api.Resource(nodes), node)
	if err != nil {
		return false, err
	}
	terms, err := nodeaffinity.NewNodeSelector(v.Spec.NodeAffinity.Required)
	return err == nil && terms.Match(&n), err
}
