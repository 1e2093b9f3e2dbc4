package volume

import (
	"bytes"
	"cmp"
	"encoding/json"
	"regexp"
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
	SectorSize  int        `json:"sectorSize,omitempty"`
	Allocation  Allocation `json:"allocation,omitempty"`
	MkfsOptions []string   `json:"mkfsOptions,omitempty"`
	// Directory is nil for a volume that is an image.
	Directory *Directory `json:"directory,omitempty"`
	// Disk is nil but for a volume that is a whole disk.
	Disk *Disk `json:"disk,omitempty"`
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

// Disk is what there is to know of a volume that is a whole disk.
type Disk struct {
	// GUID is that of the partition with the data, by which the disk is found.
	GUID string `json:"guid"`
	// Identity is what the disk's hardware says that it is; empty: nothing.
	Identity string `json:"identity,omitempty"`
	// Wipe says what becomes of the data when the volume is deleted.
	Wipe Wipe `json:"wipe"`
}

var guidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Quota is a limit that a filesystem has set on a directory.
type Quota struct {
	// Kind is what sets it, as package quota calls it.
	Kind string `json:"kind"`
	// ID is what the filesystem knows it by, for as long as there is data of it.
	ID uint64 `json:"id"`
}

var quotaKindPattern = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

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
	case !namePattern.MatchString(v.ID.Name) && !InlineID(v.ID.Name):
		return Volume{}, Errorf(ErrDamaged, "record has id %q", v.ID)
	case v.Capacity <= 0:
		return Volume{}, Errorf(ErrDamaged, "record has capacityBytes %d", v.Capacity)
	case InlineID(v.ID.Name) != (v.Ephemeral != nil), v.Ephemeral != nil && v.ID.Shared():
		return Volume{}, Errorf(ErrDamaged, "record of %s is of an inline volume: %t", v.ID, v.Ephemeral != nil)
	case v.Namespace != "" && !ValidNamespace(v.Namespace):
		return Volume{}, Errorf(ErrDamaged, "record has namespace %q", v.Namespace)
	case v.ID.Shared() && (v.ID.Backend == BackendLocal || v.ID.Backend == BackendDisk):
		return Volume{}, Errorf(ErrDamaged, "record of %s, which is in no pool of one node", v.ID)
	case v.Directory == nil && (v.ID.Backend == BackendNFS || v.ID.Backend == BackendLocal), v.Directory != nil && (v.ID.Backend == BackendLoop || v.ID.Backend == BackendDisk), (v.Disk != nil) != (v.ID.Backend == BackendDisk):
		return Volume{}, Errorf(ErrDamaged, "record of %s has a directory: %t, a disk: %t", v.ID, v.Directory != nil, v.Disk != nil)
	case v.Directory != nil:
		return v, v.checkDirectory()
	case v.Block == (v.FSType != ""), !v.Block && !ValidFSType(v.FSType):
		return Volume{}, Errorf(ErrDamaged, "record has block %t with fsType %q", v.Block, v.FSType)
	case v.SectorSize != 512 && v.SectorSize != 4096:
		return Volume{}, Errorf(ErrDamaged, "record has sectorSize %d", v.SectorSize)
	case v.Disk != nil:
		return v, v.checkDisk()
	case v.Allocation != Thin && v.Allocation != Thick:
		return Volume{}, Errorf(ErrDamaged, "record has allocation %q", v.Allocation)
	}
	return v, nil
}

// checkDirectory refuses a directory's record that no driver wrote. Whoever can
// write to the export can write it: a path out of the pool would be mounted.
func (v Volume) checkDirectory() error {
	d := v.Directory
	if v.Block || v.FSType != "" || v.SectorSize != 0 || v.Allocation != "" || len(v.MkfsOptions) > 0 {
		return Errorf(ErrDamaged, "record is of a directory and has fields of an image")
	}
	if d.SubDir != "" {
		if err := CheckSubDir(d.SubDir); err != nil {
			return Errorf(ErrDamaged, "record: %v", err)
		}
	}
	switch d.OnDelete {
	case OnDeleteDelete, OnDeleteArchive, OnDeleteRetain:
	default:
		return Errorf(ErrDamaged, "record has onDelete %q", d.OnDelete)
	}
	if d.Mode > 0o7777 {
		return Errorf(ErrDamaged, "record has mode %o", d.Mode)
	}
	if q := d.Quota; q != nil && (q.ID == 0 || v.ID.Shared() || !quotaKindPattern.MatchString(q.Kind)) {
		return Errorf(ErrDamaged, "record of %s has quota %q with ID %d", v.ID, q.Kind, q.ID)
	}
	return nil
}

// checkDisk refuses a disk's record that no driver wrote.
func (v Volume) checkDisk() error {
	switch {
	case !guidPattern.MatchString(v.Disk.GUID):
		return Errorf(ErrDamaged, "record has disk guid %q", v.Disk.GUID)
	case !v.Disk.Wipe.valid():
		return Errorf(ErrDamaged, "record has wipe %q", v.Disk.Wipe)
	case v.Allocation != "":
		return Errorf(ErrDamaged, "record is of a disk and has allocation %q", v.Allocation)
	}
	return nil
}

// Satisfies tells why an existing volume is not what s asks for
// (ErrIncompatible), or nil if it is (CSI specification, CreateVolume).
func (v Volume) Satisfies(s Spec) error {
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
	case v.Disk != nil && v.Disk.Wipe != Wipe(cmp.Or(s.Parameters.Get(ParamWipe), string(WipeDiscard))):
		return Errorf(ErrIncompatible, "volume %q exists with wipe %s, asked for is %s: use another name", v.CoName, v.Disk.Wipe, Wipe(cmp.Or(s.Parameters.Get(ParamWipe), string(WipeDiscard))))
	case v.Disk == nil && v.Allocation != Allocation(s.Parameters.Get(ParamAllocation)):
		return Errorf(ErrIncompatible, "volume %q exists with allocation %s, asked for is %s: use another name", v.CoName, v.Allocation, s.Parameters.Get(ParamAllocation))
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

// Supports tells why the volume cannot be used as c asks (ErrPrecondition, ErrInvalid for
// a mount flag), or nil. The volume's own filesystem is meant where c names none.
func (v Volume) Supports(c Capability) error {
	if err := v.checkMountFlags(c); err != nil {
		return err
	}
	switch {
	case v.Directory != nil && c.Block:
		return Errorf(ErrPrecondition, "volume_capability asks for a raw device, volume %s is a directory: use volumeMode Filesystem", v.ID)
	case v.Directory != nil && !DirectoryFSType(v.ID.Backend, c.FSType):
		return Errorf(ErrPrecondition, "volume_capability asks for filesystem %q, volume %s is a directory and has none of its own: leave fsType empty", c.FSType, v.ID)
	case v.ID.PoolUUID != "" && c.Mode.MultiNode():
		return Errorf(ErrPrecondition, "access mode %s: volume %s is in a pool of one node, use a SINGLE_NODE mode", c.Mode, v.ID)
	case v.Directory != nil && c.Mode == MultiNodeSingleWriter:
		return Errorf(ErrPrecondition, "access mode %s: volume %s is a directory, and nothing would keep the other nodes from writing: use %s or %s", c.Mode, v.ID, MultiNodeMultiWriter, MultiNodeReaderOnly)
	case v.Directory != nil:
		return nil
	case c.Mode.MultiNode():
		return Errorf(ErrPrecondition, "access mode %s: volume %s is an image, which one node has at a time: use a SINGLE_NODE mode", c.Mode, v.ID)
	case v.Block != c.Block:
		return Errorf(ErrPrecondition, "volume_capability asks for block %t, volume %s was made with block %t", c.Block, v.ID, v.Block)
	case c.FSType != "" && c.FSType != v.FSType:
		return Errorf(ErrPrecondition, "volume_capability asks for filesystem %q, volume %s was made with %s", c.FSType, v.ID, v.FSType)
	}
	return nil
}
