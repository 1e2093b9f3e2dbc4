package backendtest

import (
	"context"
	"maps"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// create creates a volume that is deleted when the test ends.
func create(t *testing.T, d *Driver, req *csi.CreateVolumeRequest) (*csi.Volume, error) {
	t.Helper()
	resp, err := d.Control.CreateVolume(t.Context(), req)
	if err == nil {
		t.Cleanup(func() { remove(t, d, resp.GetVolume().GetVolumeId()) })
	}
	return resp.GetVolume(), err
}

// remove deletes a volume, which need not exist.
func remove(t *testing.T, d *Driver, id string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context()) // which has ended when a cleanup calls remove
	if _, err := d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Errorf("deleting %s: %v", id, err)
	}
}

// testIdempotentImage: the same request returns the same volume. A different request of the
// same name is refused.
func testIdempotentImage(t *testing.T, d *Driver, _ Kind) {
	name := newName(t)
	base := func() *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: gib, LimitBytes: 2 * gib},
			VolumeCapabilities: []*csi.VolumeCapability{Kind{FSType: "ext4"}.Capability(writer)},
			Parameters:         map[string]string{"csi.storage.k8s.io/pvc/name": "claim"},
		}
	}
	first, err := create(t, d, base())
	must(t, err)
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"same request":          func(*csi.CreateVolumeRequest) {},
		"smaller required size": func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1 << 20 },
		"another claim name":    func(r *csi.CreateVolumeRequest) { r.Parameters["csi.storage.k8s.io/pvc/name"] = "x" },
		"explicit defaults": func(r *csi.CreateVolumeRequest) {
			r.Parameters["allocation"] = "thin"
			r.Parameters["backend"] = "loop"
		},
	} {
		t.Run(name, func(t *testing.T) {
			req := base()
			change(req)
			resp, err := d.Control.CreateVolume(t.Context(), req)
			if err != nil || resp.GetVolume().String() != first.String() {
				t.Errorf("got %v, %v; want %v", resp, err, first)
			}
		})
	}
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"larger required size": func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = gib + 1 },
		"limit below the size": func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: gib - 1} },
		"another filesystem":   func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = Kind{FSType: "xfs"}.Capability(writer) },
		"raw device":           func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = Kind{}.Capability(writer) },
		"another allocation":   func(r *csi.CreateVolumeRequest) { r.Parameters["allocation"] = "thick" },
		"mkfs options":         func(r *csi.CreateVolumeRequest) { r.Parameters["mkfsOptions"] = "-m 1" },
	} {
		t.Run(name, func(t *testing.T) {
			req := base()
			change(req)
			_, err := d.Control.CreateVolume(t.Context(), req)
			wantCode(t, err, codes.AlreadyExists, req.GetName())
		})
	}
}

// testImageSizes: a volume has the requested size, or the request is refused.
func testImageSizes(t *testing.T, d *Driver, _ Kind) {
	for _, tc := range []struct {
		name string
		kind Kind
		r    *csi.CapacityRange
		want int64
		code codes.Code
	}{
		{"default", Kind{FSType: "ext4"}, nil, gib, codes.OK},
		{"default below a limit", Kind{FSType: "ext4"}, &csi.CapacityRange{LimitBytes: 100 << 20}, 100 << 20, codes.OK},
		{"exact", Kind{FSType: "xfs"}, &csi.CapacityRange{RequiredBytes: 300 << 20, LimitBytes: 300 << 20}, 300 << 20, codes.OK},
		{"rounded up", Kind{}, &csi.CapacityRange{RequiredBytes: 5000}, 8192, codes.OK},
		{"rounded past the limit", Kind{}, &csi.CapacityRange{RequiredBytes: 5000, LimitBytes: 8191}, 0, codes.OutOfRange},
		{"one byte", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 1}, 0, codes.OutOfRange},
		{"below the minimum of xfs", Kind{FSType: "xfs"}, &csi.CapacityRange{RequiredBytes: 299 << 20}, 0, codes.OutOfRange},
		{"below the minimum of btrfs", Kind{FSType: "btrfs"}, &csi.CapacityRange{RequiredBytes: 255 << 20}, 0, codes.OutOfRange},
		{"limit below the minimum", Kind{FSType: "btrfs"}, &csi.CapacityRange{LimitBytes: 1 << 20}, 0, codes.OutOfRange},
		{"more than the pool has", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 1 << 45}, 0, codes.ResourceExhausted},
		{"largest number", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, 0, codes.OutOfRange},
		{"negative size", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: -1}, 0, codes.InvalidArgument},
		{"limit below required", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, 0, codes.InvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, err := create(t, d, &csi.CreateVolumeRequest{
				Name: newName(t), CapacityRange: tc.r, VolumeCapabilities: []*csi.VolumeCapability{tc.kind.Capability(writer)},
			})
			wantCode(t, err, tc.code)
			if v.GetCapacityBytes() != tc.want {
				t.Errorf("got a volume of %d bytes, want %d", v.GetCapacityBytes(), tc.want)
			}
		})
	}
}

// testSmallestDevice: a volume of the minimum size that GetCapacity reports can be used and expanded.
func testSmallestDevice(t *testing.T, d *Driver, kind Kind) {
	c := kind.Capability(multiWriter)
	reported, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters()})
	must(t, err)
	v, err := create(t, d, &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: reported.GetMinimumVolumeSize().GetValue(), LimitBytes: reported.GetMinimumVolumeSize().GetValue()},
	})
	must(t, err)
	l := &testVolume{d: d, kind: kind, cap: c, id: v.GetVolumeId(), staging: t.TempDir(), target: t.TempDir() + "/target"}
	l.stageAndPublish(t)
	content := pattern(7)
	if kind.Block() {
		content = content[:4096]
	}
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	if !kind.growsHere() {
		return
	}
	size := v.GetCapacityBytes() + 64*mib
	_, err = l.expand(t.Context(), size)
	must(t, err)
	l.stageAndPublish(t)
	l.unpublishAndUnstage(t)
	wantFilesystem(t, l, size)
}

// testTopology: volumes are created on this node only.
func testTopology(t *testing.T, d *Driver, kind Kind) {
	segment := func(node string) *csi.Topology {
		return &csi.Topology{Segments: map[string]string{"csi.trivet.dev/node": node}}
	}
	for _, tc := range []struct {
		name                 string
		requisite, preferred []*csi.Topology
		code                 codes.Code
	}{
		{"no requirements", nil, nil, codes.OK},
		{"this node", []*csi.Topology{segment(Node)}, []*csi.Topology{segment(Node)}, codes.OK},
		{"this node among others", []*csi.Topology{segment("b"), segment(Node)}, nil, codes.OK},
		{"this node preferred", []*csi.Topology{segment("b"), segment(Node)}, []*csi.Topology{segment(Node), segment("b")}, codes.OK},
		{"another node", []*csi.Topology{segment("b")}, nil, codes.ResourceExhausted},
		{"another node preferred", []*csi.Topology{segment("b"), segment(Node)}, []*csi.Topology{segment("b"), segment(Node)}, codes.ResourceExhausted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, err := create(t, d, &csi.CreateVolumeRequest{
				Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(writer)}, Parameters: kind.Parameters(),
				AccessibilityRequirements: &csi.TopologyRequirement{Requisite: tc.requisite, Preferred: tc.preferred},
			})
			wantCode(t, err, tc.code)
			if err == nil && (len(v.GetAccessibleTopology()) != 1 || v.GetAccessibleTopology()[0].GetSegments()["csi.trivet.dev/node"] != Node) {
				t.Errorf("got accessible topology %v, want node %s", v.GetAccessibleTopology(), Node)
			}
		})
	}
	info, err := d.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != Node || info.GetAccessibleTopology().GetSegments()["csi.trivet.dev/node"] != Node {
		t.Errorf("NodeGetInfo: got %v, %v; want node %s", info, err, Node)
	}
	elsewhere, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: segment("b"), Parameters: kind.Parameters()})
	if err != nil || elsewhere.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity of another node: got %v, %v; want 0", elsewhere, err)
	}
	other, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.Parameters("pool", "none-here")})
	if err != nil || other.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity of an unknown pool: got %v, %v; want 0", other, err)
	}
}

// testCapabilities: the driver advertises what it implements.
func testCapabilities(t *testing.T, d *Driver, kind Kind) {
	info, err := d.Identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "csi.trivet.dev" || info.GetVendorVersion() == "" {
		t.Errorf("GetPluginInfo: got %v, %v; want csi.trivet.dev and a version", info, err)
	}
	control, err := d.Control.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	var have []string
	for _, c := range control.GetCapabilities() {
		have = append(have, c.GetRpc().GetType().String())
	}
	wanted := []string{
		"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "LIST_VOLUMES", "GET_CAPACITY", "PUBLISH_READONLY", "EXPAND_VOLUME",
		"LIST_VOLUMES_PUBLISHED_NODES", "GET_VOLUME", "SINGLE_NODE_MULTI_WRITER", "GET_VOLUME_HEALTH", "LIST_VOLUME_HEALTH",
		"CLONE_VOLUME",
	}
	if kind.Has(Snapshots) {
		wanted = append(wanted, "CREATE_DELETE_SNAPSHOT", "LIST_SNAPSHOTS", "GET_SNAPSHOT")
	}
	for _, want := range wanted {
		if count(have, want) != 1 {
			t.Errorf("the controller advertises %s %d times, want once", want, count(have, want))
		}
	}
	node, err := d.Node.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	must(t, err)
	have = nil
	for _, c := range node.GetCapabilities() {
		have = append(have, c.GetRpc().GetType().String())
	}
	for _, want := range []string{
		"STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS", "EXPAND_VOLUME", "SINGLE_NODE_MULTI_WRITER", "GET_VOLUME_HEALTH", "GET_STORAGE_HEALTH",
	} {
		if count(have, want) != 1 {
			t.Errorf("the node advertises %s %d times, want once", want, count(have, want))
		}
	}
}

// validation is a call of ValidateVolumeCapabilities. ok tells whether the arguments must be confirmed.
type validation struct {
	name       string
	cap        *csi.VolumeCapability
	context    map[string]string
	parameters map[string]string
	ok         bool
}

// wantValidated makes calls of ValidateVolumeCapabilities for a volume, and checks the results.
func wantValidated(t *testing.T, d *Driver, v *csi.Volume, calls []validation) {
	t.Helper()
	for _, tc := range calls {
		resp, err := d.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: v.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{tc.cap}, VolumeContext: tc.context, Parameters: tc.parameters,
		})
		if err != nil || (resp.GetConfirmed() != nil) != tc.ok || (resp.GetMessage() == "") != tc.ok {
			t.Errorf("%s: got %v, %v; want confirmed: %t", tc.name, resp, err, tc.ok)
		}
	}
}

// testValidateImage: only capabilities and parameters that the volume has are confirmed.
func testValidateImage(t *testing.T, d *Driver, _ Kind) {
	c := Kind{FSType: "ext4"}.Capability(writer)
	v, err := create(t, d, &csi.CreateVolumeRequest{Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}})
	must(t, err)
	older := maps.Clone(v.GetVolumeContext()) // as an earlier version of the driver would have returned it
	for key := range older {
		delete(older, key)
		break
	}
	wantValidated(t, d, v, []validation{
		{"all arguments", c, v.GetVolumeContext(), map[string]string{"allocation": "thin"}, true},
		{"a context without a key", c, older, nil, true},
		{"a context with an unknown key", c, map[string]string{"unknown": "value"}, nil, false},
		{"the capability alone", c, nil, nil, true},
		{"another filesystem", Kind{FSType: "xfs"}.Capability(writer), nil, nil, false},
		{"block", Kind{}.Capability(writer), nil, nil, false},
		{"mount flags", Kind{FSType: "ext4"}.Capability(writer, "remount"), nil, nil, false},
		{"mount flag with a device", Kind{FSType: "ext4"}.Capability(writer, "journal_path=/dev/sda"), nil, nil, false},
		{"another context", c, map[string]string{"pool": "other"}, nil, false},
		{"another allocation", c, nil, map[string]string{"allocation": "thick"}, false},
		{"unknown parameter", c, nil, map[string]string{"nonsense": "1"}, false},
	})
}
