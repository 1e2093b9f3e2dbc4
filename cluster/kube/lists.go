package kube

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

var (
	persistentVolumes = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumes"}
	snapshotContents  = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshotcontents"}
)

// pageSize bounds the objects of one response of the API server.
const pageSize = 500

// Pods lists the Pods of a namespace, or of all namespaces if it is empty, that match a label selector.
func (c *Client) Pods(ctx context.Context, namespace, selector string) ([]Pod, error) {
	return list[Pod](ctx, c.api.Resource(pods).Namespace(namespace), selector)
}

// PersistentVolumes lists the PersistentVolumes of a CSI driver.
func (c *Client) PersistentVolumes(ctx context.Context, driver string) (own []PersistentVolume, err error) {
	all, err := list[PersistentVolume](ctx, c.api.Resource(persistentVolumes), "")
	for _, v := range all {
		if v.Spec.CSI.Driver == driver {
			own = append(own, v)
		}
	}
	return own, err
}

// SnapshotContents lists the VolumeSnapshotContents of a CSI driver. It returns none if the cluster has no
// snapshot CRDs.
func (c *Client) SnapshotContents(ctx context.Context, driver string) (own []SnapshotContent, err error) {
	all, err := list[SnapshotContent](ctx, c.api.Resource(snapshotContents), "")
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	for _, s := range all {
		if s.Spec.Driver == driver {
			own = append(own, s)
		}
	}
	return own, err
}

// list lists objects by pages.
func list[T any](ctx context.Context, resource dynamic.ResourceInterface, selector string) (all []T, err error) {
	options := metav1.ListOptions{LabelSelector: selector, Limit: pageSize}
	for {
		page, err := resource.List(ctx, options)
		if err != nil {
			return nil, err
		}
		for _, item := range page.Items {
			v, err := view[T](item.Object)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
		if options.Continue = page.GetContinue(); options.Continue == "" {
			return all, nil
		}
	}
}
