package disk

import (
	"regexp"

	"github.com/trivet-csi/trivet/volume"
)

// section is the section of a volume's record.
type section struct {
	// GUID is that of the partition with the data, by which the disk is found.
	GUID string `json:"guid"`
	// Identity is what the disk's hardware reports as its identity; empty: nothing.
	Identity string `json:"identity,omitempty"`
	// Wipe is what happens to the data when the volume is deleted.
	Wipe wipeMode `json:"wipe"`
}

// paramWipe is the StorageClass parameter with a wipeMode.
const paramWipe = "wipe"

// wipeMode is what happens to the data of a disk when its volume is deleted.
type wipeMode string

const (
	// wipeDiscard gives the storage back where the disk guarantees zeros afterwards, and
	// overwrites everything where it does not.
	wipeDiscard wipeMode = "discard"
	// wipeZero overwrites everything.
	wipeZero wipeMode = "zero"
	// wipeNone leaves the data to the next user of the disk, and overwrites only what a
	// format is recognised by.
	wipeNone wipeMode = "none"
)

// forms are the forms of the records in pools of disks.
var forms = volume.Forms{{Name: Name, Section: newSection}}

func newSection() volume.Section { return new(section) }

// sectionOf returns the section of a volume's record; an empty one while the record cannot be
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
		return volume.Errorf(volume.ErrDamaged, "record has disk guid %q", s.GUID)
	}
	if s.Wipe != wipeDiscard && s.Wipe != wipeZero && s.Wipe != wipeNone {
		return volume.Errorf(volume.ErrDamaged, "record has wipe %q", s.Wipe)
	}
	return nil
}

// Parameters implements volume.Section.
func (s *section) Parameters() map[string]string {
	return map[string]string{paramWipe: string(s.Wipe)}
}
