package volume

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// RecordVersion is the version of the records that this driver writes and reads.
const RecordVersion = 1

// Spec is a request for a volume.
type Spec struct {
	// CoName is the orchestrator's name for the volume, in full.
	CoName       string
	Capacity     Range
	Capabilities []Capability // at least one, all block or all mount
	Parameters   Parameters
	// Source is the source of the volume's content. It is nil if the volume is to be empty.
	Source *Source
	// Ephemeral is only set for an inline volume.
	Ephemeral *Ephemeral
}

// Name returns the name of the volume's folder.
func (s Spec) Name() string {
	if s.Ephemeral != nil {
		return s.CoName
	}
	return NameFor(s.CoName)
}

// CheckID returns ErrInvalid if the volume's ID would exceed MaxIDLength. Only the ID of a volume in a
// direct pool can be that long.
func (s Spec) CheckID() error {
	id := ID{Backend: s.Parameters.Backend, Pool: s.Parameters.Pool, Name: NameFor(s.CoName)}
	if n := len(id.String()); n > MaxIDLength {
		return Errorf(ErrInvalid, "parameters %s and %s: the volume's ID %s would have %d bytes, at most %d are allowed: make the export a pool in the driver's configuration, and name that in parameter %s",
			ParamServer, ParamShare, id, n, MaxIDLength, ParamPool)
	}
	return nil
}

// Block reports whether the request is for a raw device.
func (s Spec) Block() bool { return s.Capabilities[0].Block }

// FSType returns the requested filesystem: the capability's, else the parameter's, else the default. It returns an
// empty string for a raw device.
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

// NamesFSType reports whether the request names a filesystem.
func (s Spec) NamesFSType() bool {
	return s.Parameters.Get(ParamFSType) != "" || slices.ContainsFunc(s.Capabilities, func(c Capability) bool { return c.FSType != "" })
}

// Volume is the record of a volume, which is stored beside its data.
type Volume struct {
	Version int `json:"version"`
	ID      ID  `json:"id"`
	// CoName is the orchestrator's name, in full.
	CoName string `json:"name"`
	// Capacity is the promised size, in bytes.
	Capacity int64  `json:"sizeBytes"`
	Block    bool   `json:"block,omitempty"`
	FSType   string `json:"fsType,omitempty"`
	// SectorSize is the logical block size of the volume's device in bytes. It is 0 if the volume has no device.
	SectorSize  int      `json:"sectorSize,omitempty"`
	MkfsOptions []string `json:"mkfsOptions,omitempty"`
	// Encryption is nil for a volume that is not encrypted.
	Encryption *Encryption `json:"encryption,omitempty"`
	// Directory is nil for a volume that has a device.
	Directory *Directory `json:"directory,omitempty"`
	// Section is the part that only the volume's kind uses; nil if the kind has no section.
	Section Section `json:"section,omitempty"`
	// CreationID identifies the call that created the volume, because several processes may create volumes
	// with the same name.
	CreationID string `json:"creationID,omitempty"`
	// Ephemeral is only set for an inline volume.
	Ephemeral *Ephemeral `json:"ephemeral,omitempty"`
	// Namespace is the namespace to whose pods FlexVolume gives the volume. If it is empty, FlexVolume gives
	// the volume to no pod. CSI ignores it, because a PersistentVolumeClaim determines which pods use a CSI
	// volume.
	Namespace string `json:"namespace,omitempty"`
	// IOLimits is nil for a volume that never had limits, so that no limit is set for its device. A volume whose limits
	// were removed has empty IOLimits.
	IOLimits *IOLimits `json:"ioLimits,omitempty"`
	// Source is nil for a volume that was created empty.
	Source  *Source   `json:"source,omitempty"`
	Created time.Time `json:"created"`
}

// Directory is the part of the record that only directories have.
type Directory struct {
	// SubDir is the path of the directory in the pool. If it is empty, the directory is in the volume's folder.
	SubDir   string   `json:"subDir,omitempty"`
	OnDelete OnDelete `json:"onDelete"`
	// Mode, UID and GID are those of the directory when the volume was created.
	Mode Mode   `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	// Quota limits the directory to the volume's capacity. It is nil if there is no limit.
	Quota *Quota `json:"quota,omitempty"`
}

// Mode is the permission bits of a directory. A record contains them in octal, such as "0755".
type Mode uint32

const maxMode = 0o7777

func (m Mode) String() string { return fmt.Sprintf("%04o", uint32(m)) }

// MarshalText implements encoding.TextMarshaler.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It accepts only what MarshalText returns.
func (m *Mode) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 8, 32)
	if err != nil || n > maxMode || Mode(n).String() != string(text) {
		return fmt.Errorf("mode %q: expected permission bits as 4 octal digits, such as 0770", text)
	}
	*m = Mode(n)
	return nil
}

// Quota is the limit of a directory in its filesystem.
type Quota struct {
	// Kind is the quota.Kind that enforces the limit.
	Kind string `json:"kind"`
	// ID identifies the limit in the filesystem. No other volume gets it while data with this ID exists.
	ID uint64 `json:"id"`
}

// MarshalRecord returns the record in its format on the disk.
func (v Volume) MarshalRecord() ([]byte, error) { return marshalRecord(v) }

// marshalRecord returns a record of a volume or of a SnapshotSet in its format on the disk.
func marshalRecord(record any) ([]byte, error) {
	b, err := json.MarshalIndent(record, "", "  ")
	return append(b, '\n'), err
}

// Content returns what the volume contains for its users: `directory`, `block`, or the name of the filesystem.
func (v Volume) Content() string {
	switch {
	case v.Directory != nil:
		return "directory"
	case v.Block:
		return "block"
	}
	return v.FSType
}

// Satisfies compares an existing volume with a request (CSI specification, CreateVolume). It returns
// ErrIncompatible if they differ.
func (v Volume) Satisfies(s Spec) error {
	if v.Section != nil {
		for key, have := range v.Section.Parameters() {
			if requested := s.Parameters.Get(key); requested != have {
				return Errorf(ErrIncompatible, "volume %q exists with %s %q, the request has %q: use another name", v.CoName, key, have, requested)
			}
		}
	}
	switch {
	case v.CoName != s.CoName:
		return Errorf(ErrIncompatible, "volume %s belongs to the name %q, which shares its hash with %q: use another name", v.ID, v.CoName, s.CoName)
	case !s.Capacity.Holds(v.Capacity):
		return Errorf(ErrIncompatible, "volume %q exists with %s, capacity_range has required %d and limit %d: use another name or fix the range", v.CoName, ExactSize(v.Capacity), s.Capacity.Required, s.Capacity.Limit)
	case v.Namespace != s.Parameters.Namespace:
		return Errorf(ErrIncompatible, "volume %q exists for namespace %q of FlexVolume, the request has %q: use another name", v.CoName, v.Namespace, s.Parameters.Namespace)
	case !sameSource(v.Source, s.Source):
		return Errorf(ErrIncompatible, "volume %q exists with the content of %v, volume_content_source is %v: use another name", v.CoName, v.Source, s.Source)
	case v.Directory != nil:
		return v.satisfiesDirectory(s)
	case v.Encryption.kind() != s.Parameters.Encryption():
		return Errorf(ErrIncompatible, "volume %q exists with encryption %s, the request has %s: use another name", v.CoName, v.Encryption.kind(), s.Parameters.Encryption())
	case v.Block != s.Block():
		return Errorf(ErrIncompatible, "volume %q exists with block %t, volume_capabilities have block %t: use another name", v.CoName, v.Block, s.Block())
	case v.FSType != s.FSType() && (s.Source == nil || s.NamesFSType()):
		return Errorf(ErrIncompatible, "volume %q exists with filesystem %s, the request has %s: use another name", v.CoName, v.FSType, s.FSType())
	case s.Source == nil && !slices.Equal(v.MkfsOptions, s.Parameters.MkfsOptions()):
		return Errorf(ErrIncompatible, "volume %q exists with mkfsOptions %q, the request has %q: use another name", v.CoName, v.MkfsOptions, s.Parameters.MkfsOptions())
	}
	return nil
}

// sameSource reports whether two sources name the same snapshot or volume, or are both nil.
func sameSource(a, b *Source) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Snapshot == b.Snapshot && a.ID == b.ID
}

// satisfiesDirectory compares the parameters of directories. A mode, uid or gid that the request does not
// set matches every value.
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
		{ParamMode, d.Mode.String(), p.Mode == nil || d.Mode == Mode(*p.Mode)},
		{ParamUID, d.UID, p.UID == nil || d.UID == *p.UID},
		{ParamGID, d.GID, p.GID == nil || d.GID == *p.GID},
	} {
		if !c.same {
			return Errorf(ErrIncompatible, "volume %q exists with another %s (%v): use another name", v.CoName, c.key, c.have)
		}
	}
	return nil
}
