package frozen_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// kind is a kind of volume on a node.
type kind struct {
	name  string
	class map[string]string
	// fsType is empty for a raw device and for a directory.
	fsType string
	block  bool
	// grows means that volumes can be expanded. A whole disk has its final size.
	grows     bool
	snapshots bool
}

var kinds = []kind{
	{name: "ext4", class: map[string]string{"pool": "ssd"}, fsType: "ext4", grows: !testenv.IsWithout("ext4-growth"), snapshots: true},
	{name: "thick", class: map[string]string{"pool": "ssd", "allocation": "thick"}, fsType: "xfs", grows: true},
	{name: "block", class: map[string]string{"pool": "ssd"}, block: true, grows: true, snapshots: true},
	{name: "directory", class: map[string]string{"backend": "local", "pool": "ssd"}, grows: true, snapshots: true},
	{name: "placed", class: map[string]string{"backend": "local", "pool": "ssd", "subDir": "placed/${pv.metadata.name}"}, grows: true},
	{name: "disk", class: map[string]string{"backend": "disk", "pool": "disks"}, fsType: "ext4"},
}

// size is the first size of volumes in bytes; xfs requires 300 MiB.
const size = 304 * mib

func (k kind) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if k.block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: k.fsType}}
	}
	return c
}

// vol is a volume, with its paths on the node.
type vol struct {
	kind
	h               *host
	name, id        string
	context         map[string]string
	staging, target string
	size            int64
}

func (h *host) create(t *testing.T, k kind, suffix, snapshot string) *vol {
	t.Helper()
	v := &vol{kind: k, h: h, name: k.name + "-" + suffix, size: size}
	v.staging, v.target = h.path(v.name+"-staging"), h.path(v.name+"-target")
	req := &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, Parameters: map[string]string{"csi.storage.k8s.io/pv/name": v.name},
		VolumeCapabilities: []*csi.VolumeCapability{k.capability()},
	}
	for key, value := range k.class {
		req.Parameters[key] = value
	}
	if snapshot != "" {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}}
	}
	created := do(t, h.control.CreateVolume, req).GetVolume()
	v.id, v.context = created.GetVolumeId(), created.GetVolumeContext()
	v.attach(t)
	return v
}

// attach publishes the volume to the node and at its target. It must succeed, too, if the volume is published.
func (v *vol) attach(t *testing.T) {
	t.Helper()
	published := do(t, v.h.control.ControllerPublishVolume, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: node, VolumeCapability: v.capability(), VolumeContext: v.context,
	}).GetPublishContext()
	must(t, os.MkdirAll(v.staging, 0o755))
	do(t, v.h.node.NodeStageVolume, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, PublishContext: published, StagingTargetPath: v.staging, VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	do(t, v.h.node.NodePublishVolume, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, PublishContext: published, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.capability(), VolumeContext: v.context,
	})
}

func (v *vol) detach(t *testing.T) {
	t.Helper()
	do(t, v.h.node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	do(t, v.h.node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	do(t, v.h.control.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: node})
}

// file returns the path of the volume's content.
func (v *vol) file() string {
	if v.block {
		return v.target
	}
	return filepath.Join(v.target, "file")
}

// write makes text durable in the volume.
func (v *vol) write(t *testing.T, text string) {
	t.Helper()
	f, err := os.OpenFile(v.file(), os.O_WRONLY|os.O_CREATE, 0o600)
	must(t, err)
	_, err = f.WriteString(text)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
}

// wantText fails unless the volume begins with a text.
func (v *vol) wantText(t *testing.T, want string) {
	t.Helper()
	f, err := os.Open(v.file())
	must(t, err)
	defer f.Close()
	got := make([]byte, len(want))
	if _, err := f.Read(got); err != nil || string(got) != want {
		t.Errorf("volume %s contains %q, %v; want %q", v.id, got, err, want)
	}
}

// grow doubles the size of the volume.
func (v *vol) grow(t *testing.T) {
	t.Helper()
	if !v.grows {
		return
	}
	v.size *= 2
	resp := do(t, v.h.control.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: v.size}, VolumeCapability: v.capability(),
	})
	if resp.GetNodeExpansionRequired() {
		do(t, v.h.node.NodeExpandVolume, &csi.NodeExpandVolumeRequest{
			VolumeId: v.id, VolumePath: v.target, StagingTargetPath: v.staging, CapacityRange: &csi.CapacityRange{RequiredBytes: v.size}, VolumeCapability: v.capability(),
		})
	}
}

// snapshot creates a snapshot of a volume that is not in use, and returns its ID.
func (v *vol) snapshot(t *testing.T, name string) string {
	t.Helper()
	v.detach(t)
	snapshot := do(t, v.h.control.CreateSnapshot, &csi.CreateSnapshotRequest{SourceVolumeId: v.id, Name: name}).GetSnapshot()
	v.attach(t)
	return snapshot.GetSnapshotId()
}

// inline is an inline volume.
type inline struct {
	id, target string
	attributes map[string]string
}

func (h *host) inline(t *testing.T, digit string, attributes map[string]string) *inline {
	t.Helper()
	attributes["csi.storage.k8s.io/ephemeral"] = "true"
	in := &inline{id: "csi-" + strings.Repeat(digit, 64), target: h.path("inline-" + digit), attributes: attributes}
	in.publish(t, h)
	return in
}

// publish must succeed, too, if the volume is published.
func (in *inline) publish(t *testing.T, h *host) {
	t.Helper()
	do(t, h.node.NodePublishVolume, &csi.NodePublishVolumeRequest{
		VolumeId: in.id, TargetPath: in.target, VolumeCapability: kind{}.capability(), VolumeContext: in.attributes,
	})
}

// state is what drivers of both versions have created.
type state struct {
	volumes   []*vol
	snapshots []string
	group     string
	members   []string
	inline    []*inline
}

// create creates one volume of each kind, snapshots of them and a group, and inline volumes.
func (s *state) create(t *testing.T, h *host, suffix, digits string) {
	t.Helper()
	var grouped []string
	for _, k := range kinds {
		v := h.create(t, k, suffix, "")
		v.write(t, v.name)
		if k.snapshots {
			s.snapshots = append(s.snapshots, v.snapshot(t, v.name+"-snapshot"))
		}
		if k.block {
			grouped = append(grouped, v.id)
		}
		s.volumes = append(s.volumes, v)
	}
	s.inline = append(s.inline, h.inline(t, digits[:1], map[string]string{"size": "16Mi"}), h.inline(t, digits[1:], map[string]string{"size": "1Mi", "medium": "memory"}))
	if s.group == "" {
		group := do(t, h.groups.CreateVolumeGroupSnapshot, &csi.CreateVolumeGroupSnapshotRequest{Name: "group-" + suffix, SourceVolumeIds: grouped}).GetGroupSnapshot()
		s.group = group.GetGroupSnapshotId()
		for _, member := range group.GetSnapshots() {
			s.members = append(s.members, member.GetSnapshotId())
		}
	}
}

// check verifies that a driver lists all volumes and snapshots with their sizes, and that all are published with
// their content.
func (s *state) check(t *testing.T, h *host) {
	t.Helper()
	sizes := map[string]int64{}
	for _, e := range do(t, h.control.ListVolumes, &csi.ListVolumesRequest{}).GetEntries() {
		sizes[e.GetVolume().GetVolumeId()] = e.GetVolume().GetCapacityBytes()
	}
	for _, v := range s.volumes {
		if got := sizes[v.id]; got < v.size || v.grows && got != v.size {
			t.Errorf("volume %s is listed with %d bytes, want %d", v.id, got, v.size)
		}
		v.attach(t)
		v.wantText(t, strings.TrimSuffix(v.name, "-restored"))
	}
	var listed []string
	for _, e := range do(t, h.control.ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries() {
		listed = append(listed, e.GetSnapshot().GetSnapshotId())
	}
	for _, snapshot := range slices.Concat(s.snapshots, s.members) {
		if !slices.Contains(listed, snapshot) {
			t.Errorf("snapshot %s is not listed: got %q", snapshot, listed)
		}
	}
	for _, in := range s.inline {
		in.publish(t, h)
	}
}

// use restages all volumes, grows them, and restores the snapshots.
func (s *state) use(t *testing.T, h *host) {
	t.Helper()
	for _, v := range s.volumes {
		v.grow(t)
		v.detach(t)
		v.attach(t)
	}
	for _, snapshot := range s.snapshots {
		name := strings.TrimSuffix(snapshot[strings.LastIndex(snapshot, ":")+1:], "-snapshot")
		i := slices.IndexFunc(s.volumes, func(v *vol) bool { return v.name == name })
		k := s.volumes[i].kind
		k.name = name
		s.volumes = append(s.volumes, h.create(t, k, "restored", snapshot))
	}
}

// remove deletes everything.
func (s *state) remove(t *testing.T, h *host) {
	t.Helper()
	for _, in := range s.inline {
		do(t, h.node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: in.id, TargetPath: in.target})
	}
	for _, v := range s.volumes {
		v.detach(t)
		do(t, h.control.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.id})
	}
	for _, snapshot := range s.snapshots {
		do(t, h.control.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	}
	do(t, h.groups.DeleteVolumeGroupSnapshot, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: s.group, SnapshotIds: s.members})
}

// TestUpgradeAndRollback: the driver of the release and the current one replace each other on a node. Each uses, grows,
// copies and deletes what the other has created, while volumes stay published.
func TestUpgradeAndRollback(t *testing.T) {
	testenv.RequireRoot(t)
	old := buildRelease(t)
	h := newHost(t, 2)
	h.run(t, old)
	var s state
	s.create(t, h, "old", "01")

	h.run(t, current)
	s.check(t, h)
	s.use(t, h)
	s.create(t, h, "new", "23")

	h.run(t, old)
	s.check(t, h)
	for _, v := range s.volumes {
		v.detach(t)
		v.attach(t)
		v.wantText(t, strings.TrimSuffix(v.name, "-restored"))
	}
	s.remove(t, h)
	for _, pool := range []string{h.pool, h.path("state/disks/disks")} {
		poll(t, func(context.Context) error {
			left, err := testenv.PoolEntries(pool)
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("got %q in %s, want no volumes and snapshots", left, pool)
			}
			return err
		})
	}
	h.run(t, "")
}
