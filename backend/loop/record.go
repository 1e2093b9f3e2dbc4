package loop

import "github.com/trivet-csi/trivet/volume"

// section contains the fields of a volume's record that only loop volumes have.
type section struct {
	Allocation allocation `json:"allocation"`
}

// paramAllocation is the StorageClass parameter with an allocation.
const paramAllocation = "allocation"

// allocation tells when the disk space of an image is allocated.
type allocation string

const (
	// thin allocates disk space when it is written.
	thin allocation = "thin"
	// thick allocates all disk space when the volume is created, and never frees any of it.
	thick allocation = "thick"
)

func newSection() volume.Section { return new(section) }

// sectionFor returns the section of a volume with the given parameters.
func sectionFor(p volume.Parameters) *section {
	return &section{allocation(p.Get(paramAllocation))}
}

// allocationOf returns the allocation of a volume; empty if its record cannot be read.
func allocationOf(v volume.Volume) allocation {
	if s, ok := v.Section.(*section); ok {
		return s.Allocation
	}
	return ""
}

// Check implements volume.Section.
func (s *section) Check() error {
	if s.Allocation != thin && s.Allocation != thick {
		return volume.Errorf(volume.ErrDamaged, "section.allocation is %q: expected %s or %s; restore the record from a backup", s.Allocation, thin, thick)
	}
	return nil
}

// Parameters implements volume.Section.
func (s *section) Parameters() map[string]string {
	return map[string]string{paramAllocation: string(s.Allocation)}
}
