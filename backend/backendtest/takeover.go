package backendtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// foreignMkfs are the commands with which other provisioners create filesystems: with the defaults of mkfs.
var foreignMkfs = map[string][]string{
	"ext4": {"mkfs.ext4", "-q", "-F", "-m0"}, "xfs": {"mkfs.xfs", "-q", "-f"}, "btrfs": {"mkfs.btrfs", "-q", "-f"},
}

// foreignSize is the size in bytes of a logical volume of another provisioner. An ext4 of this size has blocks of 1 KiB.
func (k Kind) foreignSize() int64 {
	if k.FSType == "ext4" {
		return 400 * mib
	}
	return k.Size()
}

// newForeign creates an active logical volume for the kind, as other provisioners do.
func (d *Driver) newForeign(t *testing.T, kind Kind, name string, content []byte) {
	t.Helper()
	size := fmt.Sprintf("%db", kind.foreignSize())
	args := []string{"lvcreate", "--yes", "-W", "y", "-n", name}
	if kind.Has(Thin) {
		args = append(args, "-T", d.volumeGroup()+"/pool0", "-V", size)
	} else {
		args = append(args, "-L", size, d.volumeGroup())
	}
	testenv.Run(t, "lvm", args...)
	device := "/dev/" + d.volumeGroup() + "/" + name
	if kind.Block() {
		write(t, device, content)
		return
	}
	mkfs := foreignMkfs[kind.FSType]
	testenv.Run(t, mkfs[0], append(mkfs[1:], device)...)
	withMounted(t, device, func(dir string) { write(t, filepath.Join(dir, "data"), content) })
}

// withMounted calls f while the filesystem on a device is mounted at dir.
func withMounted(t *testing.T, device string, f func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	testenv.Run(t, "mount", device, dir)
	f(dir)
	testenv.Run(t, "umount", dir)
}

// takeOver creates a volume of a logical volume with content.
func (d *Driver) takeOver(t *testing.T, kind Kind, name string) *testVolume {
	t.Helper()
	l, v := newVolumeFor(t, d, kind, kind.request(t, "logicalVolume", name))
	if v.GetCapacityBytes() != kind.foreignSize() {
		t.Errorf("got a volume of %d bytes, want the %d of its logical volume", v.GetCapacityBytes(), kind.foreignSize())
	}
	if got := l.logicalVolume(t); got != name {
		t.Errorf("the volume has the logical volume %q, want %s", got, name)
	}
	return l
}

// testTakenOver: a volume takes over a logical volume of another provisioner with its content, and can then be used as any
// other.
func testTakenOver(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	name, content := uuid.NewString(), pattern(130)
	d.newForeign(t, kind, name, content)
	before := len(d.logicalVolumes(t, "lv_name", ""))
	room, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.Parameters("logicalVolume", "none")})
	if err != nil || room.GetAvailableCapacity() != 0 {
		t.Errorf("a logical volume that does not exist has the capacity %v, %v, want 0", room, err)
	}
	l := d.takeOver(t, kind, name)
	testenv.Run(t, "lvm", "vgchange", "-aay", d.volumeGroup())
	state := strings.Fields(d.logicalVolumes(t, "lv_name,lv_active,lv_tags", "trivet.volume."+l.name())[0])
	if len(state) != 2 || strings.Contains(state[1], "trivet.unused") || !strings.Contains(state[1], "trivet.pool."+GroupPool) {
		t.Errorf("got logical volume %q, want an inactive one with the tags of its pool and not that it is unused", state)
	}
	if kind.Has(Thin) { // before the first stage
		c := d.newCopy(t, kind, fromSnapshot(l.snapshot(t)), 0)
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), content)
	}
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	larger := 2 * kind.foreignSize()
	_, err = l.expand(t.Context(), larger)
	must(t, err)
	_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, StagingTargetPath: l.staging, VolumeCapability: l.cap})
	must(t, err)
	wantSize(t, l, larger)
	l.unpublishAndUnstage(t)
	wantFilesystem(t, l, larger)
	d.Restart(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	must(t, l.delete(t.Context()))
	await(t, "the logical volume to be removed", func() bool { return l.logicalVolume(t) == "" })
	if after := len(d.logicalVolumes(t, "lv_name", "")); !kind.Has(Thin) && after != before-1 {
		t.Errorf("got %d logical volumes after the deletion, want %d", after, before-1)
	}
}

// testTakeoverRefused: a takeover that is refused changes nothing.
func testTakeoverRefused(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	group, name, content := d.volumeGroup(), "pvc-"+uuid.NewString(), pattern(131)
	device := "/dev/" + group + "/" + name
	d.newForeign(t, kind, name, content)
	state := func() []string {
		return d.logicalVolumes(t, "lv_name,lv_uuid,lv_size,lv_tags,lv_active,lv_autoactivation,lv_skip_activation", "")
	}
	refuse := func(req *csi.CreateVolumeRequest, code codes.Code, says ...string) {
		t.Helper()
		before := state()
		_, err := d.Control.CreateVolume(t.Context(), req)
		wantCode(t, err, code, append(says, "logicalVolume")...)
		if after := state(); !slices.Equal(after, before) {
			t.Errorf("the refused call changed the logical volumes from %q to %q", before, after)
		}
	}
	named := func(name string, more ...string) *csi.CreateVolumeRequest {
		return kind.request(t, append(more, "logicalVolume", name)...)
	}
	refuse(named("a/b"), codes.InvalidArgument, "lvs")
	refuse(named(name, "mkfsOptions", "-m 1"), codes.InvalidArgument, "mkfsOptions")
	refuse(named(name, "encryption", "luks2"), codes.InvalidArgument, "encryption")
	refuse(named(name, "csi.trivet.dev/namespace", "default"), codes.InvalidArgument, "FlexVolume")
	refuse(named("none"), codes.ResourceExhausted, "no such logical volume", "allowedTopologies")
	refuse(named("trivet.records."+GroupPool), codes.FailedPrecondition, "trivet.records")
	refuse(change(named(name), func(r *csi.CreateVolumeRequest) {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: kind.foreignSize() + 1}
	}), codes.OutOfRange, fmt.Sprint(kind.foreignSize()))
	refuse(change(named(name), func(r *csi.CreateVolumeRequest) {
		r.CapacityRange = &csi.CapacityRange{LimitBytes: kind.foreignSize() - 1}
	}), codes.OutOfRange, fmt.Sprint(kind.foreignSize()))
	open, err := os.Open(device)
	must(t, err)
	refuse(named(name), codes.FailedPrecondition, "in use", "lsblk")
	must(t, open.Close())
	d.refuseKinds(t, kind, named, refuse)
	testenv.Run(t, "lvm", "lvchange", "--activate", "n", group+"/"+name) // it stays inactive
	if !kind.Block() {
		other := kind.otherFilesystem()
		req := other.request(t, "logicalVolume", name)
		req.Parameters = kind.Parameters("logicalVolume", name)
		refuse(req, codes.InvalidArgument, "only "+other.FSType, kind.FSType)
		testenv.Run(t, "lvm", "lvchange", "--activate", "y", group+"/"+name)
		withMounted(t, device, func(string) { refuse(named(name), codes.FailedPrecondition, "unmount") })
		writeAt(t, device, []byte("CD001"), 32<<10+1)
		refuse(named(name), codes.InvalidArgument, "an ISO 9660")
		testenv.Run(t, "wipefs", "-qaf", device)
		refuse(named(name), codes.InvalidArgument, kind.FSType)
		return
	}
	l := d.takeOver(t, kind, name)
	refuse(named(name), codes.FailedPrecondition, "belongs to volume "+l.id)
	refuse(change(named(name), func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = fromVolume(l) }), codes.InvalidArgument, "volume_content_source")
	refuse(change(named("other"), func(r *csi.CreateVolumeRequest) { r.Name = l.name() }), codes.AlreadyExists, name)
	again, err := d.Control.CreateVolume(t.Context(), change(named(name), func(r *csi.CreateVolumeRequest) { r.Name = l.name() }))
	if err != nil || again.GetVolume().GetVolumeId() != l.id {
		t.Errorf("the same request again: got %v, %v, want volume %s", again, err, l.id)
	}
	d.newForeign(t, kind, "other", content)
	damaged := filepath.Join(d.Pool(), "volumes", "damaged")
	must(t, os.Mkdir(damaged, 0o700))
	refuse(named("other"), codes.FailedPrecondition, "not all records")
	must(t, os.Remove(damaged))
	d.takeOver(t, kind, "other")
}

// refuseKinds checks that logical volumes of other kinds are refused.
func (d *Driver) refuseKinds(t *testing.T, kind Kind, named func(string, ...string) *csi.CreateVolumeRequest, refuse func(*csi.CreateVolumeRequest, codes.Code, ...string)) {
	t.Helper()
	group := d.volumeGroup()
	testenv.Run(t, "lvm", "lvcreate", "--yes", "-Zn", "-Wn", "-L", "16m", "--type", "striped", "-i", "2", "--alloc", "anywhere", "-n", "striped", group)
	if kind.Has(Thin) {
		refuse(named("pool0"), codes.InvalidArgument, "is a thin pool")
		refuse(named("striped"), codes.InvalidArgument, "is not in the thin pool")
	} else {
		refuse(named("striped"), codes.FailedPrecondition, "is striped", "lvconvert")
		testenv.Run(t, "lvm", "lvcreate", "--yes", "-Zn", "-Wn", "-L", "16m", "--permission", "r", "-n", "read-only", group)
		refuse(named("read-only"), codes.FailedPrecondition, "lvchange --permission rw")
	}
}

// testTakeoverInterrupted: a logical volume of a takeover that was interrupted, and one of a volume whose record is lost,
// keep their data and can be taken over again.
func testTakeoverInterrupted(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	name, content := uuid.NewString(), pattern(132)
	d.newForeign(t, kind, name, content)
	move := func(l *testVolume, to string) {
		t.Helper()
		must(t, os.Rename(filepath.Join(d.Pool(), "volumes", l.name()), filepath.Join(d.Pool(), to)))
		d.Restart(t)
	}
	l := d.takeOver(t, kind, name)
	move(l, ".trivet/tmp/"+l.name()) // as before the commit
	d.wantEmpty(t)
	if tags := strings.TrimSpace(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_tags", d.volumeGroup()+"/"+name)); tags != "" {
		t.Errorf("got tags %q after an interrupted takeover, want none", tags)
	}
	l = d.takeOver(t, kind, name)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	move(l, "lost")
	d.wantPoolReasons(t, "DiskOrphaned")
	again := d.takeOver(t, kind, name)
	again.stageAndPublish(t)
	wantContent(t, again.data(again.target), content)
	again.unpublishAndUnstage(t)
	d.Restart(t)
	d.wantPoolReasons(t)
}
