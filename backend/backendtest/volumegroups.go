package backendtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// groupDisks are the disks of a virtual machine that contain no volume group of a test.
var groupDisks struct {
	sync.Mutex
	once sync.Once
	free []string
	last int // the number of the last group
}

// takeGroupDisk returns an unused disk. The first disk contains the temporary files.
func takeGroupDisk(tb testing.TB) (disk string, number int) {
	tb.Helper()
	groupDisks.Lock()
	defer groupDisks.Unlock()
	groupDisks.once.Do(func() { groupDisks.free, _ = filepath.Glob("/dev/vd[b-z]") })
	if len(groupDisks.free) == 0 {
		tb.Fatal("the virtual machine has no unused disk for a volume group")
	}
	disk, groupDisks.free = groupDisks.free[0], groupDisks.free[1:]
	groupDisks.last++
	return disk, groupDisks.last
}

// OnGroup creates a medium that is a volume group with one physical volume. It is removed when the test ends.
func OnGroup(tb testing.TB, _ Room) Medium {
	tb.Helper()
	disk, number := takeGroupDisk(tb)
	name := fmt.Sprintf("vg-test%d-%d", os.Getpid(), number) // killed programs may have left device nodes of earlier groups
	testenv.Run(tb, "lvm", "vgcreate", "--yes", name, disk)
	tb.Cleanup(func() {
		testenv.Run(tb, "lvm", "vgremove", "-ff", "--yes", name)
		testenv.Run(tb, "lvm", "pvremove", "-ff", "--yes", disk)
		groupDisks.Lock()
		defer groupDisks.Unlock()
		groupDisks.free = append(groupDisks.free, disk)
	})
	return Medium{Config: pool.Config{Section: &lvm.Group{VolumeGroup: name}}}
}

// CheckOnlyRecords returns an error if a volume group has a logical volume other than that of the records, and the thin pool.
func CheckOnlyRecords(g *lvm.Group) error {
	out, err := exec.Command("lvm", "lvs", "--noheadings", "-o", "lv_name", g.VolumeGroup).Output()
	names := slices.DeleteFunc(strings.Fields(string(out)), func(name string) bool { return name == g.ThinPool })
	if err == nil && (len(names) != 1 || !strings.HasPrefix(names[0], "trivet.records.")) {
		err = fmt.Errorf("got logical volumes %q, want only that of the records", names)
	}
	return err
}

// volumeGroup returns the name of the driver's volume group.
func (d *Driver) volumeGroup() string {
	return d.Options.Config.Pools[0].Section.(*lvm.Group).VolumeGroup
}

// logicalVolume returns the name of the volume's logical volume; empty if there is none.
func (l *testVolume) logicalVolume(t *testing.T) string {
	t.Helper()
	for _, line := range strings.Split(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_name,lv_tags", l.d.volumeGroup()), "\n") {
		name, tags, _ := strings.Cut(strings.TrimSpace(line), " ")
		if slices.Contains(strings.Split(strings.TrimSpace(tags), ","), "trivet.volume."+l.name()) {
			return name
		}
	}
	return ""
}

// withImage calls f with the path of the image or device of an unstaged volume, or of the device in its container.
func (l *testVolume) withImage(t *testing.T, f func(path string)) {
	t.Helper()
	if l.kind.Has(Encrypted) {
		plain := f
		f = func(path string) { l.withContainer(t, path, plain) }
	}
	l.withStorage(t, f)
}

// Fsck checks the filesystem of an unstaged volume of the kind in a pool on a medium. Medium.Dir must be set.
func (m Medium) Fsck(t *testing.T, kind Kind, id string) {
	t.Helper()
	d := &Driver{poolDir: m.Dir, Options: driver.Options{Config: driver.Config{Pools: []pool.Config{m.Config}}}}
	l := &testVolume{d: d, kind: kind, id: id}
	l.withImage(t, func(path string) { must(t, testenv.Fsck(kind.FSType, path)) })
}

// withStorage calls f with the path of the image or device of an unstaged volume.
func (l *testVolume) withStorage(t *testing.T, f func(path string)) {
	t.Helper()
	switch {
	case l.kind.Has(WholeDisk):
		partition := l.attachPartition(t)
		f(partition)
		testenv.Run(t, "losetup", "-d", partition)
		return
	case !l.kind.Has(Logical):
		f(l.image())
		return
	}
	name := l.d.volumeGroup() + "/" + l.logicalVolume(t)
	testenv.Run(t, "lvm", "lvchange", "-ay", "-K", name)
	f("/dev/" + name)
	testenv.Run(t, "lvm", "lvchange", "-an", name)
}

// testLogicalVolumes: a volume has one logical volume, which is active only while the volume is staged, and is removed
// after the volume is deleted. A missing logical volume is reported.
func testLogicalVolumes(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	at := d.volumeGroup() + "/" + l.logicalVolume(t)
	attributes := func(column string) string {
		return strings.TrimSpace(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", column, at))
	}
	if tags := attributes("lv_tags"); !strings.Contains(tags, "trivet.unused") || !strings.Contains(tags, "trivet.pool."+GroupPool) {
		t.Errorf("got tags %q of a new volume, want those of its pool and that it is unused", tags)
	}
	l.stageAndPublish(t)
	if tags := attributes("lv_tags"); strings.Contains(tags, "trivet.unused") {
		t.Errorf("got tags %q of a staged volume, want none that it is unused", tags)
	}
	l.unpublishAndUnstage(t)
	if active := attributes("lv_active"); active != "" {
		t.Errorf("an unstaged volume is %s, want inactive", active)
	}
	testenv.Run(t, "lvm", "lvrename", at, at+"-renamed")
	l.stageAndPublish(t)
	l.unpublishAndUnstage(t)
	testenv.Run(t, "lvm", "lvremove", "--yes", at+"-renamed")
	d.Restart(t)
	l.wantReasons(t, []string{"DiskMissing", "DeviceDetached"}, []string{"DiskMissing"})
	wantCode(t, l.stage(t.Context()), codes.Unavailable, "no logical volume", "vgcfgrestore")
	must(t, l.delete(t.Context()))
}

// testGroupMoved: a driver on another node without a state directory finds the volumes of an imported group.
func testGroupMoved(t *testing.T, _ *Driver, kind Kind) {
	state := t.TempDir() // removed after the driver has unmounted the records in it
	d := kind.start(t, "", func(*driver.Options) {})
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(21)
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	newVolume(t, d, kind, multiWriter) // never staged
	before := listed(t, d)
	d.Stop(t)
	if kind.Has(Thin) {
		testenv.Run(t, "lvm", "lvchange", "--activate", "n", d.volumeGroup()+"/pool0")
	}
	testenv.Run(t, "lvm", "vgexport", d.volumeGroup())
	d.Options.NodeID, d.Options.StateDir = "node-2.example", state
	d.start(t)
	_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: l.id})
	wantCode(t, err, codes.Unavailable, "exported", "vgimport")
	testenv.Run(t, "lvm", "vgimport", d.volumeGroup())
	await(t, "the imported group to be opened", func() bool {
		_, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.target.Class})
		return err == nil
	})
	if after := listed(t, d); len(after) != len(before) || after[0].GetVolumeId() != before[0].GetVolumeId() {
		t.Errorf("got volumes %v on the other node, want %v", after, before)
	}
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
}

// testGroupRoom: the capacity is that of the free extents. Volumes that are created at the same time get no extent
// twice, and deleted volumes count until their extents are free.
func testGroupRoom(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	room := capacity(t, d, kind)
	header := kind.Overhead()
	size := (room+header)/3/(4*mib)*(4*mib) - header
	ids := createMany(t, d, kind, 5, size)
	if len(ids) != 3 {
		t.Errorf("created %d volumes of a third of the capacity, want 3", len(ids))
	}
	rest := capacity(t, d, kind)
	if want := room - 3*(size+header); rest != max(want, 0) {
		t.Errorf("got a capacity of %d bytes, want the rest of %d bytes", rest, want)
	}
	d.Restart(t)
	if again := capacity(t, d, kind); again != rest {
		t.Errorf("a restart changed the capacity from %d to %d", rest, again)
	}
	for _, id := range ids {
		_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
	}
	await(t, "the extents of the deleted volumes to be free", func() bool { return capacity(t, d, kind) == room })
}

// testForeignVolumes: the driver never changes logical volumes of others, whatever their names and tags.
func testForeignVolumes(t *testing.T, _ *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{})
	group := m.Config.Section.(*lvm.Group).VolumeGroup
	content := pattern(22)
	foreign := map[string][]string{
		"data": nil,
		"trivet.0b51d1a0-5a0c-4b43-a7ec-0c2b7a9d4a11": {"trivet.pool." + GroupPool, "trivet.guid.0b51d1a0-5a0c-4b43-a7ec-0c2b7a9d4a11", "trivet.unused"},
		"trivet.guid": {"trivet.pool." + GroupPool, "trivet.volume.pvc-1", "trivet.records"},
	}
	for name, tags := range foreign {
		args := []string{"lvcreate", "--yes", "-Zn", "-Wn", "-L", "16m", "-n", name}
		for _, tag := range tags {
			args = append(args, "--addtag", tag)
		}
		testenv.Run(t, "lvm", append(args, group)...)
		write(t, "/dev/"+group+"/"+name, content)
	}
	wantForeign := func() {
		t.Helper()
		for name := range foreign {
			wantContent(t, "/dev/"+group+"/"+name, content)
		}
	}
	d := kind.target.startOn(t, m, func(*driver.Options) {})
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	must(t, l.delete(t.Context()))
	d.wantEmpty(t)
	d.Restart(t)
	wantForeign()
	storage, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) == 0 {
		t.Errorf("NodeGetStorageHealth: got %v, %v; want conditions for the orphaned logical volumes", storage, err)
	}
	d.Stop(t)
	// A logical volume with the name of the records is not used.
	testenv.Run(t, "lvm", "lvrename", group+"/trivet.records."+GroupPool, group+"/away")
	testenv.Run(t, "lvm", "lvrename", group+"/data", group+"/trivet.records."+GroupPool)
	d.start(t)
	_, err = d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.target.Class})
	wantCode(t, err, codes.Unavailable, "not its tags")
	wantContent(t, "/dev/"+group+"/trivet.records."+GroupPool, content)
	d.Stop(t)
	testenv.Run(t, "lvm", "lvrename", group+"/trivet.records."+GroupPool, group+"/data")
	testenv.Run(t, "lvm", "lvrename", group+"/away", group+"/trivet.records."+GroupPool)
	d.start(t)
	wantForeign()
}

// testHostileSignatures: what a tenant writes to a raw device does not change the volume group.
func testHostileSignatures(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	// The tenant makes a physical volume, and a volume group with the name of the driver's. Like a pod, it has its own
	// directory for device nodes.
	device := deviceOf(t, l)
	inTenant := `devices{dir="` + t.TempDir() + `" scan=["/dev"] obtain_device_list_from_udev=0 use_devicesfile=0 scan_lvs=1 global_filter=["a|^` + device + `$|","r|.*|"]}`
	testenv.Run(t, "lvm", "vgcreate", "--yes", "--config", inTenant, d.volumeGroup(), device)
	testenv.Run(t, "lvm", "lvcreate", "--yes", "-an", "-Zn", "-Wn", "--config", inTenant, "-l", "10", "-n", "trivet.records."+GroupPool, d.volumeGroup())
	d.Restart(t)
	second := newVolume(t, d, kind, multiWriter)
	second.stageAndPublish(t)
	second.unpublishAndUnstage(t)
	resp, err := l.expand(t.Context(), 2*gib)
	if err != nil || resp.GetCapacityBytes() != 2*gib {
		t.Errorf("expanding a volume with a physical volume inside: got %v, %v; want 2 GiB", resp, err)
	}
	l.unpublishAndUnstage(t)
	d.Restart(t)
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
}

// testDeletedData: a new volume does not contain the data of deleted ones.
func testDeletedData(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	modes := []string{"discard", "zero"}
	if kind.Has(Thin) {
		modes = modes[:1] // the pool zeroes its blocks
	}
	for _, wipe := range modes {
		room := capacity(t, d, kind)
		secret := bytes.Repeat([]byte("secret!!"), 1<<17)
		l := newVolumeOfSize(t, d, kind, 64*mib, "wipe", wipe)
		l.stageAndPublish(t)
		for at := range int64(64) {
			writeAt(t, l.target, secret, at*mib)
		}
		l.unpublishAndUnstage(t)
		must(t, l.delete(t.Context()))
		await(t, "the extents to be free", func() bool { return capacity(t, d, kind) == room })
		l = newVolumeOfSize(t, d, kind, 64*mib, "wipe", wipe)
		l.stageAndPublish(t)
		content, err := os.ReadFile(l.target)
		must(t, err)
		i := bytes.IndexFunc(content, func(r rune) bool { return r != 0 })
		if kind.Has(Encrypted) { // blocks that were never written contain random data
			i = bytes.Index(content, secret[:8])
		}
		if i >= 0 || len(content) != int(64*mib) {
			t.Errorf("wipe %s: got %d bytes, with data at %d, want 64 MiB without", wipe, len(content), i)
		}
		l.unpublishAndUnstage(t)
	}
}

// testForeignData: a raw volume and the extents by which it grows contain only zeros, although removed logical volumes of
// others have left data in the free extents.
func testForeignData(t *testing.T, _ *Driver, kind Kind) {
	for _, wipe := range []string{"discard", "zero"} {
		t.Run(wipe, func(t *testing.T) { testForeignDataZeroed(t, kind, wipe) })
	}
}

func testForeignDataZeroed(t *testing.T, kind Kind, wipe string) {
	t.Helper()
	d := kind.start(t, "", func(*driver.Options) {})
	group := d.volumeGroup()
	const size = 256 * mib
	testenv.Run(t, "lvm", "lvcreate", "--yes", "-Zn", "-Wn", "-L", fmt.Sprintf("%db", size), "-n", "foreign", group)
	secret := bytes.Repeat([]byte("secret!!"), 1<<17)
	for at := int64(0); at < size; at += int64(len(secret)) {
		writeAt(t, "/dev/"+group+"/foreign", secret, at)
	}
	dirty := extents(t, group, "foreign")
	testenv.Run(t, "lvm", "lvremove", "--yes", group+"/foreign")
	l := newVolumeOfSize(t, d, kind, 32*mib, "wipe", wipe)
	other := newVolumeOfSize(t, d, kind, 16*mib, "wipe", wipe) // the extents of the first volume are not contiguous
	l.stageAndPublish(t)
	l.wantZeros(t, 32*mib)
	for _, larger := range []int64{96 * mib, 160 * mib} {
		_, err := l.expand(t.Context(), larger)
		must(t, err)
		_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, StagingTargetPath: l.staging, VolumeCapability: l.cap})
		must(t, err)
		l.wantZeros(t, larger)
	}
	for _, used := range []*testVolume{l, other} {
		for extent := range extents(t, group, used.logicalVolume(t)) {
			if !dirty[extent] {
				t.Errorf("volume %s has the extent %d, which contained no data", used.id, extent)
			}
		}
	}
	l.unpublishAndUnstage(t)
}

// extents returns the physical extents of a logical volume.
func extents(t *testing.T, group, name string) map[int]bool {
	t.Helper()
	all := map[int]bool{}
	for _, r := range strings.Fields(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "seg_pe_ranges", group+"/"+name)) {
		var first, last int
		if _, err := fmt.Sscanf(r[strings.Index(r, ":")+1:], "%d-%d", &first, &last); err != nil {
			t.Fatalf("extents %q: %v", r, err)
		}
		for extent := first; extent <= last; extent++ {
			all[extent] = true
		}
	}
	return all
}

// wantZeros fails unless the published raw volume has a size and contains only zeros.
func (l *testVolume) wantZeros(t *testing.T, size int64) {
	t.Helper()
	content, err := os.ReadFile(l.target)
	must(t, err)
	if i := bytes.IndexFunc(content, func(r rune) bool { return r != 0 }); i >= 0 || int64(len(content)) != size {
		t.Errorf("got %d bytes, with data at %d, want %d zeros", len(content), i, size)
	}
}

// testZeroingCancelled: DeleteVolume ends the zeroing of a new volume and of its growth, and all extents become free. A
// retry of a call that took too long joins it.
func testZeroingCancelled(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	l := newVolumeOfSize(t, d, kind, 16*mib)
	room := capacity(t, d, kind)
	large := &csi.CapacityRange{RequiredBytes: room / 4 * 3 / (4 * mib) * (4 * mib)}
	req := kind.request(t)
	req.Name, req.CapacityRange = newName(t), large
	briefly := func(call func(ctx context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := call(ctx); err != nil && status.Code(err) != codes.Aborted && status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a call that takes too long: got %v, want Aborted", err)
		}
	}
	for range 2 {
		briefly(func(ctx context.Context) error { _, err := d.Control.CreateVolume(ctx, req); return err })
	}
	if got := capacity(t, d, kind); got > room/2 {
		t.Errorf("got a capacity of %d bytes while a volume of three quarters of it is created", got)
	}
	id := strings.TrimSuffix(l.id, l.name()) + req.GetName()
	_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	await(t, "the extents to be free", func() bool { return capacity(t, d, kind) == room })
	for range 2 {
		briefly(func(ctx context.Context) error { _, err := l.expand(ctx, large.GetRequiredBytes()); return err })
	}
	l.stageAndPublish(t) // it does not wait for the zeroing
	l.unpublishAndUnstage(t)
	d.Restart(t)
	if got := capacity(t, d, kind); got != room {
		t.Errorf("got a capacity of %d bytes after the restart, want %d", got, room)
	}
}

// testHostActivation: the node activates logical volumes itself, as administrators and boot scripts do. Volumes that are
// not staged are not activated automatically. Those that are active can be staged, expanded and deleted.
func testHostActivation(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	group := d.volumeGroup()
	l := newVolume(t, d, kind, multiWriter)
	name := l.logicalVolume(t)
	wantActive := func(when, want string) {
		t.Helper()
		if active := strings.TrimSpace(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_active", group+"/"+name)); active != want {
			t.Errorf("%s the logical volume is %q, want %q", when, active, want)
		}
	}
	wantActive("after the creation", "")
	l.stageAndPublish(t)
	content := pattern(23)
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	testenv.Run(t, "lvm", "vgchange", "-aay", group)
	testenv.Run(t, "lvm", "pvscan", "--cache", "-aay")
	wantActive("after vgchange -aay and pvscan", "")
	testenv.Run(t, "lvm", "vgchange", "-ay", "--ignoreactivationskip", group)
	wantActive("after vgchange -ay", "active")
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	wantActive("after unstaging", "")
	testenv.Run(t, "lvm", "vgchange", "-ay", "--ignoreactivationskip", group)
	if kind.growsHere() {
		_, err := l.expand(t.Context(), gib+gib/2)
		must(t, err)
		l.stageAndPublish(t)
		wantSize(t, l, gib+gib/2)
		l.unpublishAndUnstage(t)
		testenv.Run(t, "lvm", "vgchange", "-ay", "--ignoreactivationskip", group)
	}
	open, err := os.Open("/dev/" + group + "/" + name)
	must(t, err)
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "has its logical volume open")
	must(t, open.Close())
	must(t, l.delete(t.Context()))
	d.wantEmpty(t)
	if name := l.logicalVolume(t); name != "" {
		t.Errorf("the deleted volume still has the logical volume %s", name)
	}
}

// testHostileFormats: signatures and partition tables that a tenant writes to a raw device create no devices, whatever
// the node does meanwhile, and the volume can be expanded, staged again and deleted.
func testHostileFormats(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "", func(*driver.Options) {})
	group := d.volumeGroup()
	mbr := make([]byte, 512)
	copy(mbr[446:], []byte{0x80, 0, 2, 0, 0x83, 0xff, 0xff, 0xff, 8, 0, 0, 0, 0, 8, 0, 0}) // 2048 sectors from sector 8 on
	copy(mbr[510:], []byte{0x55, 0xaa})
	md := slices.Concat([]byte{0xfc, 0x4e, 0x2b, 0xa9, 1}, make([]byte, 251)) // version 1
	type format struct {
		offset  int64
		content []byte
	}
	for name, formats := range map[string][]format{
		"partition tables": {{0, mbr}, {512, slices.Concat([]byte("EFI PART\x00\x00\x01\x00\x5c"), make([]byte, 499))}},
		"RAID":             {{4096, md}, {32*mib - 8192, md}, {32*mib - 65536, md}},
		"LUKS":             {{0, slices.Concat([]byte("LUKS\xba\xbe\x00\x02"), make([]byte, 504))}},
	} {
		l := newVolumeOfSize(t, d, kind, 32*mib)
		l.stageAndPublish(t)
		before := blockDevices(t)
		for _, f := range formats {
			writeAt(t, l.target, f.content, f.offset)
		}
		if out, err := exec.Command("blockdev", "--rereadpt", l.target).CombinedOutput(); err == nil {
			t.Errorf("%s: the kernel has read a partition table on a logical volume: %s", name, out)
		}
		testenv.Run(t, "lvm", "vgchange", "-ay", group)
		testenv.Run(t, "lvm", "pvscan", "--cache", "-aay")
		d.Restart(t)
		if after := blockDevices(t); !slices.Equal(after, before) {
			t.Errorf("%s: got the block devices %q, want %q", name, after, before)
		}
		_, err := l.expand(t.Context(), 64*mib)
		must(t, err)
		l.unpublishAndUnstage(t)
		l.stageAndPublish(t)
		content, err := os.ReadFile(l.target)
		must(t, err)
		for _, f := range formats {
			if !bytes.Equal(content[f.offset:f.offset+int64(len(f.content))], f.content) {
				t.Errorf("%s: the content at %d has changed", name, f.offset)
			}
		}
		l.unpublishAndUnstage(t)
		must(t, l.delete(t.Context()))
	}
	d.wantEmpty(t)
}

// blockDevices returns the kernel's names of the block devices.
func blockDevices(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir("/sys/class/block")
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// writeAt writes to a device at an offset, durably.
func writeAt(t *testing.T, path string, b []byte, offset int64) {
	t.Helper()
	must(t, tryWriteAt(path, b, offset))
}

func tryWriteAt(path string, b []byte, offset int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(b, offset); err != nil {
		return err
	}
	return f.Sync()
}
