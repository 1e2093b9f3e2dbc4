package loop

import (
	"testing"
	"time"

	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenVolumes: the records of images do not change.
func TestFrozenVolumes(t *testing.T) {
	forms := volume.Forms{{Name: Name, OnNodes: true, OnExports: true, Section: newSection}}
	frozen.Format[section]{
		Dir: "sections",
		Read: func(b []byte) (section, error) {
			v, err := forms.ParseVolume(b)
			if err != nil {
				return section{}, err
			}
			return *v.Section.(*section), nil
		},
		Write: func(s section) ([]byte, error) {
			return volume.Volume{
				Version: 1, ID: volume.ID{Backend: Name, Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "pvc-1"}, CoName: "pvc-1", Capacity: 1 << 30,
				FSType: "btrfs", SectorSize: 4096, Section: &s, Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
			}.MarshalRecord()
		},
	}.TestPart(t, "section", map[string]section{"thin": {thin}, "thick": {thick}})
}

// TestFrozenTag: a device of the previous driver is found by its tag.
func TestFrozenTag(t *testing.T) {
	id := volume.ID{Backend: Name, Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "pvc-1"}
	frozen.Bytes(t, "tag.txt", []byte(Tag(id)+"\n"))
}
