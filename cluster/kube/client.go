package kube

import (
	"cmp"
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

// callTimeout bounds one API call, because a server may accept connections and never answer. A configuration can have
// another limit.
const callTimeout = 10 * time.Second

// The resources that this package reads and writes.
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

// Client calls the API server.
type Client struct {
	api   dynamic.Interface
	paths rest.Interface // for paths that name no object
	// watches and metadata have no timeout, because a watch does not end. watches returns complete
	// objects, metadata only their metadata.
	watches  dynamic.Interface
	metadata metadata.Interface
}

// InCluster connects with the service account of this process's pod.
func InCluster() (*Client, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("connecting to the API server: %w: run this in a pod with a service account", err)
	}
	return New(config)
}

// New returns a client that connects with a configuration.
func New(config *rest.Config) (*Client, error) {
	own := rest.CopyConfig(config)
	own.UserAgent, own.Timeout = "trivet", cmp.Or(config.Timeout, callTimeout)
	// The API server limits its clients itself (API priority and fairness). A limit here
	// would delay 500 nodes that enrol at once.
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

// Node reads a Node. Package apierrors classifies the errors of this and the following methods.
func (c *Client) Node(ctx context.Context, name string) (Node, error) {
	return get[Node](ctx, c.api.Resource(nodes), name)
}

// Pod reads a Pod.
func (c *Client) Pod(ctx context.Context, namespace, name string) (Pod, error) {
	return get[Pod](ctx, c.api.Resource(pods).Namespace(namespace), name)
}

// CSINode reads the drivers that the kubelet of a node has registered.
func (c *Client) CSINode(ctx context.Context, node string) (CSINode, error) {
	return get[CSINode](ctx, c.api.Resource(csiNodes), node)
}

// CSIDriver reads the CSIDriver object of a driver.
func (c *Client) CSIDriver(ctx context.Context, name string) (CSIDriver, error) {
	return get[CSIDriver](ctx, c.api.Resource(csiDrivers), name)
}

// StorageClasses lists the StorageClasses of a provisioner.
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

// Serves reports whether the API server serves a version of an API group. Every service
// account may make this call.
func (c *Client) Serves(ctx context.Context, group, version string) (bool, error) {
	err := c.paths.Get().AbsPath("apis", group, version).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// create creates an object. kind is the object's kind in the API, for example "ConfigMap".
func create(ctx context.Context, resource dynamic.ResourceInterface, apiVersion, kind string, object map[string]any) error {
	object["apiVersion"], object["kind"] = apiVersion, kind
	_, err := resource.Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	return err
}

// put writes fields of an object of the core API. current is the object's metadata as last read. If
// current is empty, the object does not exist and put creates it.
func put(ctx context.Context, resource dynamic.ResourceInterface, kind, name string, current Meta, fields map[string]any) error {
	if current.Name != "" {
		_, err := patch[struct{}](ctx, resource, current, fields)
		return err
	}
	if err := unstructured.SetNestedField(fields, name, "metadata", "name"); err != nil {
		return err
	}
	return create(ctx, resource, "v1", kind, fields)
}

// patch changes fields of an object (JSON merge patch, RFC 7396) and returns the new object. current is
// the object's metadata as last read. If the object has changed since, apierrors.IsConflict is true for
// the error.
func patch[T any](ctx context.Context, resource dynamic.ResourceInterface, current Meta, fields map[string]any, subresources ...string) (T, error) {
	var none T
	if err := unstructured.SetNestedField(fields, current.ResourceVersion, "metadata", "resourceVersion"); err != nil {
		return none, err
	}
	data, err := json.Marshal(fields)
	if err != nil {
		return none, err
	}
	object, err := resource.Patch(ctx, current.Name, types.MergePatchType, data, metav1.PatchOptions{}, subresources...)
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

// view converts an object to T, which contains only the fields in use.
func view[T any](object map[string]any) (T, error) {
	var v T
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, &v)
	return v, err
}
