package volume

import (
	"cmp"
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
	// Source is what the volume is to be made of; nil: it is empty.
	Source *Source
	// Ephemeral is nil but for an inline volume.
	Ephemeral *Ephemeral
}

// Name is that of the volume's folder.
func (s Spec) Name() string {
	if s.Ephemeral != nil {
		return s.CoName
	}
	return NameFor(s.CoName)
}

// CheckID refuses (ErrInvalid) a volume whose ID would be longer than IDs may be:
// only an export that stands in it makes it so.
func (s Spec) CheckID() error {
	id := ID{Backend: s.Parameters.Backend, Pool: s.Parameters.Pool, Name: NameFor(s.CoName)}
	if n := len(id.String()); n > MaxIDLength {
		return Errorf(ErrInvalid, "parameters %s and %s: the volume's ID %s would have %d bytes, at most %d are allowed: make the export a pool in the driver's configuration, and name that in parameter %s",
			ParamServer, ParamShare, id, n, MaxIDLength, ParamPool)
	}
	return nil
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
	return cmp.Or(s.Parameters.Get(ParamFSType), FSTypes[0])
}

// AsksFSType tells whether a filesystem is asked for by name.
func (s Spec) AsksFSType() bool {
	return s.Parameters.Get(ParamFSType) != "" || slices.ContainsFunc(s.Capabilities, func(c Capability) bool { return c.FSType != "" })
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
	// SectorSize is the logical block size of the volume's device in bytes; 0: it
	// has none.
	SectorSize  int      `json:"sectorSize,omitempty"`
	MkfsOptions []string `json:"mkfsOptions,omitempty"`
	// Directory is nil for a volume that has a device.
	Directory *Directory `json:"directory,omitempty"`
	// Section is what only the volume's kind knows; nil if the kind has no section.
	Section Section `json:"section,omitempty"`
	// Token tells the call that made the volume from others that made one of the
	// same name; in shared pools.
	Token string `json:"token,omitempty"`
	// Ephemeral is nil but for an inline volume.
	Ephemeral *Ephemeral `json:"ephemeral,omitempty"`
	// Namespace is the only one whose pods FlexVolume mounts the volume for; empty: it mounts
	// the volume for none. CSI ignores it: there a claim determines who has a volume.
	Namespace string `json:"namespace,omitempty"`
	// Source is nil for a volume that was made empty.
	Source  *Source   `json:"source,omitempty"`
	Created time.Time `json:"created"`
}

// Directory is what there is to know of a volume that is a directory.
type Directory struct {
	// SubDir is where it lies in the pool; empty: in the volume's own folder.
	SubDir   string   `json:"subDir,omitempty"`
	OnDelete OnDelete `json:"onDelete"`
	// Mode, UID and GID are of the directory itself, as it was made.
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	// Quota is what keeps it to its capacity; nil: nothing does.
	Quota *Quota `json:"quota,omitempty"`
}

// Quota is a limit that a filesystem has set on a directory.
type Quota struct {
	// Kind is what sets it, as package quota calls it.
	Kind string `json:"kind"`
	// ID is what the filesystem knows it by, for as long as there is data of it.
	ID uint64 `json:"id"`
}

// MarshalRecord writes a record as it lies on the disk.
func (v Volume) MarshalRecord() ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	return append(b, '\n'), err
}

// Satisfies tells why an existing volume is not what s asks for
// (ErrIncompatible), or nil if it is (CSI specification, CreateVolume).
func (v Volume) Satisfies(s Spec) error {
	if v.Section != nil {
		for key, have := range v.Section.Parameters() {
			if asked := s.Parameters.Get(key); asked != have {
				return Errorf(ErrIncompatible, "volume %q exists with %s %s, asked for is %s: use another name", v.CoName, key, have, asked)
			}
		}
	}
	switch {
	case v.CoName != s.CoName:
		return Errorf(ErrIncompatible, "volume %s belongs to the name %q, which shares its hash with %q: use another name", v.ID, v.CoName, s.CoName)
	case !s.Capacity.Holds(v.Capacity):
		return Errorf(ErrIncompatible, "volume %q exists with %d bytes, capacity_range asks for required %d and limit %d: use another name or fix the range", v.CoName, v.Capacity, s.Capacity.Required, s.Capacity.Limit)
	case v.Namespace != s.Parameters.Namespace:
		return Errorf(ErrIncompatible, "volume %q exists for namespace %q of FlexVolume, asked for is %q: use another name", v.CoName, v.Namespace, s.Parameters.Namespace)
	case !sameSource(v.Source, s.Source):
		return Errorf(ErrIncompatible, "volume %q exists with the content of %v, volume_content_source asks for %v: use another name", v.CoName, describe(v.Source), describe(s.Source))
	case v.Directory != nil:
		return v.satisfiesDirectory(s)
	case v.Block != s.Block():
		return Errorf(ErrIncompatible, "volume %q exists with block %t, volume_capabilities ask for block %t: use another name", v.CoName, v.Block, s.Block())
	case v.FSType != s.FSType() && (s.Source == nil || s.AsksFSType()):
		return Errorf(ErrIncompatible, "volume %q exists with filesystem %s, asked for is %s: use another name", v.CoName, v.FSType, s.FSType())
	case s.Source == nil && !slices.Equal(v.MkfsOptions, s.Parameters.MkfsOptions()):
		return Errorf(ErrIncompatible, "volume %q exists with mkfsOptions %q, asked for are %q: use another name", v.CoName, v.MkfsOptions, s.Parameters.MkfsOptions())
	}
	return nil
}

func sameSource(a, b *Source) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Snapshot == b.Snapshot && a.ID == b.ID
}

func describe(s *Source) string {
	if s == nil {
		return "nothing"
	}
	return s.String()
}

// satisfiesDirectory is Satisfies for what only directories have. What the
// parameters leave open is as it is.
func (v Volume) satisfiesDirectory(s Spec) error {
	p, err := s.Parameters.Directory()
	if err != nil {
		return err
	}
	subDir, err := p.ExpandSubDir()
	if err != nil {
		return err
	}
	d := v.Directory
	for _, c := range []struct {
		key  string
		have any
		same bool
	}{
		{ParamSubDir, d.SubDir, d.SubDir == subDir},
		{ParamOnDelete, d.OnDelete, d.OnDelete == cmp.Or(p.OnDelete, OnDeleteDelete)},
		{ParamMode, d.Mode, p.Mode == nil || d.Mode == *p.Mode},
		{ParamUID, d.UID, p.UID == nil || d.UID == *p.UID},
		{ParamGID, d.GID, p.GID == nil || d.GID == *p.GID},
	} {
		if !c.same {
			return Errorf(ErrIncompatible, "volume %q exists with another %s (%v): use another name", v.CoName, c.key, c.have)
		}
	}
	return nil
}
