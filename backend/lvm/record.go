package lvm

import (
	"regexp"

	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/volume"
)

// section contains the fields of a volume's record that only logical volumes have.
type section struct {
	// GUID is in the name and in a tag of the logical volume.
	GUID string `json:"guid"`
	// Group and Volume are the UUIDs of the volume group and of the logical volume. Volume is empty until the logical
	// volume is created.
	Group  string `json:"groupUUID"`
	Volume string `json:"volumeUUID,omitempty"`
	// Wipe tells how the data is erased after the volume is deleted.
	Wipe wipeMode `json:"wipe"`
}

// paramWipe is the StorageClass parameter with a wipeMode.
const paramWipe = "wipe"

// wipeMode tells how the data of a logical volume is erased after its volume is deleted.
type wipeMode string

const (
	// wipeDiscard discards the extents if that guarantees zeros. Otherwise it overwrites them.
	wipeDiscard wipeMode = "discard"
	// wipeZero overwrites the extents.
	wipeZero wipeMode = "zero"
)

// forms are the formats of the records that pools of volume groups can contain.
var forms = volume.Forms{{Name: Name, Section: newSection}}

func newSection() volume.Section { return new(section) }

// sectionOf returns the section of a volume's record, or an empty section if the record cannot be read.
func sectionOf(v volume.Volume) *section {
	if s, ok := v.Section.(*section); ok {
		return s
	}
	return new(section)
}

// id identifies the logical volume.
func (s *section) id() dm.VolumeID { return dm.VolumeID{Group: s.Group, Volume: s.Volume} }

var (
	guidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	lvmPattern  = regexp.MustCompile(`^[0-9a-zA-Z]{6}(-[0-9a-zA-Z]{4}){5}-[0-9a-zA-Z]{6}$`)
)

// Check implements volume.Section.
func (s *section) Check() error {
	switch {
	case !guidPattern.MatchString(s.GUID):
		return volume.Errorf(volume.ErrDamaged, "section.guid is %q: expected a GUID in lower case; restore the record from a backup", s.GUID)
	case !lvmPattern.MatchString(s.Group):
		return volume.Errorf(volume.ErrDamaged, "section.groupUUID is %q: expected the UUID of a volume group; restore the record from a backup", s.Group)
	case s.Volume != "" && !lvmPattern.MatchString(s.Volume):
		return volume.Errorf(volume.ErrDamaged, "section.volumeUUID is %q: expected the UUID of a logical volume; restore the record from a backup", s.Volume)
	case s.Wipe != wipeDiscard && s.Wipe != wipeZero:
		return volume.Errorf(volume.ErrDamaged, "section.wipe is %q: expected %s or %s; restore the record from a backup", s.Wipe, wipeDiscard, wipeZero)
	}
	return nil
}

// Parameters implements volume.Section.
func (s *section) Parameters() map[string]string {
	return map[string]string{paramWipe: string(s.Wipe)}
}
