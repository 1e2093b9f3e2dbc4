package backendtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// diskOverhead is the space of a disk that a volume cannot use, in bytes.
	diskOverhead = 2 << 20
	// partitionStart is the offset in bytes of the partition of a claimed disk.
	partitionStart = mib
)

// diskSize returns the size of a disk for a volume of 1 GiB, in bytes.
func (k Kind) diskSize() int64 { return gib + diskOverhead + k.Overhead() }

// startDisks starts a driver with a pool of the disks that match the globs devices.
func (k Kind) startDisks(tb testing.TB, devices ...string) *Driver {
	tb.Helper()
	return k.startDisksOn(tb, Node, devices...)
}

// startDisksOn is startDisks for a driver on a node with another name.
func (k Kind) startDisksOn(tb testing.TB, node string, devices ...string) *Driver {
	tb.Helper()
	m := Medium{Config: pool.Config{Section: &disk.Disks{Match: devices}}}
	return k.target.startOn(tb, m, func(o *driver.Options) { o.NodeID = node })
}

// GrowingLoop creates a disk from a file that can be enlarged.
func GrowingLoop(tb testing.TB, size int64) (device string, enlarge func(size int64)) {
	tb.Helper()
	device, image, _ := testenv.Disk(tb, size)
	return device, func(size int64) {
		if err := os.Truncate(image, size); err != nil {
			tb.Fatal(err)
		}
		testenv.Run(tb, "losetup", "-c", device)
	}
}

// diskNode returns the path of the volume's device node, which exists while the volume is attached.
func (l *testVolume) diskNode() string {
	_, rest, _ := strings.Cut(l.id, ":")
	return blockdev.NodePath(strings.ReplaceAll(rest, ":", "."))
}

// disk returns the kernel's name of the volume's disk.
func (l *testVolume) disk(t *testing.T) string {
	t.Helper()
	name, err := blockdev.KernelName(l.diskNode())
	must(t, err)
	dir, err := filepath.EvalSymlinks("/sys/class/block/" + name)
	must(t, err)
	return filepath.Base(filepath.Dir(dir))
}

// testDiskGrowth: a volume can be expanded only after its disk was enlarged.
func testDiskGrowth(t *testing.T, _ *Driver, kind Kind) {
	if kind.FSType == "ext4" {
		testenv.Require(t, "ext4-growth")
	}
	device, enlarge := kind.target.Growing(t, kind.diskSize())
	d := kind.startDisks(t, device)
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(5)
	write(t, l.data(l.target), content)
	_, err := l.expand(t.Context(), 2*gib)
	wantCode(t, err, codes.OutOfRange, "required_bytes", device, "enlarge the disk")
	enlarge(2 * kind.diskSize())
	for range 2 {
		resp, err := l.expand(t.Context(), 2*gib)
		must(t, err)
		if resp.GetCapacityBytes() < 2*gib || !resp.GetNodeExpansionRequired() {
			t.Errorf("ControllerExpandVolume: got %v, want at least 2 GiB and a node expansion", resp)
		}
		size := resp.GetCapacityBytes()
		node, err := d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: l.id, VolumePath: l.target, StagingTargetPath: l.staging, VolumeCapability: l.cap,
			CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		})
		if err != nil || node.GetCapacityBytes() != size {
			t.Errorf("NodeExpandVolume: got %v, %v; want %d bytes", node, err, size)
		}
		wantSize(t, l, size)
	}
	wantContent(t, l.data(l.target), content)
	writeBeyond(t, l, gib)
	_, err = l.expand(t.Context(), 1<<62)
	wantCode(t, err, codes.OutOfRange, "required_bytes")
	l.unpublishAndUnstage(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
}

// testDiskHealth: problems of a disk are reported as conditions. A volume whose disk was removed can be staged
// again when the disk is back.
func testDiskHealth(t *testing.T, _ *Driver, kind Kind) {
	device, image, pull := testenv.Disk(t, kind.diskSize())
	link := filepath.Join(t.TempDir(), "disk")
	must(t, os.Symlink(device, link))
	d := kind.startDisks(t, link, link+"-2")
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(8)
	write(t, l.data(l.target), content)
	l.wantReasons(t, nil, nil)
	storage, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) > 0 {
		t.Errorf("NodeGetStorageHealth: got %v, %v; want no conditions", storage, err)
	}
	// Sector 1 contains the header of the primary partition table.
	testenv.Run(t, "dd", "if=/dev/zero", "of="+device, "bs=512", "seek=1", "count=1", "conv=notrunc")
	l.wantReasons(t, []string{"PartitionTableDamaged"}, []string{"PartitionTableDamaged"})
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	pull()
	if node, control := l.reasons(t); len(node) == 0 || node[0] != "DiskMissing" || len(control) != 1 {
		t.Errorf("after the disk was removed: got conditions %q of the node and %q of the controller, want DiskMissing", node, control)
	}
	wantCode(t, l.stage(t.Context()), codes.Unavailable, "insert the disk again")
	_, err = l.expand(t.Context(), 2*gib)
	wantCode(t, err, codes.Unavailable, "insert the disk again")
	must(t, os.Remove(link))
	must(t, os.Symlink(kind.target.Plug(t, image), link)) // the disk may have another name now
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	duplicate, _, _ := testenv.Disk(t, kind.diskSize())
	testenv.Run(t, "dd", "if="+image, "of="+duplicate, "bs=1M", "count=2", "conv=fsync") // copies the mark
	must(t, os.Symlink(duplicate, link+"-2"))
	if node, control := l.reasons(t); len(node) == 0 || node[0] != "DiskTwice" || !slices.Equal(control, []string{"DiskTwice"}) {
		t.Errorf("with a disk and its copy: got conditions %q of the node and %q of the controller, want DiskTwice", node, control)
	}
	must(t, os.Remove(link+"-2"))
	l.wantReasons(t, []string{"PartitionTableDamaged"}, []string{"PartitionTableDamaged"})
}

// uuidOf returns the part of the pool's UUID that is in a volume's ID.
func uuidOf(t *testing.T, id string) string {
	t.Helper()
	parsed, err := volume.ParseID(id)
	must(t, err)
	return parsed.PoolUUID
}

// testDiskMoved moves a disk to another node, and its record to the state directory of that node, as described
// in docs/kinds/disks.md: with its whole pool, or alone.
func testDiskMoved(t *testing.T, _ *Driver, kind Kind) {
	for name, script := range map[string]string{
		"pool": `mv $OLD/disks/disks $CARRIED && rm $OLD/known-pools/disks
rm -rf $NEW/disks/disks $NEW/known-pools/disks && cp -a $CARRIED $NEW/disks/disks`,
		"disk": `mv $OLD/disks/disks/volumes/$NAME $CARRIED
cp -a $CARRIED $NEW/disks/disks/volumes/$NAME
UUID=$(grep -o '"uuid":"[0-9a-f]*' $NEW/disks/disks/pool.json | tail -c 9)
sed -i "s/disk:disks.$UUID_OLD:$NAME/disk:disks.$UUID:$NAME/" $NEW/disks/disks/volumes/$NAME/volume.json`,
	} {
		t.Run(name, func(t *testing.T) {
			oldDisks, newDisks := t.TempDir(), t.TempDir()
			device, image, pull := testenv.Disk(t, kind.diskSize())
			must(t, os.Symlink(device, oldDisks+"/disk"))
			before := kind.startDisks(t, oldDisks+"/*")
			const elsewhere = "node-2.example"
			after := kind.startDisksOn(t, elsewhere, newDisks+"/*")
			l := newVolume(t, before, kind, multiWriter)
			l.stageAndPublish(t)
			content := pattern(13)
			write(t, l.data(l.target), content)
			l.unpublishAndUnstage(t)
			pull()
			testenv.Run(t, "env", "OLD="+before.Options.StateDir, "NEW="+after.Options.StateDir, "CARRIED="+filepath.Join(t.TempDir(), "carried"), "NAME="+l.name(), "UUID_OLD="+uuidOf(t, l.id), "sh", "-ec", script)
			must(t, os.Symlink(kind.target.Plug(t, image), newDisks+"/disk"))
			before.Restart(t)
			after.Restart(t)
			if left := listed(t, before); len(left) > 0 {
				t.Errorf("got volumes %v on the old node, want none", left)
			}
			found := listed(t, after)
			if len(found) != 1 || !strings.Contains(found[0].String(), elsewhere) || (found[0].GetVolumeId() == l.id) != (name == "pool") {
				t.Fatalf("got volumes %v on the new node, want %s, with a new ID if only the disk was moved", found, l.id)
			}
			l.d, l.id = after, found[0].GetVolumeId()
			l.stageAndPublish(t)
			wantContent(t, l.data(l.target), content)
			l.wantReasons(t, nil, nil)
			l.cleanUp(t)
			await(t, "the disk to be wiped", func() bool { return capacity(t, after, kind) > 0 })
		})
	}
}

// listed returns all volumes of a driver.
func listed(t *testing.T, d *Driver) (volumes []*csi.Volume) {
	t.Helper()
	list, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range list.GetEntries() {
		volumes = append(volumes, e.GetVolume())
	}
	return volumes
}

// testDiskDying: a volume can be unpublished and unstaged while its disk fails to read.
func testDiskDying(t *testing.T, _ *Driver, kind Kind) {
	device, image, _ := testenv.Disk(t, kind.diskSize())
	d := kind.startDisks(t, device)
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	must(t, os.Truncate(image, 0)) // all reads beyond the end of the file fail
	testenv.Run(t, "blockdev", "--flushbufs", device)
	wantCode(t, l.publishAt(t.Context(), filepath.Join(t.TempDir(), "second"), false), codes.Unavailable, "was removed")
	d.Restart(t)
	l.unpublishAndUnstage(t)
	if n := mountsAt(t, l.staging) + mountsAt(t, l.target); n != 0 {
		t.Errorf("got %d mounts after unstage, want none", n)
	}
	must(t, os.Truncate(image, kind.diskSize()))
}

// testDiskRecordRestored: a disk that has a filesystem is not formatted, even if its record was restored from a
// backup that is older than the filesystem.
func testDiskRecordRestored(t *testing.T, d *Driver, kind Kind) {
	for name, restore := range map[string]func(formatted string) error{
		"never formatted": os.Remove,
		"half formatted": func(formatted string) error {
			return os.Rename(formatted, filepath.Join(filepath.Dir(formatted), string(pool.Formatting)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newVolume(t, d, kind, multiWriter)
			l.stageAndPublish(t)
			content := pattern(12)
			write(t, l.data(l.target), content)
			l.unpublishAndUnstage(t)
			must(t, restore(filepath.Join(filepath.Dir(l.record()), string(pool.Formatted))))
			if kind.Has(Encrypted) {
				must(t, os.Remove(filepath.Join(filepath.Dir(l.record()), string(pool.Encrypted))))
			}
			l.stageAndPublish(t)
			wantContent(t, l.data(l.target), content)
		})
	}
}

// testCloneOnLarger: a clone on a larger disk shows zeros after the copied content, or random data if it is encrypted,
// whatever data the disk had before.
func testCloneOnLarger(t *testing.T, _ *Driver, kind Kind) {
	small, _, _ := testenv.Disk(t, kind.diskSize())
	large, image, _ := testenv.Disk(t, kind.diskSize()+64<<20)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	stale := kind.diskSize() + 16<<20 // not an offset at which the driver looks for other data
	_, err = f.WriteAt([]byte("secret"), stale)
	must(t, err)
	d := kind.startDisks(t, small, large)
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(7)
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	c := d.newCopy(t, kind, fromVolume(l), 0)
	c.stageAndPublish(t)
	defer c.unpublishAndUnstage(t)
	wantContent(t, c.data(c.target), content)
	device, err := os.Open(c.target)
	must(t, err)
	defer device.Close()
	tail := make([]byte, 64<<20)
	n, err := device.ReadAt(tail, kind.diskSize())
	if !errors.Is(err, io.EOF) {
		t.Errorf("reading the tail: %v", err)
	}
	left := bytes.Trim(tail[:n], "\x00")
	if kind.Has(Encrypted) && !bytes.Contains(left, []byte("secret")) { // blocks that were never written contain random data
		left = nil
	}
	if n == 0 || len(left) > 0 {
		t.Errorf("after the copied content: got %q in %d bytes, want zeros", left, n)
	}
}

// testDiskHeader: the header of a deleted volume is erased, even if its other data is not.
func testDiskHeader(t *testing.T, _ *Driver, kind Kind) {
	device, _, _ := testenv.Disk(t, kind.diskSize())
	d := kind.startDisks(t, device)
	room := capacity(t, d, kind)
	l := newVolumeOfSize(t, d, kind, gib, "wipe", "none")
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(14))
	l.unpublishAndUnstage(t)
	storage, err := os.Open(device)
	must(t, err)
	defer storage.Close()
	read := func(at, size int64) []byte {
		t.Helper()
		b := make([]byte, size)
		_, err := storage.ReadAt(b, at)
		must(t, err)
		return bytes.Trim(b, "\x00")
	}
	must(t, l.delete(t.Context()))
	await(t, "the disk to be free", func() bool { return capacity(t, d, kind) == room })
	if len(read(partitionStart, kind.Overhead())) > 0 {
		t.Error("the disk of a deleted volume still has a header or keyslots")
	}
	if len(read(partitionStart+kind.Overhead(), 128*mib)) == 0 {
		t.Error("the data is overwritten, so the test is not valid")
	}
}

// claimedDisk returns the device of the volume's disk.
func (l *testVolume) claimedDisk(t *testing.T) string {
	t.Helper()
	record, err := os.ReadFile(l.record())
	must(t, err)
	var v struct{ Section struct{ GUID string } }
	must(t, json.Unmarshal(record, &v))
	d, _, err := blockdev.SearchClaim(l.d.Options.Config.Pools[0].Section.(*disk.Disks).Match, v.Section.GUID)
	must(t, err)
	return d.Path
}

// attachPartition returns a new loop device that shows the partition of an unstaged volume.
func (l *testVolume) attachPartition(t *testing.T) string {
	t.Helper()
	return testenv.Run(t, "losetup", "--find", "--show", "--offset", fmt.Sprint(partitionStart), "--sizelimit", fmt.Sprint(gib+l.kind.Overhead()), l.claimedDisk(t))
}

// testDiskPulled: a volume can be unpublished and unstaged after its disk was pulled, and staged again when the
// disk is back.
func testDiskPulled(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(9)
	write(t, l.data(l.target), content)
	back := sync.OnceFunc(kind.target.Pull(t, l.disk(t)))
	t.Cleanup(back)
	wantCode(t, l.publishAt(t.Context(), filepath.Join(t.TempDir(), "second"), false), codes.Unavailable, "was removed")
	_, control := l.reasons(t)
	if !slices.Equal(control, []string{"DiskMissing"}) {
		t.Errorf("got conditions %q of the controller, want DiskMissing", control)
	}
	d.Restart(t)
	l.unpublishAndUnstage(t)
	wantCode(t, l.stage(t.Context()), codes.Unavailable, "insert the disk again")
	back()
	await(t, "stage to succeed when the disk is back", func() bool { return l.stage(t.Context()) == nil })
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
}

// testIdempotentDisk: the same request returns the same disk. A different request of the same
// name is refused.
func testIdempotentDisk(t *testing.T, d *Driver, kind Kind) {
	base := func() *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{
			Name: "idem-disk", CapacityRange: &csi.CapacityRange{RequiredBytes: gib, LimitBytes: 2 * gib},
			VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(writer)}, Parameters: kind.Parameters(),
		}
	}
	first, err := create(t, d, base())
	must(t, err)
	if first.GetVolumeContext()["enforced"] == "false" {
		t.Errorf("got %v, want a volume with an enforced size", first)
	}
	resp, err := d.Control.CreateVolume(t.Context(), base())
	if err != nil || resp.GetVolume().String() != first.String() {
		t.Errorf("second CreateVolume: got %v, %v; want %v", resp, err, first)
	}
	for name, tc := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		code   codes.Code
		says   string
	}{
		"larger size":              {func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 2 * gib }, codes.AlreadyExists, "idem-disk"},
		"another filesystem":       {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = kind.otherFilesystem().Capability(writer) }, codes.AlreadyExists, "idem-disk"},
		"another volume mode":      {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = kind.otherMode().Capability(writer) }, codes.AlreadyExists, "block"},
		"another wipe":             {func(r *csi.CreateVolumeRequest) { r.Parameters["wipe"] = "zero" }, codes.AlreadyExists, "wipe"},
		"parameter of directories": {func(r *csi.CreateVolumeRequest) { r.Parameters["subDir"] = "x" }, codes.InvalidArgument, "subDir"},
		"parameter of images":      {func(r *csi.CreateVolumeRequest) { r.Parameters["allocation"] = "thick" }, codes.InvalidArgument, "allocation"},
		"invalid wipe":             {func(r *csi.CreateVolumeRequest) { r.Parameters["wipe"] = "twice" }, codes.InvalidArgument, "wipe"},
	} {
		t.Run(name, func(t *testing.T) {
			req := base()
			tc.change(req)
			_, err := d.Control.CreateVolume(t.Context(), req)
			wantCode(t, err, tc.code, tc.says)
		})
	}
}

// testDiskSizes: a volume has the size of a disk within the requested range, or is refused.
func testDiskSizes(t *testing.T, _ *Driver, kind Kind) {
	one, _, _ := testenv.Disk(t, kind.diskSize())
	other, _, _ := testenv.Disk(t, kind.diskSize())
	d := kind.startDisks(t, one, other) // all its disks are free, whatever earlier tests have deleted
	free := capacity(t, d, kind)
	allFree := func() bool { return capacity(t, d, kind) == free }
	tooSmall := codes.OutOfRange
	if kind.Block() { // a raw volume can be that small, but no disk is
		tooSmall = codes.ResourceExhausted
	}
	for _, tc := range []struct {
		name string
		r    *csi.CapacityRange
		code codes.Code
	}{
		{"no range", nil, codes.OK},
		{"one byte", &csi.CapacityRange{RequiredBytes: 1}, codes.OK},
		{"too large", &csi.CapacityRange{RequiredBytes: 1 << 50}, codes.ResourceExhausted},
		{"largest number", &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, codes.ResourceExhausted},
		{"every disk is larger", &csi.CapacityRange{RequiredBytes: gib / 2, LimitBytes: gib / 2}, codes.ResourceExhausted},
		{"limit below the smallest volume", &csi.CapacityRange{LimitBytes: 1 << 20}, tooSmall},
		{"negative size", &csi.CapacityRange{RequiredBytes: -1}, codes.InvalidArgument},
		{"limit below required", &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, codes.InvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req := kind.request(t)
			req.CapacityRange = tc.r
			v, err := create(t, d, req)
			wantCode(t, err, tc.code)
			if err == nil && (v.GetCapacityBytes() < gib || capacity(t, d, kind) != free-v.GetCapacityBytes()-kind.Overhead()) {
				t.Errorf("got %v, and the capacity changed from %d to %d; want it to decrease by the size of the volume, at least 1 GiB, and that of its header", v, free, capacity(t, d, kind))
			}
		})
		await(t, "all disks to be free again", allFree)
	}
}
