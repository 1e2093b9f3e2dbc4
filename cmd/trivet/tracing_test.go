package main_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// collected is what a collector received.
type collected struct {
	mu    sync.Mutex
	raw   []byte // all requests
	spans []span
}

// span is a received span with the attributes of its process.
type span struct {
	*trace.Span
	process map[string]string
}

// startCollector starts a collector that receives spans over HTTP, and returns its address.
func startCollector(t *testing.T) (*collected, string) {
	t.Helper()
	c := &collected{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var request collector.ExportTraceServiceRequest
		if err := errors.Join(err, proto.Unmarshal(body, &request)); err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: got an unreadable request: %v", r.URL.Path, err)
		}
		c.add(body, &request)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	t.Cleanup(server.Close)
	return c, server.URL
}

// add adds a request.
func (c *collected) add(body []byte, request *collector.ExportTraceServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw = append(c.raw, body...)
	for _, r := range request.GetResourceSpans() {
		process := attributes(r.GetResource().GetAttributes())
		for _, s := range r.GetScopeSpans() {
			for _, received := range s.GetSpans() {
				c.spans = append(c.spans, span{received, process})
			}
		}
	}
}

func attributes(list []*common.KeyValue) map[string]string {
	byKey := map[string]string{}
	for _, a := range list {
		byKey[a.GetKey()] = a.GetValue().GetStringValue()
	}
	return byKey
}

// below returns the spans of a name that are directly below a parent; with a nil parent, those that are roots.
func (c *collected) below(parent []byte, name string) (found []span) {
	for _, s := range c.spans {
		if s.GetName() == name && bytes.Equal(s.GetParentSpanId(), parent) {
			found = append(found, s)
		}
	}
	return found
}

// path returns the span that a path of names leads to, from a root. It fails the test unless each name has one span.
func (c *collected) path(t *testing.T, names ...string) (last span) {
	t.Helper()
	for i, name := range names {
		found := c.below(last.GetSpanId(), name)
		if len(found) != 1 {
			t.Fatalf("%q: got %d spans below %q, want 1; all spans:\n%s", names, len(found), names[:i], c)
		}
		last = found[0]
	}
	return last
}

// String lists the spans.
func (c *collected) String() string {
	var text strings.Builder
	for _, s := range c.spans {
		fmt.Fprintf(&text, "%x below %x: %s %v %v on %s\n", s.GetSpanId(), s.GetParentSpanId(), s.GetName(), s.GetKind(), s.GetStatus(), s.process["host.name"])
	}
	return text.String()
}

// stop ends a driver with SIGTERM, and returns its log and how long it took.
func (p *process) stop(t *testing.T) (log string, took time.Duration) {
	t.Helper()
	began := time.Now()
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	must(t, p.cmd.Wait())
	took = time.Since(began)
	text, err := os.ReadFile(p.log)
	must(t, err)
	return string(text), took
}

// startPair starts the driver of a node with a pool for images, and the controller's driver, which forwards calls to it.
func startPair(t *testing.T, environment ...string) (controller, node *process) {
	t.Helper()
	const name = "node-1.example"
	cluster := backendtest.NewCluster(t)
	listen, pool := backendtest.FreeAddress(t), testenv.Filesystem(t, "xfs", "2G")+"/pool"
	member := func(text string) (config, state string) {
		state = t.TempDir()
		config = filepath.Join(state, "config.yaml")
		must(t, os.WriteFile(config, []byte(text), 0o600))
		return config, state
	}
	config, state := member("pools: [{name: fast, directory: {path: " + pool + "}}]\nforwarding: {listen: \"" + listen + "\"}\n")
	cluster.Certify(t, filepath.Join(state, "certificates"), pki.NodeURI(backendtest.DriverName, name), x509.ExtKeyUsageServerAuth)
	node = startProcess(t, environment, config, state, "--services", "node", "--node-id", name, "-v", "10")
	config, state = member("forwarding: {nodes: [{name: " + name + ", address: \"" + listen + "\"}]}\n")
	cluster.Certify(t, filepath.Join(state, "certificates"), pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	return startProcess(t, environment, config, state, "--services", "controller", "-v", "10"), node
}

// TestTraces: the spans of a call are those of the controller's driver, and below them those of the node's driver with its
// steps. A job has a trace of its own, which is linked to the call. Secrets are in no span.
func TestTraces(t *testing.T) {
	const passphrase, token = "correct horse battery staple", "collector-token"
	testenv.RequireRoot(t)
	collected, endpoint := startCollector(t)
	controller, node := startPair(t, "OTEL_EXPORTER_OTLP_ENDPOINT="+endpoint, "OTEL_RESOURCE_ATTRIBUTES=service.namespace=storage",
		"OTEL_EXPORTER_OTLP_HEADERS=authorization="+token)
	secrets := map[string]string{"passphrase": passphrase}
	c := mountCapability("xfs")
	create := func(name string, source *csi.VolumeContentSource) string {
		v, err := controller.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 512 << 20}, VolumeCapabilities: []*csi.VolumeCapability{c},
			VolumeContentSource: source, Secrets: secrets,
		})
		must(t, err)
		return v.GetVolume().GetVolumeId()
	}
	id := create("first", nil)
	stage := func(id, staging string) error {
		_, err := node.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, VolumeCapability: c, Secrets: secrets,
		})
		return err
	}
	staging := t.TempDir()
	must(t, stage(id, staging))
	_, err := node.node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
	create("copy", &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}})
	failed := status.Convert(stage(id, "relative"))
	if failed.Code() != codes.InvalidArgument {
		t.Errorf("got %v for a relative path, want INVALID_ARGUMENT", failed)
	}
	log, _ := controller.stop(t)
	nodeLog, _ := node.stop(t)

	created := checkCreate(t, collected)
	if trace := "trace=\"" + hex.EncodeToString(created.GetTraceId()) + "\""; !strings.Contains(log, trace) || !strings.Contains(nodeLog, trace) {
		t.Errorf("the logs lack %s:\n%s\n%s", trace, log, nodeLog)
	}
	checkStage(t, collected, failed)
	checkJob(t, collected)
	for _, secret := range []string{passphrase, token} {
		if bytes.Contains(collected.raw, []byte(secret)) || strings.Contains(log+nodeLog, secret) {
			t.Errorf("the exported spans or the logs contain %q", secret)
		}
	}
	if len(collected.below(nil, "Probe")) > 0 {
		t.Error("got spans of the Identity service, want none")
	}
}

// checkCreate checks the spans of the first CreateVolume, whose call went through both drivers. It returns the root.
func checkCreate(t *testing.T, c *collected) span {
	t.Helper()
	root := c.below(nil, "CreateVolume")
	i := slices.IndexFunc(root, func(s span) bool { return attributes(s.GetAttributes())["trivet.volume"] == "first" })
	if i < 0 {
		t.Fatalf("got no span of CreateVolume; all spans:\n%s", c)
	}
	client := c.below(root[i].GetSpanId(), "CreateVolume")
	if len(client) != 1 || client[0].GetKind() != trace.Span_SPAN_KIND_CLIENT || attributes(client[0].GetAttributes())["trivet.node"] != "node-1.example" {
		t.Fatalf("got %v below the call, want the forwarded call to node-1.example", client)
	}
	server := c.below(client[0].GetSpanId(), "CreateVolume")
	if len(server) != 1 || server[0].GetKind() != trace.Span_SPAN_KIND_SERVER || server[0].process["host.name"] != "node-1.example" ||
		server[0].process["service.name"] != "trivet" || server[0].process["service.version"] != "v1.2.3" || server[0].process["service.namespace"] != "storage" {
		t.Fatalf("got %v below the forwarded call, want the call in the driver of node-1.example", server)
	}
	if format := c.below(server[0].GetSpanId(), "format"); len(format) != 1 || len(c.below(format[0].GetSpanId(), "mkfs.xfs")) != 1 {
		t.Errorf("got %v, want format and mkfs.xfs below the call; all spans:\n%s", format, c)
	}
	for _, s := range []span{client[0], server[0]} {
		if !bytes.Equal(s.GetTraceId(), root[i].GetTraceId()) || s.GetStatus().GetCode() != trace.Status_STATUS_CODE_UNSET ||
			attributes(s.GetAttributes())["rpc.response.status_code"] != "OK" {
			t.Errorf("got %v, want a successful span of trace %x", s, root[i].GetTraceId())
		}
	}
	if root[i].process["host.name"] != "" {
		t.Errorf("got host %q of the controller's driver, want none", root[i].process["host.name"])
	}
	return root[i]
}

// checkStage checks the spans of a successful NodeStageVolume and of one that failed.
func checkStage(t *testing.T, c *collected, failed *status.Status) {
	t.Helper()
	var good, bad int
	for _, s := range c.below(nil, "NodeStageVolume") {
		if s.GetStatus().GetCode() == trace.Status_STATUS_CODE_ERROR {
			bad++
			if code := attributes(s.GetAttributes())["rpc.response.status_code"]; code != failed.Code().String() || s.GetStatus().GetMessage() != failed.Message() {
				t.Errorf("got status %s %q, want %v", code, s.GetStatus().GetMessage(), failed)
			}
			continue
		}
		good++
		attach := c.below(s.GetSpanId(), "attach")
		if len(attach) != 1 || len(c.below(s.GetSpanId(), "mount")) != 1 {
			t.Fatalf("got steps %v, want attach and mount; all spans:\n%s", attach, c)
		}
	}
	if good != 1 || bad != 1 {
		t.Errorf("got %d successful and %d failed spans of NodeStageVolume, want one each", good, bad)
	}
	c.path(t, "NodeUnstageVolume", "unmount")
	c.path(t, "NodeUnstageVolume", "detach")
}

// checkJob checks that the job of the copy and the wait of its call are linked to each other.
func checkJob(t *testing.T, c *collected) {
	t.Helper()
	job := c.path(t, "job")
	i := slices.IndexFunc(c.spans, func(s span) bool { return s.GetName() == "wait for job" })
	if i < 0 || len(job.GetLinks()) != 1 || len(c.spans[i].GetLinks()) != 1 {
		t.Fatalf("got job %v, want one link to the call and one back; all spans:\n%s", job, c)
	}
	wait := c.spans[i]
	if !bytes.Equal(wait.GetLinks()[0].GetSpanId(), job.GetSpanId()) || !bytes.Equal(job.GetLinks()[0].GetSpanId(), wait.GetParentSpanId()) {
		t.Errorf("got links %v of the wait and %v of the job, want links to each other's spans", wait.GetLinks(), job.GetLinks())
	}
	if a := attributes(job.GetAttributes()); a["trivet.pool"] != "fast" || a["trivet.name"] == "" {
		t.Errorf("got attributes %v of the job, want its pool and name", a)
	}
}

// useDriver starts a driver for one node, calls ListVolumes twice, and returns its log and how long its end took.
func useDriver(t *testing.T, environment ...string) (log string, took time.Duration) {
	t.Helper()
	testenv.RequireRoot(t)
	p := startProcess(t, environment, "", testenv.Filesystem(t, "xfs", "2G")+"/state", "--node-id", "n")
	for range 2 {
		_, err := p.ctrl.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		must(t, err)
	}
	return p.stop(t)
}

// TestTracesDropped: a collector that refuses connections, or does not answer, delays neither calls nor the end of the
// driver for long. The driver logs one line about it.
func TestTracesDropped(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections, and answers none
	must(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	for name, variables := range map[string][]string{
		"refused, HTTP": {"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + backendtest.FreeAddress(t)},
		"refused, gRPC": {"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + backendtest.FreeAddress(t), "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"},
		"silent":        {"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + silent.Addr().String(), "OTEL_BSP_SCHEDULE_DELAY=1"},
	} {
		t.Run(name, func(t *testing.T) {
			log, took := useDriver(t, variables...)
			if n := strings.Count(log, "Traces cannot be sent"); n != 1 || strings.Contains(log, "OpenTelemetry reports") {
				t.Errorf("got %d lines about dropped spans, want 1 and no other; log:\n%s", n, log)
			}
			if took > 5*time.Second { // 3 s for the spans, and the rest of the end on a slow machine
				t.Errorf("the end took %v, want at most 3 s longer than without traces", took)
			}
		})
	}
}

// TestTracesGRPC: spans are also sent with gRPC.
func TestTracesGRPC(t *testing.T) {
	c := &collected{}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, grpcCollector{c: c})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	log, _ := useDriver(t, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+l.Addr().String(), "OTEL_EXPORTER_OTLP_PROTOCOL=grpc")
	if n := len(c.below(nil, "ListVolumes")); n != 2 || strings.Contains(log, "cannot be sent") {
		t.Errorf("got %d spans of ListVolumes, want 2; all spans:\n%s\nlog:\n%s", n, c, log)
	}
}

// grpcCollector receives spans over gRPC.
type grpcCollector struct {
	collector.UnimplementedTraceServiceServer
	c *collected
}

// Export implements collector.TraceServiceServer.
func (g grpcCollector) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	g.c.add(nil, request)
	return &collector.ExportTraceServiceResponse{}, nil
}

// TestTracesOff: without an endpoint, or if the standard variables disable traces, the driver neither sends nor logs
// anything about traces. A wrong setting is logged, and the driver runs without traces.
func TestTracesOff(t *testing.T) {
	collected, endpoint := startCollector(t)
	on := "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + endpoint + "/v1/traces"
	for _, tc := range []struct {
		name      string
		variables []string
		says      string
	}{
		{"no endpoint", nil, ""},
		{"empty endpoint", []string{"OTEL_EXPORTER_OTLP_ENDPOINT="}, ""},
		{"SDK disabled", []string{on, "OTEL_SDK_DISABLED=true"}, ""},
		{"no exporter", []string{on, "OTEL_TRACES_EXPORTER=none"}, ""},
		{"unknown exporter", []string{on, "OTEL_TRACES_EXPORTER=zipkin"}, `OTEL_TRACES_EXPORTER=\"zipkin\"`},
		{"unknown protocol", []string{on, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"}, `OTEL_EXPORTER_OTLP_PROTOCOL=\"http/json\"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			log, _ := useDriver(t, tc.variables...)
			if !strings.Contains(log, tc.says) || strings.Contains(log, "Traces are disabled") != (tc.says != "") || strings.Contains(log, " trace=") {
				t.Errorf("got log %s, want %q and no trace IDs", log, tc.says)
			}
		})
	}
	if len(collected.raw) > 0 {
		t.Errorf("got spans, want none:\n%s", collected)
	}
}
