//go:build vm

package dm_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/dm"
)

const (
	extent = 4 << 20
	name   = "vg-dm"
	lv     = "trivet.test-1"
)

// newGroup creates a volume group on the last disk of the virtual machine.
func newGroup(t *testing.T) dm.Group {
	t.Helper()
	disks, err := filepath.Glob("/dev/vd[b-z]")
	if err != nil || len(disks) == 0 {
		t.Fatalf("got disks %q, %v, want at least one for a volume group", disks, err)
	}
	disk := disks[len(disks)-1]
	testenv.Run(t, "lvm", "vgcreate", "--yes", name, disk)
	t.Cleanup(func() {
		testenv.Run(t, "lvm", "vgremove", "-ff", "--yes", name)
		testenv.Run(t, "lvm", "pvremove", "--yes", disk)
	})
	g, err := dm.FindGroup(name, "", func(string) bool { return false })
	if err != nil || !slices.Equal(g.Devices, []string{disk}) || g.SectorSize != 512 {
		t.Fatalf("got group %+v, %v, want one on %s", g, err, disk)
	}
	return g
}

// TestKilledCreate: if lvcreate(8) was killed after the kernel had created a snapshot, and before it had completed its message,
// the volume can be removed, and others can be created.
func TestKilledCreate(t *testing.T) {
	g := newGroup(t)
	run := func(args ...string) { testenv.Run(t, "lvm", args...) }
	for what, call := range map[string]func(id dm.VolumeID) error{
		"remove": func(id dm.VolumeID) error { return g.Remove(t.Context(), lv+"-copy", id) },
		"create": func(dm.VolumeID) error {
			_, err := g.CreateThin(t.Context(), "pool", lv+"-other", 64<<20, nil)
			return err
		},
		"copy": func(dm.VolumeID) error {
			_, err := g.CopyThin(t.Context(), lv, lv+"-other", false, nil)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			run("lvcreate", "--yes", "--type", "thin-pool", "--size", "1g", "--name", "pool", name)
			defer run("lvremove", "--yes", name+"/pool")
			_, err := g.CreateThin(t.Context(), "pool", lv, 64<<20, nil)
			if err != nil {
				t.Fatal(err)
			}
			id, err := g.CopyThin(t.Context(), lv, lv+"-copy", false, nil)
			if err != nil {
				t.Fatal(err)
			}
			interruptCreate(t, lv+"-copy")
			if err := call(id); err != nil {
				t.Error(err)
			}
			if _, err := g.Numbers(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// interruptCreate gives the group and the thin pool the state of a moment before the creation of the last volume was complete.
func interruptCreate(t *testing.T, volume string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "metadata")
	testenv.Run(t, "lvm", "vgcfgbackup", "--file", file, name)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const transaction = "transaction_id = 2\n"
	if strings.Count(string(b), transaction) != 1 {
		t.Fatalf("want one %q in %s", transaction, b)
	}
	b = []byte(strings.Replace(string(b), transaction, transaction+"message1 {\ncreate = \""+volume+"\"\n}\n", 1))
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	at := name + "/pool"
	testenv.Run(t, "lvm", "lvchange", "--activate", "y", at)
	testenv.Run(t, "dmsetup", "message", strings.ReplaceAll(name, "-", "--")+"-pool-tpool", "0", "set_transaction_id 2 1")
	testenv.Run(t, "lvm", "lvchange", "--activate", "n", at)
	testenv.Run(t, "lvm", "vgcfgrestore", "--force", "--file", file, name)
	testenv.Run(t, "lvm", "lvchange", "--activate", "y", at)
}

// TestGroup: a logical volume is created, found, extended and removed. Only the volume with the given UUID is changed.
func TestGroup(t *testing.T) {
	g := newGroup(t)
	id, err := g.Create(t.Context(), lv, 4*extent, []string{"trivet.a", "trivet.b"}, true)
	if err != nil {
		t.Fatal(err)
	}
	r, err := g.Report(t.Context())
	if err != nil || r.ExtentSize != extent || r.Free != r.Extents-4 || len(r.Physical) != 1 || r.Physical[0].Missing || r.Exported {
		t.Errorf("got report %+v, %v", r, err)
	}
	v, ok := r.Volume(id)
	if named, _ := r.Named(lv); !ok || named.ID != id || v.Size != 4*extent || !slices.Equal(v.Tags, []string{"trivet.a", "trivet.b"}) {
		t.Errorf("got logical volume %+v, want the new one", v)
	}
	if _, err := g.Create(t.Context(), "large", 1<<50, nil, false); !errors.Is(err, dm.ErrNoRoom) {
		t.Errorf("a volume that is too large: got %v, want ErrNoRoom", err)
	}
	d, ok, err := id.Device()
	if err != nil || !ok || d.Suspended || dm.Size(d.Number) != 4*extent {
		t.Errorf("got device %+v, %t, %v", d, ok, err)
	}
	if found, ok := dm.IsVolume(d.Number); !ok || found != id {
		t.Errorf("device %#x belongs to %+v, %t, want %+v", d.Number, found, ok, id)
	}
	other := dm.VolumeID{Group: id.Group, Volume: strings.Repeat("x", 6) + id.Volume[6:]}
	testenv.Run(t, "lvm", "lvrename", name, lv, lv+"-renamed")
	if !g.HasNamed(lv+"-renamed", id) || g.HasNamed(lv, id) || g.HasNamed(lv+"-renamed", other) {
		t.Error("HasNamed does not find the logical volume only under its new name")
	}
	testenv.Run(t, "lvm", "lvrename", name, lv+"-renamed", lv)
	for what, err := range map[string]error{
		"RemoveTag": g.RemoveTag(t.Context(), lv, other, "trivet.a"), "Remove": g.Remove(t.Context(), lv, other),
	} {
		if err != nil {
			t.Errorf("%s of another volume: %v", what, err)
		}
	}
	if err := errors.Join(g.RemoveTag(t.Context(), lv, id, "trivet.b"), g.Extend(t.Context(), lv, 6*extent)); err != nil {
		t.Fatal(err)
	}
	r, err = g.Report(t.Context())
	if v, ok := r.Volume(id); err != nil || !ok || v.Size != 6*extent || !slices.Equal(v.Tags, []string{"trivet.a"}) {
		t.Errorf("got logical volume %+v, %t, %v, want 6 extents and one tag", v, ok, err)
	}
	open, err := os.Open("/dev/" + name + "/" + lv)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Deactivate(t.Context(), lv, id); !errors.Is(err, dm.ErrInUse) {
		t.Errorf("deactivating an open volume: got %v, want ErrInUse", err)
	}
	open.Close()
	if err := errors.Join(g.Deactivate(t.Context(), lv, id), g.Deactivate(t.Context(), lv, id)); err != nil {
		t.Error(err)
	}
	if _, ok, err := id.Device(); ok || err != nil {
		t.Errorf("a deactivated volume has a device: %t, %v", ok, err)
	}
	if err := g.Extend(t.Context(), "missing", 6*extent); !errors.Is(err, dm.ErrMissing) {
		t.Errorf("a missing volume: got %v, want ErrMissing", err)
	}
	if err := g.Remove(t.Context(), lv, id); err != nil {
		t.Error(err)
	}
	if r, err = g.Report(t.Context()); err != nil || len(r.Volumes) != 0 || r.Free != r.Extents {
		t.Errorf("after the removal: got %+v, %v", r, err)
	}
	if version, err := dm.Version(t.Context()); err != nil || !strings.HasPrefix(version, "2.") {
		t.Errorf("got version %q, %v", version, err)
	}
}

// TestCreateInactive: the UUID of a new logical volume that is not active is found in the metadata of the group.
func TestCreateInactive(t *testing.T) {
	g := newGroup(t)
	for i := range 3 { // the page cache has the metadata of the earlier ones
		volume := lv + strings.Repeat("x", i)
		id, err := g.Create(t.Context(), volume, extent, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		r, err := g.Report(t.Context())
		if v, ok := r.Volume(id); err != nil || !ok || v.Name != volume {
			t.Errorf("got ID %+v of %s, %v, which is not in the report %+v", id, volume, err, r)
		}
		if _, active, err := id.Device(); active || err != nil {
			t.Errorf("%s is active: %t, %v", volume, active, err)
		}
	}
}

// TestActivate: a device that a killed command has left in any state is made usable.
func TestActivate(t *testing.T) {
	g := newGroup(t)
	id, err := g.Create(t.Context(), lv, 4*extent, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	const mapped = "vg--dm-trivet.test--1"
	table := strings.TrimSpace(testenv.Run(t, "dmsetup", "table", mapped))
	uuid := strings.TrimSpace(testenv.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "uuid", mapped))
	for state, leave := range map[string]func(){
		"active":    func() {},
		"inactive":  func() { testenv.Run(t, "lvm", "lvchange", "-an", name+"/"+lv) },
		"suspended": func() { testenv.Run(t, "dmsetup", "suspend", mapped) },
		"without table": func() {
			testenv.Run(t, "dmsetup", "remove", mapped)
			testenv.Run(t, "dmsetup", "create", "--notable", "-u", uuid, mapped)
		},
		"old table": func() {
			testenv.Run(t, "dmsetup", "load", mapped, "--table", strings.Replace(table, "0 32768 ", "0 8192 ", 1))
			testenv.Run(t, "dmsetup", "resume", mapped)
		},
	} {
		leave()
		d, err := g.Activate(t.Context(), lv, id, 4*extent)
		if err != nil || d.Suspended || dm.Size(d.Number) != 4*extent {
			t.Errorf("%s: got %+v with %d bytes, %v", state, d, dm.Size(d.Number), err)
		}
	}
}
