package volume

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"
)

// RecordVersion is the version of the record's form that this driver writes.
const RecordVersion = 1

// Spec is a request for a volume.
type Spec struct {
	// CoName is the orchestrator's name for the volume, in full.
	CoName       string
	Capacity     Range
	Capabilities []Capability // at least one, all block or all mount
	Parameters   Parameters
}

// Block tells whether a raw device is asked for.
func (s Spec) Block() bool { return s.Capabilities[0].Block }

// FSType is the filesystem asked for: the capability's, else the parameter's,
// else the default; empty for a raw device.
func (s Spec) FSType() string {
	if s.Block() {
		return ""
	}
	for _, c := range s.Capabilities {
		if c.FSType != "" {
			return c.FSType
		}
	}
	if s.Parameters.FSType != "" {
		return s.Parameters.FSType
	}
	return FSTypes[0]
}

// Volume is the record of a volume: all that there is to know of it, as it
// lies on the disk beside its data.
type Volume struct {
	Version int `json:"version"`
	ID      ID  `json:"id"`
	// CoName is the orchestrator's name, in full.
	CoName string `json:"name"`
	// Capacity is what was promised, in bytes.
	Capacity int64  `json:"capacityBytes"`
	Block    bool   `json:"block,omitempty"`
	FSType   string `json:"fsType,omitempty"`
	// SectorSize is the logical block size of the volume's device in bytes.
	SectorSize  int        `json:"sectorSize"`
	Allocation  Allocation `json:"allocation"`
	MkfsOptions []string   `json:"mkfsOptions,omitempty"`
	Created     time.Time  `json:"created"`
}

// MarshalRecord writes a record as it lies on the disk.
func (v Volume) MarshalRecord() ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	return append(b, '\n'), err
}

// ParseRecord reads a record strictly: an unknown version or field, or a value
// that no driver wrote, is ErrDamaged.
func ParseRecord(b []byte) (Volume, error) {
	var v Volume
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return Volume{}, Errorf(ErrDamaged, "record: %w", err)
	}
	switch {
	case v.Version != RecordVersion:
		return Volume{}, Errorf(ErrDamaged, "record has version %d, this driver reads version %d: run the driver that wrote it, or a newer one", v.Version, RecordVersion)
	case v.ID == (ID{}):
		return Volume{}, Errorf(ErrDamaged, "record has no id")
	case v.Capacity <= 0:
		return Volume{}, Errorf(ErrDamaged, "record has capacityBytes %d", v.Capacity)
	case v.Block == (v.FSType != ""), !v.Block && !ValidFSType(v.FSType):
		return Volume{}, Errorf(ErrDamaged, "record has block %t with fsType %q", v.Block, v.FSType)
	case v.SectorSize != 512 && v.SectorSize != 4096:
		return Volume{}, Errorf(ErrDamaged, "record has sectorSize %d", v.SectorSize)
	case v.Allocation != Thin && v.Allocation != Thick:
		return Volume{}, Errorf(ErrDamaged, "record has allocation %q", v.Allocation)
	}
	return v, nil
}

// Satisfies tells why an existing volume is not what s asks for
// (ErrIncompatible), or nil if it is (CSI specification, CreateVolume).
func (v Volume) Satisfies(s Spec) error {
	switch {
	case v.CoName != s.CoName:
		return Errorf(ErrIncompatible, "volume %s belongs to the name %q, which shares its hash with %q: use another name", v.ID, v.CoName, s.CoName)
	case !s.Capacity.Holds(v.Capacity):
		return Errorf(ErrIncompatible, "volume %q exists with %d bytes, capacity_range asks for required %d and limit %d: use another name or fix the range", v.CoName, v.Capacity, s.Capacity.Required, s.Capacity.Limit)
	case v.Block != s.Block():
		return Errorf(ErrIncompatible, "volume %q exists with block %t, volume_capabilities ask for block %t: use another name", v.CoName, v.Block, s.Block())
	case v.FSType != s.FSType():
		return Errorf(ErrIncompatible, "volume %q exists with filesystem %s, asked for is %s: use another name", v.CoName, v.FSType, s.FSType())
	case v.Allocation != s.Parameters.Allocation:
		return Errorf(ErrIncompatible, "volume %q exists with allocation %s, asked for is %s: use another name", v.CoName, v.Allocation, s.Parameters.Allocation)
	case !slices.Equal(v.MkfsOptions, s.Parameters.MkfsOptions):
		return Errorf(ErrIncompatible, "volume %q exists with mkfsOptions %q, asked for are %q: use another name", v.CoName, v.MkfsOptions, s.Parameters.MkfsOptions)
	}
	return nil
}

// Supports tells why the volume cannot be used as c asks (ErrPrecondition), or
// nil. The volume's own filesystem is meant where c names none.
func (v Volume) Supports(c Capability) error {
	switch {
	case v.Block != c.Block:
		return Errorf(ErrPrecondition, "volume_capability asks for block %t, volume %s was made with block %t", c.Block, v.ID, v.Block)
	case c.FSType != "" && c.FSType != v.FSType:
		return Errorf(ErrPrecondition, "volume_capability asks for filesystem %q, volume %s was made with %s", c.FSType, v.ID, v.FSType)
	case v.ID.PoolUUID != "" && c.Mode.MultiNode():
		return Errorf(ErrPrecondition, "access mode %s: volume %s is in a pool of one node, use a SINGLE_NODE mode", c.Mode, v.ID)
	}
	return nil
}
