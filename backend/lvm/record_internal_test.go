package lvm

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestRecord: a valid record is read as it was written, and a record with invalid values is refused.
func TestRecord(t *testing.T) {
	valid := section{identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Wipe: wipeZero}
	for name, tc := range map[string]struct {
		change func(*section)
		ok     bool
	}{
		"valid":            {func(*section) {}, true},
		"being created":    {func(s *section) { s.Volume = "" }, true},
		"invalid GUID":     {func(s *section) { s.GUID = "../x" }, false},
		"no group":         {func(s *section) { s.Group = "" }, false},
		"invalid volume":   {func(s *section) { s.Volume = "x\" || lv_name=\"y" }, false},
		"no wipe mode":     {func(s *section) { s.Wipe = "" }, false},
		"unsafe wipe mode": {func(s *section) { s.Wipe = "none" }, false},
		"taken over":       {func(s *section) { s.LogicalVolume = "pvc-1" }, true},
		"invalid name":     {func(s *section) { s.LogicalVolume = "../x" }, false},
		"taken unknown":    {func(s *section) { s.LogicalVolume, s.Volume = "pvc-1", "" }, false},
	} {
		s := valid
		tc.change(&s)
		v := volume.Volume{
			Version: volume.RecordVersion, ID: volume.ID{Backend: Name, Pool: "fast", PoolUUID: "0a1b2c3d", Name: "v"},
			CoName: "v", Capacity: 1 << 30, FSType: "xfs", SectorSize: 512, Section: &s,
		}
		b, err := v.MarshalRecord()
		if err != nil {
			t.Fatal(err)
		}
		got, err := forms.ParseVolume(b)
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, volume.ErrDamaged) || err == nil && !reflect.DeepEqual(got, v) {
			t.Errorf("%s: got %+v, %v; want success: %t", name, got, err, tc.ok)
		}
	}
}

// FuzzSection: the record of a logical volume is refused as damaged, or is formatted to a record with an equal section.
func FuzzSection(f *testing.F) {
	v := volume.Volume{
		Version: volume.RecordVersion, ID: volume.ID{Backend: Name, Pool: "fast", PoolUUID: "0a1b2c3d", Name: "v"}, CoName: "v", Capacity: 1 << 30,
		FSType: "xfs", SectorSize: 512, Section: &section{identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Wipe: wipeZero},
	}
	b, err := v.MarshalRecord()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(bytes.Replace(b, []byte(frozenLV), []byte(`x\" || lv_name=\"y`), 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := forms.ParseVolume(b)
		if err != nil {
			if !errors.Is(err, volume.ErrDamaged) {
				t.Errorf("%q: %v is not ErrDamaged", b, err)
			}
			return
		}
		again, err := v.MarshalRecord()
		if err != nil {
			t.Fatal(err)
		}
		if w, err := forms.ParseVolume(again); err != nil || !reflect.DeepEqual(w.Section, v.Section) {
			t.Errorf("%q was parsed and formatted to %q: %v", b, again, err)
		}
	})
}

// FuzzCopy: the record of a snapshot's logical volume is refused as damaged, or can be used in the selections of lvm(8).
func FuzzCopy(f *testing.F) {
	f.Add([]byte(`{"version":1,"guid":"` + frozenGUID + `","groupUUID":"` + frozenGroup + `","volumeUUID":"` + frozenLV + `"}`))
	f.Add([]byte(`{"version":1,"guid":"` + frozenGUID + `","groupUUID":"` + frozenGroup + `","volumeUUID":"\""}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseCopy(b)
		if err != nil && !errors.Is(err, volume.ErrDamaged) {
			t.Errorf("%q: %v is not ErrDamaged", b, err)
		}
		if err == nil && strings.ContainsAny(c.GUID+c.Group+c.Volume, "\"\\/ =|&\n\x00") {
			t.Errorf("%q was accepted", b)
		}
	})
}

// FuzzPin: a pin is refused, or is formatted to an equal pin.
func FuzzPin(f *testing.F) {
	f.Add([]byte(`{"version":1,"groupUUID":"` + frozenGroup + `","creating":"` + frozenGUID + `"}`))
	f.Add([]byte(`{"version":2,"groupUUID":"` + frozenGroup + `"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parsePin(b, "pin")
		if err != nil {
			if !errors.Is(err, volume.ErrDamaged) && !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("%q: got %v, want ErrDamaged or ErrPrecondition", b, err)
			}
			return
		}
		again, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if q, err := parsePin(again, "pin"); err != nil || q != p {
			t.Errorf("%q was parsed and formatted to %q: %v", b, again, err)
		}
	})
}

// TestNotMounted: a process that only reads the pool is told to create a missing volume group.
func TestNotMounted(t *testing.T) {
	g := &Group{VolumeGroup: "vg-that-is-missing"}
	c := pool.Config{Name: "p", Section: g}.Within(t.TempDir())
	if err := g.CheckMounted(c); !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), "vgcreate vg-that-is-missing") {
		t.Errorf("got %v, want the command that creates the group", err)
	}
}

// TestValidate: a section needs the name of a volume group, and the pool must not have keys of other kinds.
func TestValidate(t *testing.T) {
	for name, want := range map[string]bool{"vg0": true, "my-group_1.2+x": true, "": false, "-vg": false, "a/b": false, "..": false, "vg 0": false} {
		g := &Group{VolumeGroup: name}
		if key, err := g.Validate(pool.Config{Section: g}); (err == nil) != want || err != nil && (key != "lvm.volumeGroup" || !errors.Is(err, volume.ErrInvalid)) {
			t.Errorf("volumeGroup %q: got %q, %v; want success: %t", name, key, err, want)
		}
	}
	for _, c := range []pool.Config{{Size: "1Gi"}, {Reserve: "1%"}, {Overcommit: 2}, {RequireMount: true}} {
		g := &Group{VolumeGroup: "vg0"}
		if _, err := g.Validate(c); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("%+v: got %v, want ErrInvalid", c, err)
		}
	}
}
