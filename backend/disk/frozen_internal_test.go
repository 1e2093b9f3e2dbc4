package disk

import (
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenVolumes: the records of whole disks do not change.
func TestFrozenVolumes(t *testing.T) {
	frozen.Format[section]{
		Dir: "sections",
		Read: func(b []byte) (section, error) {
			v, err := forms.ParseVolume(b)
			return *sectionOf(v), err
		},
		Write: func(s section) ([]byte, error) {
			return volume.Volume{
				Version: 1, ID: volume.ID{Backend: Name, Pool: "disks", PoolUUID: "0a1b2c3d", Name: "pvc-1"}, CoName: "pvc-1", Capacity: 1 << 30,
				FSType: "xfs", SectorSize: 512, Section: &s, Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
			}.MarshalRecord()
		},
	}.TestPart(t, "section", map[string]section{
		"discard": {GUID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Identity: "wwid:naa.0123456789abcdef", Wipe: wipeDiscard},
		"zero":    {GUID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Wipe: wipeZero},
		"none":    {GUID: "0a1b2c3d-0123-4567-89ab-0123456789ab", Wipe: wipeNone},
	})
}

// TestFrozenFiles: the files that record the state of a disk keep their names.
func TestFrozenFiles(t *testing.T) {
	frozen.List(t, "files", []string{wipedFile, unusedFile, backend.WipingFile, copyingFile})
}
