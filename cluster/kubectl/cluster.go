package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// The labels of the pods of an installation, and the container and the port of the driver in them.
const (
	selector        = "app.kubernetes.io/name=trivet"
	componentLabel  = "app.kubernetes.io/component"
	controller      = "controller"
	driverContainer = "trivet"
	statusPort      = "metrics"
)

// reportTimeout limits the request for the report. The controller's driver waits up to 5 s for a node.
const reportTimeout = 30 * time.Second

// Cluster is an installation of Trivet in a cluster.
type Cluster struct {
	*kube.Client
	// Namespace is the namespace of the drivers' pods.
	Namespace string
	config    *rest.Config
	paths     *rest.RESTClient
}

// Connect returns the installation in a namespace.
func Connect(config *rest.Config, namespace string) (*Cluster, error) {
	client, err := kube.New(config)
	if err != nil {
		return nil, err
	}
	own := rest.CopyConfig(config)
	own.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	paths, err := rest.UnversionedRESTClientFor(own)
	if err != nil {
		return nil, err
	}
	return &Cluster{Client: client, Namespace: namespace, config: own, paths: paths}, nil
}

// InCluster returns the installation to which this process's pod belongs.
func InCluster(namespace string) (*Cluster, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, err
	}
	return Connect(config, namespace)
}

// DriverPods returns the pods of the drivers: first those of the controller, then those of the nodes by name of the
// node.
func (c *Cluster) DriverPods(ctx context.Context) ([]kube.Pod, error) {
	found, err := c.Pods(ctx, c.Namespace, selector)
	if err != nil {
		return nil, needs(err, "list pods in the namespace "+c.Namespace)
	}
	found = slices.DeleteFunc(found, func(p kube.Pod) bool {
		return !slices.ContainsFunc(p.Spec.Containers, isDriver)
	})
	if len(found) == 0 {
		return nil, fmt.Errorf("namespace %s has no pods with the label %s: give the namespace of the installation by --trivet-namespace", c.Namespace, selector)
	}
	slices.SortFunc(found, func(a, b kube.Pod) int {
		return cmp.Or(strings.Compare(a.Metadata.Labels[componentLabel], b.Metadata.Labels[componentLabel]),
			strings.Compare(a.Spec.NodeName, b.Spec.NodeName), strings.Compare(a.Metadata.Name, b.Metadata.Name))
	})
	return found, nil
}

// IsController reports whether a pod is one of the controller.
func IsController(p kube.Pod) bool { return p.Metadata.Labels[componentLabel] == controller }

// DriverImage returns the image of the driver in a pod.
func DriverImage(p kube.Pod) string {
	i := slices.IndexFunc(p.Spec.Containers, isDriver) // DriverPods returns only pods with it
	return p.Spec.Containers[i].Image
}

func isDriver(c kube.Container) bool { return c.Name == driverContainer }

// needs adds the missing right to an error of the API server.
func needs(err error, right string) error {
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		return fmt.Errorf("this command needs the right to %s: %w", right, err)
	}
	return err
}

// Report returns the report of all drivers. It may be a second old.
func (c *Cluster) Report(ctx context.Context) (r status.Report, err error) {
	pods, err := c.DriverPods(ctx)
	if err != nil {
		return r, err
	}
	return c.request(ctx, pods, "/status")
}

// NodeReport returns the report of the driver on a node, which is collected after the call.
func (c *Cluster) NodeReport(ctx context.Context, node string) (r status.Report, err error) {
	pods, err := c.DriverPods(ctx)
	if err != nil {
		return r, err
	}
	pods = slices.DeleteFunc(pods, func(p kube.Pod) bool { return IsController(p) || p.Spec.NodeName != node })
	return c.request(ctx, pods, "/status?fresh")
}

// request requests a report from the one of the pods that can report.
func (c *Cluster) request(ctx context.Context, pods []kube.Pod, path string) (r status.Report, err error) {
	pod, err := reporter(pods)
	if err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	port, err := c.forward(ctx, pod)
	if err != nil {
		return r, err
	}
	r, err = fetch(ctx, fmt.Sprintf("http://localhost:%d%s", port, path))
	return r, explain(err, pod)
}

// explain adds a pod that does not answer, and where to look for the cause, to an error.
func explain(err error, pod kube.Pod) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: see `kubectl -n %s describe pod %s`", err, pod.Metadata.Namespace, pod.Metadata.Name)
}

// reporter returns the pod whose driver reports about all nodes: a pod of the controller, or in an installation for one
// node the node's pod.
func reporter(pods []kube.Pod) (kube.Pod, error) {
	candidates := slices.DeleteFunc(slices.Clone(pods), func(p kube.Pod) bool { return !IsController(p) })
	if len(candidates) == 0 { // an installation for one node
		candidates = pods
	}
	candidates = slices.DeleteFunc(slices.Clone(candidates), func(p kube.Pod) bool { return p.Metadata.DeletionTimestamp != "" })
	if len(candidates) == 0 {
		return kube.Pod{}, errors.New("the driver is being removed or restarted: all its pods that can report are ending")
	}
	if i := slices.IndexFunc(candidates, kube.Pod.Ready); i >= 0 {
		return candidates[i], nil
	}
	i := slices.IndexFunc(candidates, func(p kube.Pod) bool { return p.Status.Phase == "Running" })
	if i < 0 {
		return kube.Pod{}, fmt.Errorf("no driver that can report is running: see `kubectl -n %s describe pod %s`", candidates[0].Metadata.Namespace, candidates[0].Metadata.Name)
	}
	return candidates[i], nil
}

func fetch(ctx context.Context, url string) (r status.Report, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return r, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return r, fmt.Errorf("requesting the report of the drivers: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return r, fmt.Errorf("requesting the report of the drivers: %s: %s", resp.Status, bytes.TrimSpace(text))
	}
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
		return r, fmt.Errorf("reading the report of the drivers: %w", err)
	}
	return r, nil
}

// forward forwards a free port of this machine to the HTTP port of a driver, until ctx ends. It returns the port.
func (c *Cluster) forward(ctx context.Context, pod kube.Pod) (int, error) {
	target, err := httpPort(pod)
	if err != nil {
		return 0, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return 0, err
	}
	where := c.podURL(http.MethodPost, pod, "portforward")
	spdyDialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, where)
	tunnel, err := portforward.NewSPDYOverWebsocketDialer(where, c.config)
	if err != nil {
		return 0, err
	}
	dialer := portforward.NewFallbackDialer(tunnel, spdyDialer, httpstream.IsUpgradeFailure)
	ready, failed := make(chan struct{}), make(chan error, 1)
	var messages bytes.Buffer
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"localhost"}, []string{"0:" + strconv.Itoa(target)}, ctx.Done(), ready, io.Discard, &messages)
	if err != nil {
		return 0, err
	}
	go func() { failed <- forwarder.ForwardPorts() }()
	select {
	case err := <-failed:
		return 0, needs(fmt.Errorf("forwarding a port to pod %s: %w", pod.Metadata.Name, err), "create pods/portforward in the namespace "+c.Namespace)
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-ready:
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		return 0, err
	}
	return int(ports[0].Local), nil
}

// httpPort returns the port at which the driver in a pod serves HTTP.
func httpPort(pod kube.Pod) (int, error) {
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if isDriver(c) && p.Name == statusPort {
				return p.ContainerPort, nil
			}
		}
	}
	return 0, fmt.Errorf("pod %s: its container %s has no port with the name %s", pod.Metadata.Name, driverContainer, statusPort)
}

func (c *Cluster) podURL(verb string, pod kube.Pod, subresource string) *url.URL {
	return c.paths.Verb(verb).AbsPath("api/v1/namespaces", pod.Metadata.Namespace, "pods", pod.Metadata.Name, subresource).URL()
}

// Run runs a command of trivet in the driver's container of a pod, and returns its output. The exit status 1 is no error if
// there is output, which contains the reason.
func (c *Cluster) Run(ctx context.Context, pod kube.Pod, args ...string) ([]byte, error) {
	where := c.podURL(http.MethodPost, pod, "exec")
	query := url.Values{"container": {driverContainer}, "stdout": {"true"}, "stderr": {"true"}, "command": append([]string{"/usr/local/bin/trivet"}, args...)}
	where.RawQuery = query.Encode()
	websocket, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, where.String())
	if err != nil {
		return nil, err
	}
	spdyExecutor, err := remotecommand.NewSPDYExecutor(c.config, http.MethodPost, where)
	if err != nil {
		return nil, err
	}
	executor, err := remotecommand.NewFallbackExecutor(websocket, spdyExecutor, httpstream.IsUpgradeFailure)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr})
	if exit := (interface{ ExitStatus() int })(nil); errors.As(err, &exit) && exit.ExitStatus() == 1 && stdout.Len() > 0 {
		err = nil
	}
	if err != nil {
		return nil, needs(fmt.Errorf("running trivet %s in pod %s: %w: %s", args[0], pod.Metadata.Name, err, bytes.TrimSpace(stderr.Bytes())), "create pods/exec in the namespace "+c.Namespace)
	}
	return stdout.Bytes(), nil
}

// NotRunning returns why the driver's container of a pod is not running now, or "" if it is, and the commands that show
// more.
func (c *Cluster) NotRunning(ctx context.Context, pod kube.Pod) (reason, remedy string, err error) {
	pods, err := c.DriverPods(ctx)
	if err != nil {
		return "", "", err
	}
	namespace, name := pod.Metadata.Namespace, pod.Metadata.Name
	i := slices.IndexFunc(pods, func(p kube.Pod) bool { return p.Metadata.Name == name })
	if i < 0 {
		return fmt.Sprintf("the pod %s no longer exists", name), "run this command again", nil
	}
	if why := pods[i].NotRunning(driverContainer); why != "" {
		reason = fmt.Sprintf("the container %s of the pod %s is not running: %s", driverContainer, name, why)
	}
	return reason, fmt.Sprintf("see `kubectl -n %s describe pod %s` and `kubectl -n %s logs %s -c %s`", namespace, name, namespace, name, driverContainer), nil
}

// LogOptions select lines of a log.
type LogOptions struct {
	Follow bool
	// Tail is the number of lines from the end; negative: all.
	Tail int
	// Since is the maximum age of lines; 0: any.
	Since time.Duration
}

// Logs opens the log of the driver's container of a pod.
func (c *Cluster) Logs(ctx context.Context, pod kube.Pod, o LogOptions) (io.ReadCloser, error) {
	req := c.paths.Get().AbsPath("api/v1/namespaces", pod.Metadata.Namespace, "pods", pod.Metadata.Name, "log").
		Param("container", driverContainer).Param("follow", strconv.FormatBool(o.Follow))
	if o.Tail >= 0 {
		req.Param("tailLines", strconv.Itoa(o.Tail))
	}
	if o.Since > 0 {
		req.Param("sinceSeconds", strconv.Itoa(max(1, int(o.Since.Seconds()))))
	}
	stream, err := req.Stream(ctx)
	return stream, needs(err, "get pods/log in the namespace "+c.Namespace)
}
