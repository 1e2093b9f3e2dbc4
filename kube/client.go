package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// callTimeout bounds one call of the API, so that a server which accepts
// connections and says nothing is noticed.
const callTimeout = 10 * time.Second

// The kinds of objects that are read and written.
var (
	nodes           = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	pods            = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	secrets         = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	configMaps      = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	csiNodes        = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "csinodes"}
	csiDrivers      = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "csidrivers"}
	storageClasses  = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "storageclasses"}
	endpointSlices  = schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
	signingRequests = schema.GroupVersionResource{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"}
)

// Client talks to the API server.
type Client struct {
	api   dynamic.Interface
	paths rest.Interface
	// These have no timeout, for a watch has no end. The first sees whole
	// objects, the second their metadata.
	watches  dynamic.Interface
	metadata metadata.Interface
}

// InCluster connects as the service account of the pod that this process runs in.
func InCluster() (*Client, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("connecting to the API server: %w: run in a pod that has a service account", err)
	}
	return New(config)
}

// New connects as config says.
func New(config *rest.Config) (*Client, error) {
	own := rest.CopyConfig(config)
	own.UserAgent, own.Timeout = "trivet", callTimeout
	// The API server shares itself out; 500 nodes that enrol at once do not wait here.
	own.QPS = -1
	own.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	api, err := dynamic.NewForConfig(own)
	if err != nil {
		return nil, err
	}
	paths, err := rest.UnversionedRESTClientFor(own)
	if err != nil {
		return nil, err
	}
	own.Timeout = 0
	watches, err := dynamic.NewForConfig(own)
	if err != nil {
		return nil, err
	}
	meta, err := metadata.NewForConfig(own)
	if err != nil {
		return nil, err
	}
	return &Client{api, paths, watches, meta}, nil
}

// Node reads a node. Errors here and below are the API server's (apierrors).
func (c *Client) Node(ctx context.Context, name string) (Node, error) {
	return get[Node](ctx, c.api.Resource(nodes), name)
}

// Pod reads a pod.
func (c *Client) Pod(ctx context.Context, namespace, name string) (Pod, error) {
	return get[Pod](ctx, c.api.Resource(pods).Namespace(namespace), name)
}

// CSINode reads which drivers the kubelet of a node has registered.
func (c *Client) CSINode(ctx context.Context, node string) (CSINode, error) {
	return get[CSINode](ctx, c.api.Resource(csiNodes), node)
}

// CSIDriver reads what the cluster was told of a driver.
func (c *Client) CSIDriver(ctx context.Context, name string) (CSIDriver, error) {
	return get[CSIDriver](ctx, c.api.Resource(csiDrivers), name)
}

// StorageClasses lists the classes of a provisioner.
func (c *Client) StorageClasses(ctx context.Context, provisioner string) ([]StorageClass, error) {
	list, err := c.api.Resource(storageClasses).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var out []StorageClass
	for _, item := range list.Items {
		class, err := view[StorageClass](item.Object)
		if err != nil {
			return nil, err
		}
		if class.Provisioner == provisioner {
			out = append(out, class)
		}
	}
	return out, nil
}

// Serves tells whether the API server has a group in a version. Every service
// account may ask that.
func (c *Client) Serves(ctx context.Context, group, version string) (bool, error) {
	err := c.paths.Get().AbsPath("apis", group, version).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

func (c *Client) patchNode(ctx context.Context, name string, patch []byte) error {
	_, err := c.api.Resource(nodes).Patch(ctx, name, types.JSONPatchType, patch, metav1.PatchOptions{})
	return err
}

// create makes an object of a kind that is named as in the API.
func create(ctx context.Context, resource dynamic.ResourceInterface, apiVersion, kind string, object map[string]any) error {
	object["apiVersion"], object["kind"] = apiVersion, kind
	_, err := resource.Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	return err
}

// patch changes fields of an object (RFC 7396), if it still is of the version that
// was read, and returns what it is then. apierrors.IsConflict if it is not.
func patch[T any](ctx context.Context, resource dynamic.ResourceInterface, of Meta, fields map[string]any, subresources ...string) (T, error) {
	var none T
	metadata, _ := fields["metadata"].(map[string]any)
	if metadata == nil {
		metadata = map[string]any{}
	}
	metadata["resourceVersion"] = of.ResourceVersion
	fields["metadata"] = metadata
	data, err := json.Marshal(fields)
	if err != nil {
		return none, err
	}
	object, err := resource.Patch(ctx, of.Name, types.MergePatchType, data, metav1.PatchOptions{}, subresources...)
	if err != nil {
		return none, err
	}
	return view[T](object.Object)
}

func get[T any](ctx context.Context, resource dynamic.ResourceInterface, name string) (T, error) {
	object, err := resource.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		var none T
		return none, err
	}
	return view[T](object.Object)
}

// view takes from an object the fields that T has.
func view[T any](object map[string]any) (T, error) {
	var v T
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, &v)
	return v, err
}
