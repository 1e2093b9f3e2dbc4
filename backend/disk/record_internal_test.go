package disk

import (
	"errors"
	"reflect"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestRecord: a valid record is read as it was written, and a record with invalid values is refused.
func TestRecord(t *testing.T) {
	const guid = "e855209b-c0f3-4ca6-ac51-2bca4d5e1291"
	for name, tc := range map[string]struct {
		change func(*volume.Volume)
		ok     bool
	}{
		"valid":           {func(*volume.Volume) {}, true},
		"raw":             {func(v *volume.Volume) { v.Block, v.FSType = true, "" }, true},
		"no section":      {func(v *volume.Volume) { v.Section = nil }, false},
		"also directory":  {func(v *volume.Volume) { v.Directory = &volume.Directory{OnDelete: volume.OnDeleteDelete} }, false},
		"image's backend": {func(v *volume.Volume) { v.ID.Backend = "loop" }, false},
		"shared pool":     {func(v *volume.Volume) { v.ID.PoolUUID = "" }, false},
		"invalid GUID":    {func(v *volume.Volume) { v.Section = &section{GUID: "../x", Wipe: wipeZero} }, false},
		"no wipe mode":    {func(v *volume.Volume) { v.Section = &section{GUID: guid} }, false},
		"no sector size":  {func(v *volume.Volume) { v.SectorSize = 0 }, false},
	} {
		v := volume.Volume{
			Version: volume.RecordVersion, ID: volume.ID{Backend: Name, Pool: "disks", PoolUUID: "0a1b2c3d", Name: "v"},
			CoName: "v", Capacity: 1 << 30, FSType: "xfs", SectorSize: 512, Section: &section{GUID: guid, Wipe: wipeZero},
		}
		tc.change(&v)
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
