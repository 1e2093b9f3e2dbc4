package lvm

import (
	"cmp"
	"regexp"

	"github.com/trivet-csi/trivet/volume"
)

// section contains the fields of a volume's record that only logical volumes have.
type section struct {
	identity
	// Wipe tells how the data is erased after the volume is deleted.
	Wipe wipeMode `json:"wipe"`
	// LogicalVolume is the name with which a logical volume was taken over; empty if the driver created it.
	LogicalVolume string `json:"logicalVolume,omitempty"`
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

var (
	guidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	lvmPattern  = regexp.MustCompile(`^[0-9a-zA-Z]{6}(-[0-9a-zA-Z]{4}){5}-[0-9a-zA-Z]{6}$`)
)

// Check implements volume.Section.
func (s *section) Check() error {
	if err := s.check(); err != nil {
		return err
	}
	switch {
	case s.LogicalVolume != "" && (!validName(s.LogicalVolume) || s.Volume == ""):
		return volume.Errorf(volume.ErrDamaged, "section.logicalVolume is %q, and section.volumeUUID %q: expected the name and the UUID of a logical volume; restore the record from a backup", s.LogicalVolume, s.Volume)
	case s.Wipe != wipeDiscard && s.Wipe != wipeZero:
		return volume.Errorf(volume.ErrDamaged, "section.wipe is %q: expected %s or %s; restore the record from a backup", s.Wipe, wipeDiscard, wipeZero)
	}
	return nil
}

// Parameters implements volume.Section.
func (s *section) Parameters() map[string]string {
	return map[string]string{paramWipe: string(s.Wipe), paramLogicalVolume: s.LogicalVolume}
}

// name returns the name that the logical volume had when the volume was created.
func (s *section) name() string { return cmp.Or(s.LogicalVolume, volumeName(s.GUID)) }
