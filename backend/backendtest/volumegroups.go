package backendtest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

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

// activate activates the logical volume of an unstaged volume until the test ends, and returns its device.
func (l *testVolume) activate(t *testing.T) string {
	t.Helper()
	name := l.d.volumeGroup() + "/" + l.logicalVolume(t)
	testenv.Run(t, "lvm", "lvchange", "-ay", name)
	t.Cleanup(func() { testenv.Run(t, "lvm", "lvchange", "-an", name) })
	return "/dev/" + name
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
	before := listed(t, d)
	d.Stop(t)
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
	size := room / 3 / (4 * mib) * (4 * mib)
	ids := createMany(t, d, kind, 5, size)
	if len(ids) != 3 {
		t.Errorf("created %d volumes of a third of the capacity, want 3", len(ids))
	}
	rest := capacity(t, d, kind)
	if rest != room-3*size {
		t.Errorf("got a capacity of %d bytes, want the rest of %d bytes", rest, room-3*size)
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
	inTenant := `devices{dir="` + t.TempDir() + `" scan=["/dev"] obtain_device_list_from_udev=0 use_devicesfile=0 scan_lvs=1 global_filter=["a|^` + l.diskNode() + `$|","r|.*|"]}`
	testenv.Run(t, "lvm", "vgcreate", "--yes", "--config", inTenant, d.volumeGroup(), l.diskNode())
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
	for _, wipe := range []string{"discard", "zero"} {
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
		if i := bytes.IndexFunc(content, func(r rune) bool { return r != 0 }); i >= 0 || len(content) != int(64*mib) {
			t.Errorf("wipe %s: got %d bytes, with data at %d, want 64 MiB of zeros", wipe, len(content), i)
		}
		l.unpublishAndUnstage(t)
	}
}

// writeAt writes to a device at an offset, durably.
func writeAt(t *testing.T, path string, b []byte, offset int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(b, offset)
	must(t, err)
	must(t, f.Sync())
}
