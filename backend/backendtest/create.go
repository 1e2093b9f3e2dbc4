package backendtest

import (
	"strings"
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

func remove(t *testing.T, d *Driver, id string) {
	t.Helper()
	// t.Context has ended when this runs as a cleanup.
	if _, err := d.Control.DeleteVolume(contextForCleanup(t), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Errorf("deleting %s: %v", id, err)
	}
}

// testIdempotentCreate: the same request returns the same volume. A different request of the
// same name is refused.
func testIdempotentCreate(t *testing.T, d *Driver, _ Kind) {
	base := func() *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{
			Name: "idem-" + itoa(t), CapacityRange: &csi.CapacityRange{RequiredBytes: gib, LimitBytes: 2 * gib},
			VolumeCapabilities: []*csi.VolumeCapability{Kind{FSType: "ext4"}.Capability(writer)},
			Parameters:         map[string]string{"csi.storage.k8s.io/pvc/name": "claim"},
		}
	}
	first, err := create(t, d, base())
	must(t, err)
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"the same":              func(*csi.CreateVolumeRequest) {},
		"smaller required size": func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1 << 20 },
		"another claim":         func(r *csi.CreateVolumeRequest) { r.Parameters["csi.storage.k8s.io/pvc/name"] = "x" },
		"explicit defaults": func(r *csi.CreateVolumeRequest) {
			r.Parameters["allocation"] = "thin"
			r.Parameters["backend"] = "loop"
		},
	} {
		t.Run(name, func(t *testing.T) {
			req := base()
			req.Name = first.GetVolumeId()[strings.LastIndex(first.GetVolumeId(), ":")+1:]
			change(req)
			resp, err := d.Control.CreateVolume(t.Context(), req)
			if err != nil || resp.GetVolume().String() != first.String() {
				t.Errorf("%v, %v; want %v", resp, err, first)
			}
		})
	}
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"larger":     func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = gib + 1 },
		"limit":      func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: gib - 1} },
		"filesystem": func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = Kind{FSType: "xfs"}.Capability(writer) },
		"block":      func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = Kind{}.Capability(writer) },
		"allocation": func(r *csi.CreateVolumeRequest) { r.Parameters["allocation"] = "thick" },
		"mkfs":       func(r *csi.CreateVolumeRequest) { r.Parameters["mkfsOptions"] = "-m 1" },
	} {
		t.Run(name, func(t *testing.T) {
			req := base()
			req.Name = first.GetVolumeId()[strings.LastIndex(first.GetVolumeId(), ":")+1:]
			change(req)
			_, err := d.Control.CreateVolume(t.Context(), req)
			wantCode(t, err, codes.AlreadyExists, req.GetName())
		})
	}
}

func itoa(t *testing.T) string {
	t.Helper()
	name := newName(t)
	return name[strings.LastIndex(name, "-")+1:]
}

// testSizes: a volume has the requested size, or the request is refused.
func testSizes(t *testing.T, d *Driver, _ Kind) {
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
		{"below xfs", Kind{FSType: "xfs"}, &csi.CapacityRange{RequiredBytes: 299 << 20}, 0, codes.OutOfRange},
		{"below btrfs", Kind{FSType: "btrfs"}, &csi.CapacityRange{RequiredBytes: 255 << 20}, 0, codes.OutOfRange},
		{"limit below the minimum", Kind{FSType: "btrfs"}, &csi.CapacityRange{LimitBytes: 1 << 20}, 0, codes.OutOfRange},
		{"above the room", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 1 << 45}, 0, codes.ResourceExhausted},
		{"above the largest size", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, 0, codes.OutOfRange},
		{"negative", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: -1}, 0, codes.InvalidArgument},
		{"limit below required", Kind{FSType: "ext4"}, &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, 0, codes.InvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, err := create(t, d, &csi.CreateVolumeRequest{
				Name: newName(t), CapacityRange: tc.r, VolumeCapabilities: []*csi.VolumeCapability{tc.kind.Capability(writer)},
			})
			wantCode(t, err, tc.code)
			if v.GetCapacityBytes() != tc.want {
				t.Errorf("it has %d bytes, want %d", v.GetCapacityBytes(), tc.want)
			}
		})
	}
}

// testSmallest: a volume of the minimum size of GetCapacity works, and grows.
func testSmallest(t *testing.T, d *Driver, kind Kind) {
	c := kind.Capability(multiWriter)
	says, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters()})
	must(t, err)
	v, err := create(t, d, &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: says.GetMinimumVolumeSize().GetValue(), LimitBytes: says.GetMinimumVolumeSize().GetValue()},
	})
	must(t, err)
	l := &life{d: d, kind: kind, cap: c, id: v.GetVolumeId(), staging: t.TempDir(), target: t.TempDir() + "/target"}
	l.up(t)
	content := pattern(7)
	if kind.Block() {
		content = content[:4096]
	}
	write(t, l.data(l.target), content)
	l.down(t)
	l.up(t)
	wantContent(t, l.data(l.target), content)
	l.down(t)
	if !kind.growsHere() {
		return
	}
	size := v.GetCapacityBytes() + 64*mib
	_, err = l.expand(t.Context(), size)
	must(t, err)
	l.up(t)
	l.down(t)
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
		{"none", nil, nil, codes.OK},
		{"here", []*csi.Topology{segment(Node)}, []*csi.Topology{segment(Node)}, codes.OK},
		{"here among others", []*csi.Topology{segment("b"), segment(Node)}, nil, codes.OK},
		{"here preferred", []*csi.Topology{segment("b"), segment(Node)}, []*csi.Topology{segment(Node), segment("b")}, codes.OK},
		{"elsewhere", []*csi.Topology{segment("b")}, nil, codes.ResourceExhausted},
		{"elsewhere preferred", []*csi.Topology{segment("b"), segment(Node)}, []*csi.Topology{segment("b"), segment(Node)}, codes.ResourceExhausted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v, err := create(t, d, &csi.CreateVolumeRequest{
				Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(writer)}, Parameters: kind.Parameters(),
				AccessibilityRequirements: &csi.TopologyRequirement{Requisite: tc.requisite, Preferred: tc.preferred},
			})
			wantCode(t, err, tc.code)
			if err == nil && (len(v.GetAccessibleTopology()) != 1 || v.GetAccessibleTopology()[0].GetSegments()["csi.trivet.dev/node"] != Node) {
				t.Errorf("the volume is accessible from %v", v.GetAccessibleTopology())
			}
		})
	}
	info, err := d.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != Node || info.GetAccessibleTopology().GetSegments()["csi.trivet.dev/node"] != Node {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	elsewhere, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: segment("b"), Parameters: kind.Parameters()})
	if err != nil || elsewhere.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity of another node: %v, %v", elsewhere, err)
	}
	other, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.Parameters("pool", "none-here")})
	if err != nil || other.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity of a pool that is not here: %v, %v", other, err)
	}
}

// testCapabilities: the driver advertises what it implements.
func testCapabilities(t *testing.T, d *Driver, kind Kind) {
	info, err := d.Identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "csi.trivet.dev" || info.GetVendorVersion() == "" {
		t.Errorf("GetPluginInfo: %v, %v", info, err)
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
			t.Errorf("the controller advertises %s %d times", want, count(have, want))
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
			t.Errorf("the node advertises %s %d times", want, count(have, want))
		}
	}
}

// validation is a call of ValidateVolumeCapabilities.
type validation struct {
	name       string
	cap        *csi.VolumeCapability
	context    map[string]string
	parameters map[string]string
	ok         bool
}

// wantValidated: the capabilities, context and parameters of a volume are confirmed, and no others.
func wantValidated(t *testing.T, d *Driver, v *csi.Volume, calls []validation) {
	t.Helper()
	for _, tc := range calls {
		resp, err := d.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: v.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{tc.cap}, VolumeContext: tc.context, Parameters: tc.parameters,
		})
		if err != nil || (resp.GetConfirmed() != nil) != tc.ok || (resp.GetMessage() == "") != tc.ok {
			t.Errorf("%s: %v, %v", tc.name, resp, err)
		}
	}
}

func testValidate(t *testing.T, d *Driver, _ Kind) {
	c := Kind{FSType: "ext4"}.Capability(writer)
	v, err := create(t, d, &csi.CreateVolumeRequest{Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}})
	must(t, err)
	wantValidated(t, d, v, []validation{
		{"all", c, v.GetVolumeContext(), map[string]string{"allocation": "thin"}, true},
		{"the capability alone", c, nil, nil, true},
		{"another filesystem", Kind{FSType: "xfs"}.Capability(writer), nil, nil, false},
		{"block", Kind{}.Capability(writer), nil, nil, false},
		{"mount flags", Kind{FSType: "ext4"}.Capability(writer, "remount"), nil, nil, false},
		{"another device", Kind{FSType: "ext4"}.Capability(writer, "journal_path=/dev/sda"), nil, nil, false},
		{"context", c, map[string]string{"pool": "other"}, nil, false},
		{"allocation", c, nil, map[string]string{"allocation": "thick"}, false},
		{"unknown parameter", c, nil, map[string]string{"nonsense": "1"}, false},
	})
}
