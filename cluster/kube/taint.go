package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// StartupTaint is the key of the taint that keeps pods off a node until its driver serves. The
// administrator sets it on new nodes; the driver removes it.
func StartupTaint(driver string) string { return driver + "/agent-not-ready" }

// RemoveStartupTaint removes the startup taint from a node when the kubelet there has registered
// the driver under the node's name. It retries until that succeeded or ctx ends.
func RemoveStartupTaint(ctx context.Context, connect func() (*Client, error), node, driver string) {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "node", node, "taint", StartupTaint(driver))
	errs := errorLog{log: log, message: "Removing the startup taint failed; retrying"}
	_ = backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		done, err := tryRemoveTaint(ctx, log, connect, node, driver)
		errs.report(ctx, err)
		return done, nil
	}) // it fails only when ctx ends
}

// tryRemoveTaint returns done if the driver is registered and the node does not have the taint.
func tryRemoveTaint(ctx context.Context, log klog.Logger, connect func() (*Client, error), node, driver string) (done bool, err error) {
	c, err := connect()
	if err != nil {
		return false, err
	}
	registered, err := c.CSINode(ctx, node)
	if err != nil {
		return false, fmt.Errorf("reading csinodes/%s: %w", node, err)
	}
	if d, ok := registered.Driver(driver); !ok || d.NodeID != node {
		return false, nil
	}
	n, err := c.Node(ctx, node)
	if err != nil {
		return false, fmt.Errorf("reading nodes/%s: %w", node, err)
	}
	if !n.HasTaint(StartupTaint(driver)) {
		return true, nil
	}
	patch := withoutTaint(n, StartupTaint(driver))
	if _, err := c.api.Resource(nodes).Patch(ctx, node, types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
		return false, fmt.Errorf("patching nodes/%s: %w", node, err)
	}
	log.Info("Removed the startup taint: the kubelet has registered the driver")
	return true, nil
}

// withoutTaint returns a JSON patch (RFC 6902). The API server refuses it if the node's taints
// changed since they were read.
func withoutTaint(n Node, key string) []byte {
	others := slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t map[string]any) bool { return t["key"] == key })
	patch, _ := json.Marshal([]map[string]any{ // the values came from JSON
		{"op": "test", "path": "/spec/taints", "value": n.Spec.Taints},
		{"op": "replace", "path": "/spec/taints", "value": others},
	})
	return patch
}
