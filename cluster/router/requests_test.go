package router_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
)

const mib = int64(1) << 20

// unknownVolume is the ID of a volume in a pool that no node has.
const unknownVolume = "loop:default.01234567:v"

// change modifies a CreateVolumeRequest.
type change = func(*csi.CreateVolumeRequest)

// request returns a CreateVolumeRequest for 32 MiB.
func request(name string, changes ...change) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{capability()},
	}
	for _, c := range changes {
		c(req)
	}
	return req
}

// capability is ext4 with SINGLE_NODE_WRITER.
func capability() *csi.VolumeCapability {
	return backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

// preferring requires one of the nodes, and prefers them in this order.
func preferring(nodes ...string) change {
	return func(req *csi.CreateVolumeRequest) {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: topologies(nodes), Requisite: topologies(nodes)}
	}
}

// within requires one of the nodes.
func within(nodes ...string) change {
	return func(req *csi.CreateVolumeRequest) {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topologies(nodes)}
	}
}

// anywhere sets no topology.
func anywhere(*csi.CreateVolumeRequest) {}

func inPool(name string) change { return with(map[string]string{"pool": name}) }

// with sets the parameters of the class.
func with(parameters map[string]string) change {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = parameters }
}

func sized(bytes int64) change {
	return func(req *csi.CreateVolumeRequest) { req.CapacityRange.RequiredBytes = bytes }
}

func fromSnapshot(id string) change {
	return func(req *csi.CreateVolumeRequest) {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
	}
}

func fromVolume(id string) change {
	return func(req *csi.CreateVolumeRequest) {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	}
}

func topologies(nodes []string) []*csi.Topology {
	var out []*csi.Topology
	for _, n := range nodes {
		out = append(out, translate.Topology(n))
	}
	return out
}

// methods maps request types to the full method names of the controller's calls.
var methods = func() map[string]string {
	all := map[string]string{}
	for _, d := range relay.ControllerServices {
		for _, m := range d.Methods {
			all["csi.v1."+m.MethodName+"Request"] = "/" + d.ServiceName + "/" + m.MethodName
		}
		for _, m := range d.Streams {
			all["csi.v1."+m.StreamName+"Request"] = "/" + d.ServiceName + "/" + m.StreamName
		}
	}
	return all
}()

// send calls the method of a request type.
func (w *testCluster) send(req proto.Message) error { return w.sendWith(w.t.Context(), req) }

func (w *testCluster) sendWith(ctx context.Context, req proto.Message) error {
	method := methods[string(req.ProtoReflect().Descriptor().FullName())]
	if strings.HasPrefix(method, "/"+csi.SnapshotMetadata_ServiceDesc.ServiceName) {
		return w.Stream(ctx, method, req, func(any) error { return nil })
	}
	_, err := w.Call(ctx, method, req)
	return err
}

// create calls CreateVolume.
func (w *testCluster) create(name string, changes ...change) error {
	return w.send(request(name, changes...))
}

// mustCreate creates a volume, and fails the test if the call fails.
func (w *testCluster) mustCreate(name string, changes ...change) *csi.Volume {
	w.t.Helper()
	resp, err := w.CreateVolume(w.t.Context(), request(name, changes...))
	must(w.t, err)
	return resp.GetVolume()
}

// mustCreateOn creates a volume on a node and returns its ID.
func (w *testCluster) mustCreateOn(node, name string, changes ...change) string {
	w.t.Helper()
	return w.mustCreate(name, append(changes, preferring(node))...).GetVolumeId()
}

// nodeOf returns the node from which a volume is accessible.
func nodeOf(v *csi.Volume) string {
	return v.GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]
}

// capacity returns the capacity of a node, or of all nodes if the name is empty.
func (w *testCluster) capacity(node string) (*csi.GetCapacityResponse, error) {
	req := &csi.GetCapacityRequest{}
	if node != "" {
		req.AccessibleTopology = translate.Topology(node)
	}
	return w.GetCapacity(w.t.Context(), req)
}

// wantNoCapacity fails the test unless the capacity of a node is 0.
func (w *testCluster) wantNoCapacity(node string) {
	w.t.Helper()
	if got, err := w.capacity(node); err != nil || got.GetAvailableCapacity() != 0 {
		w.t.Errorf("capacity of node %q: got %v, %v, want 0", node, got, err)
	}
}

func getRequest(id string) proto.Message {
	return &csi.ControllerGetVolumeRequest{VolumeId: id}
}

func (w *testCluster) get(id string) error { return w.send(getRequest(id)) }

func (w *testCluster) delete(id string) error { return w.send(&csi.DeleteVolumeRequest{VolumeId: id}) }

func (w *testCluster) publish(node, id string) error {
	return w.send(&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: capability()})
}

func (w *testCluster) unpublish(node, id string) error {
	return w.send(&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
}

// volumeRequests returns the requests that the router forwards to the volume's node. The first request
// deletes the volume.
func volumeRequests(id string) []proto.Message {
	return []proto.Message{
		&csi.DeleteVolumeRequest{VolumeId: id},
		&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}},
		getRequest(id),
		&csi.ControllerGetVolumeHealthRequest{VolumeId: id},
		&csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{capability()}},
	}
}

// wantRefused fails the test unless all volumeRequests and ControllerPublishVolume fail with the code and
// the texts, and ControllerUnpublishVolume succeeds.
func (w *testCluster) wantRefused(node, id string, want codes.Code, texts ...string) {
	w.t.Helper()
	w.wantAllRefused(append(volumeRequests(id), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: capability()}), want, texts...)
	must(w.t, w.unpublish(node, id))
}

// wantAllRefused fails the test unless all requests fail with the code and the texts.
func (w *testCluster) wantAllRefused(requests []proto.Message, want codes.Code, texts ...string) {
	w.t.Helper()
	for _, req := range requests {
		if wantCode(w.t, w.send(req), want, texts...); w.t.Failed() {
			w.t.Fatalf("the error above is that of the request %T", req)
		}
	}
}

// listAll returns the IDs of all entries. It requests pages of size entries, or of the maximum size if size
// is 0. After each page except the last, it calls the functions in between with the number of that page,
// counted from 0, and the token of the next page.
func listAll[E any](ctx context.Context, s relay.Service, list relay.List[E], size int32, between ...func(page int, token string)) (ids []string, err error) {
	for page, token := 0, ""; ; page++ {
		entries, next, err := list.Page(ctx, s, token, size)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			ids = append(ids, list.ID(e))
		}
		if token = next; token == "" {
			return ids, nil
		}
		for _, do := range between {
			do(page, token)
		}
	}
}

// list returns the IDs of all volumes. See listAll for size.
func (w *testCluster) list(size int32) ([]string, error) {
	return listAll(w.t.Context(), w, relay.Volumes, size)
}

// listError returns the error of ListVolumes.
func (w *testCluster) listError() error {
	_, err := w.list(0)
	return err
}

// wantListed fails the test unless ListVolumes returns want volumes.
func (w *testCluster) wantListed(want int) {
	w.t.Helper()
	if ids, err := w.list(0); err != nil || len(ids) != want {
		w.t.Errorf("got volumes %q, %v, want %d volumes", ids, err, want)
	}
}

func sorted(ids []string) []string { return slices.Sorted(slices.Values(ids)) }

// code returns the gRPC status code to which the driver converts an error.
func code(err error) codes.Code {
	_, err = grpcserver.TranslateErrors(context.Background(), nil, nil, func(context.Context, any) (any, error) { return nil, err })
	return status.Code(err)
}

// wantCode fails the test unless err has the code and contains the texts.
func wantCode(t *testing.T, err error, want codes.Code, texts ...string) {
	t.Helper()
	if code(err) != want {
		t.Errorf("got code %v (%v), want %v", code(err), err, want)
		return
	}
	for _, text := range texts {
		if err != nil && !strings.Contains(err.Error(), text) {
			t.Errorf("got error %v, want text %q", err, text)
		}
	}
}
