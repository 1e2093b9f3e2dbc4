package disk

import (
	"regexp"

	"github.com/trivet-csi/trivet/volume"
)

// section contains the fields of a volume's record that only whole disks have.
type section struct {
	// GUID is the GUID of the partition that contains the data. The driver finds the disk by this GUID.
	GUID string `json:"guid"`
	// Identity is the identity that the hardware of the disk reports. It may be empty.
	Identity string `json:"identity,omitempty"`
	// Wipe tells how the data is erased after the volume is deleted.
	Wipe wipeMode `json:"wipe"`
}

// paramWipe is the StorageClass parameter with a wipeMode.
const paramWipe = "wipe"

// wipeMode tells how the data of a disk is erased after its volume is deleted.
type wipeMode string

const (
	// wipeDiscard discards the disk if that guarantees zeros. Otherwise it overwrites the whole
	// disk.
	wipeDiscard wipeMode = "discard"
	// wipeZero overwrites the whole disk.
	wipeZero wipeMode = "zero"
	// wipeNone overwrites only the signatures of filesystems and partitions. The next volume on
	// the disk can read the data.
	wipeNone wipeMode = "none"
)

// forms are the formats of the records that pools of disks can contain.
var forms = volume.Forms{{Name: Name, Section: newSection}}

func newSection() volume.Section { return new(section) }

// sectionOf returns the section of a volume's record, or an empty section if the record cannot be
// read.
func sectionOf(v volume.Volume) *section {
	if s, ok := v.Section.(*section); ok {
		return s
	}
	return new(section)
}

var guidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Check implements volume.Section.
func (s *section) Check() error {
	if !guidPattern.MatchString(s.GUID) {
		return volume.Errorf(volume.ErrDamaged, "section.guid is %q: expected a GUID in lower case; restore the record from a backup", s.GUID)
	}
	if s.Wipe != wipeDiscard && s.Wipe != wipeZero && s.Wipe != wipeNone {
		return volume.Errorf(volume.ErrDamaged, "section.wipe is %q: expected %s, %s or %s; restore the record from a backup", s.Wipe, wipeDiscard, wipeZero, wipeNone)
	}
	return nil
}

// Parameters implements volume.Section.
func (s *section) Parameters() map[string]string {
	return map[string]string{paramWipe: string(s.Wipe)}
}
