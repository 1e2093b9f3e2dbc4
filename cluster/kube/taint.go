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

// StartupTaint returns the key of the taint that keeps pods off a node until the node's driver serves.
// The administrator sets the taint on new nodes; the driver removes it.
func StartupTaint(driver string) string { return driver + "/agent-not-ready" }

// RemoveStartupTaint removes the startup taint from a node as soon as the node's kubelet has registered
// the driver with the node's name as its node ID. It retries until the taint is removed or ctx ends.
func RemoveStartupTaint(ctx context.Context, connect func() (*Client, error), node, driver string) {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "node", node, "taint", StartupTaint(driver))
	errs := errorLog{log: log, message: "Removing the startup taint failed; retrying"}
	_ = backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		done, err := tryRemoveTaint(ctx, log, connect, node, driver)
		errs.report(ctx, err)
		return done, nil
	}) // Until fails only when ctx ends
}

// tryRemoveTaint removes the startup taint if the driver is registered. done is true if the driver is
// registered and the node has no startup taint any more.
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
	patch := taintRemoval(n, StartupTaint(driver))
	if _, err := c.api.Resource(nodes).Patch(ctx, node, types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
		return false, fmt.Errorf("patching nodes/%s: %w", node, err)
	}
	log.Info("Removed the startup taint: the kubelet has registered the driver")
	return true, nil
}

// taintRemoval returns a JSON patch (RFC 6902) that removes the taint with the given key. The API server
// rejects the patch if the node's taints changed since n was read.
func taintRemoval(n Node, key string) []byte {
	remaining := slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t map[string]any) bool { return t["key"] == key })
	patch, _ := json.Marshal([]map[string]any{ // cannot fail, because the values were decoded from JSON
		{"op": "test", "path": "/spec/taints", "value": n.Spec.Taints},
		{"op": "replace", "path": "/spec/taints", "value": remaining},
	})
	return patch
}
