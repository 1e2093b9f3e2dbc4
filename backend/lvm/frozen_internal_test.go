package lvm

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

const (
	frozenGUID  = "0a1b2c3d-0123-4567-89ab-0123456789ab"
	frozenGroup = "PAbhEu-2yfv-wyTi-Ahuk-6fqy-jzl2-svOdfY"
	frozenLV    = "ccRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L"
)

// TestFrozenVolumes: the records of logical volumes do not change.
func TestFrozenVolumes(t *testing.T) {
	frozen.Format[section]{
		Dir: "sections",
		Read: func(b []byte) (section, error) {
			v, err := forms.ParseVolume(b)
			return *sectionOf(v), err
		},
		Write: func(s section) ([]byte, error) {
			return volume.Volume{
				Version: 1, ID: volume.ID{Backend: Name, Pool: "fast", PoolUUID: "0a1b2c3d", Name: "pvc-1"}, CoName: "pvc-1", Capacity: 1 << 30,
				FSType: "xfs", SectorSize: 512, Section: &s, Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
			}.MarshalRecord()
		},
	}.TestPart(t, "section", map[string]section{
		"creating": {identity: identity{GUID: frozenGUID, Group: frozenGroup}, Wipe: wipeDiscard},
		"discard":  {identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Wipe: wipeDiscard},
		"zero":     {identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Wipe: wipeZero},
		"taken":    {identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Wipe: wipeDiscard, LogicalVolume: "pvc-1"},
	})
}

// TestFrozenPin: the file in the state directory does not change.
func TestFrozenPin(t *testing.T) {
	frozen.Format[pin]{
		Dir:   "pins",
		Read:  func(b []byte) (pin, error) { return parsePin(b, "pin") },
		Write: func(p pin) ([]byte, error) { return json.Marshal(p) },
	}.Test(t, map[string]pin{
		"creating": {Version: pinVersion, Group: frozenGroup, Creating: frozenGUID},
		"complete": {Version: pinVersion, Group: frozenGroup, Records: frozenLV},
	})
}

// TestFrozenCopies: the records of the logical volumes of snapshots do not change.
func TestFrozenCopies(t *testing.T) {
	frozen.Format[snapshotCopy]{
		Dir: "copies", Read: parseCopy,
		Write: func(c snapshotCopy) ([]byte, error) { return json.Marshal(c) },
	}.Test(t, map[string]snapshotCopy{
		"creating":  {Version: copyVersion, identity: identity{GUID: frozenGUID, Group: frozenGroup}},
		"complete":  {Version: copyVersion, identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}},
		"encrypted": {Version: copyVersion, identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}, Encrypted: true},
	})
}

// TestFrozenNames: the files in a volume's folder, and the names and tags of logical volumes, do not change.
func TestFrozenNames(t *testing.T) {
	frozen.List(t, "files", []string{wipedFile, unusedFile, copyingFile, backend.WipingFile, copyFile})
	frozen.List(t, "names", []string{volumeName("GUID"), recordsName("POOL"), poolTag, volumeTag, guidTag, unusedTag, recordsTag, volumeName("GUID") + growthSuffix, growthTag, snapshotTag})
}
