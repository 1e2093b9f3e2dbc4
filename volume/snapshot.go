package volume

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// ParamConsistency is the parameter of a VolumeSnapshotClass whose value is a Consistency.
const ParamConsistency = "consistency"

// Consistency is the state of the data in a snapshot of a volume that is in use.
type Consistency string

const (
	// ConsistencyCrash is the state after a power failure. It contains all data that was written
	// before the call.
	ConsistencyCrash Consistency = "crash"
	// ConsistencyFrozen is the state after a clean unmount: the filesystem is frozen while the
	// snapshot is made.
	ConsistencyFrozen Consistency = "frozen"
)

// SnapshotParameters are the parameters of a VolumeSnapshotClass or a VolumeGroupSnapshotClass.
type SnapshotParameters struct {
	Consistency Consistency
}

// ParseSnapshotParameters reads the parameters of a snapshot's class. An unknown key or value is
// ErrInvalid.
func ParseSnapshotParameters(in map[string]string) (SnapshotParameters, error) {
	p := SnapshotParameters{Consistency: ConsistencyCrash}
	for _, key := range slices.Sorted(maps.Keys(in)) {
		switch value := in[key]; {
		case key == ParamConsistency:
			p.Consistency = Consistency(value)
			if p.Consistency != ConsistencyCrash && p.Consistency != ConsistencyFrozen {
				return p, Errorf(ErrInvalid, "parameter %s=%q: expected %s or %s", key, value, ConsistencyCrash, ConsistencyFrozen)
			}
		case !strings.HasPrefix(key, ProvisionerPrefix):
			return p, Errorf(ErrInvalid, "parameter %q is unknown: the known one is %s", key, ParamConsistency)
		}
	}
	return p, nil
}

// SnapshotSpec is a request for a snapshot, or for a group of them.
type SnapshotSpec struct {
	// CoName is the orchestrator's name, in full.
	CoName string
	// Group is true if the request is for a group, which may contain only one snapshot.
	Group      bool
	Parameters SnapshotParameters
}

// Name returns the name in the ID of the SnapshotSet.
func (s SnapshotSpec) Name() string {
	if s.Group {
		return GroupName(s.CoName)
	}
	return NameFor(s.CoName)
}

// MaxGroup is the largest number of snapshots in a group.
const MaxGroup = 100

const groupSuffix = ".group"

var (
	snapshotNamePattern = regexp.MustCompile(`^[a-z0-9-]{1,63}(\.[0-9]{3})?$`)
	groupNamePattern    = regexp.MustCompile(`^[a-z0-9-]{1,63}\.group$`)
)

// GroupName returns the name in the ID of the group of snapshots that the orchestrator calls coName.
func GroupName(coName string) string { return NameFor(coName) + groupSuffix }

// IsGroup reports whether a name is that of a group of snapshots.
func IsGroup(name string) bool { return groupNamePattern.MatchString(name) }

// ValidSetName reports whether name can be the name of a SnapshotSet.
func ValidSetName(name string) bool { return namePattern.MatchString(name) || IsGroup(name) }

// MemberName returns the name of the snapshot with an index in a group.
func MemberName(group string, index int) string {
	return fmt.Sprintf("%s.%03d", strings.TrimSuffix(group, groupSuffix), index)
}

// SetOf returns the name of the SnapshotSet that contains a snapshot: the name of the snapshot's group, or
// the snapshot's own name.
func SetOf(snapshot string) string {
	if group, _, ok := strings.Cut(snapshot, "."); ok {
		return group + groupSuffix
	}
	return snapshot
}

// ParseSnapshotID parses the ID of a snapshot. The ID has the format of a volume's ID, and contains the pool of
// the source volume. ParseSnapshotID returns ErrNotFound for any other text.
func ParseSnapshotID(s string) (ID, error) { return parseID(s, snapshotNamePattern.MatchString) }

// ParseGroupID is ParseSnapshotID for a group of snapshots.
func ParseGroupID(s string) (ID, error) { return parseID(s, IsGroup) }

// SnapshotSet is the record of snapshots that are taken and deleted together: of one volume, or of a group.
type SnapshotSet struct {
	Version int `json:"version"`
	ID      ID  `json:"id"`
	// CoName is the orchestrator's name, in full.
	CoName    string     `json:"name"`
	Created   time.Time  `json:"created"`
	Snapshots []Snapshot `json:"snapshots"`
	// CreationID identifies the call that created the set, because several processes may create sets with the
	// same name.
	CreationID string `json:"creationID,omitempty"`
}

// Snapshot is one snapshot of a set.
type Snapshot struct {
	ID ID `json:"id"`
	// Source is the volume that was copied.
	Source ID `json:"source"`
	// Size is the minimum capacity of a volume that is created from the snapshot, in bytes.
	Size int64 `json:"sizeBytes"`
	// Bytes is the space that the snapshot can use, in bytes. Data that it shares is included.
	Bytes int64 `json:"allocatedBytes"`
	// Shared is true if the snapshot shared its data with the volume when the snapshot was created.
	Shared bool `json:"shared,omitempty"`
	// Owners are the volumes other than Source that have written data of the snapshot, if the filesystem
	// counts the data as their usage.
	Owners []ID `json:"owners,omitempty"`
	// Directory is true if the snapshot is a directory. Only images have the fields from Block to Formatted.
	Directory  bool   `json:"isDirectory,omitempty"`
	Block      bool   `json:"block,omitempty"`
	FSType     string `json:"fsType,omitempty"`
	SectorSize int    `json:"sectorSize,omitempty"`
	// Encryption is nil for a snapshot of a volume that is not encrypted.
	Encryption *Encryption `json:"encryption,omitempty"`
	// Formatted is true if the image contains a complete filesystem, and false if it contains none.
	Formatted bool `json:"formatted,omitempty"`
	// Created is the creation time of the set. Group is the ID of the set if it is a group. Members sets
	// both.
	Created time.Time `json:"-"`
	Group   ID        `json:"-"`
}

// Writers returns Source and Owners.
func (s Snapshot) Writers() []ID { return append([]ID{s.Source}, s.Owners...) }

// IsGroup reports whether the set is a group.
func (s SnapshotSet) IsGroup() bool { return IsGroup(s.ID.Name) }

// Bytes returns the space that the set can use, in bytes.
func (s SnapshotSet) Bytes() (sum int64) {
	for _, one := range s.Snapshots {
		sum += one.Bytes
	}
	return sum
}

// Members returns the snapshots, with Created and Group set.
func (s SnapshotSet) Members() []Snapshot {
	members := slices.Clone(s.Snapshots)
	for i := range members {
		members[i].Created = s.Created
		if s.IsGroup() {
			members[i].Group = s.ID
		}
	}
	return members
}

// Marshal returns the record in its format on the disk.
func (s SnapshotSet) Marshal() ([]byte, error) { return marshalRecord(s) }

// ParseSnapshotSet reads a record strictly: an unknown version, kind or field, or a value
// that no driver wrote, is ErrDamaged.
func (fs Forms) ParseSnapshotSet(b []byte) (SnapshotSet, error) {
	var s SnapshotSet
	if err := decodeRecord(b, &s, &s.Version); err != nil {
		return SnapshotSet{}, err
	}
	switch {
	case !snapshotNamePattern.MatchString(s.ID.Name) && !s.IsGroup():
		return SnapshotSet{}, Errorf(ErrDamaged, "record of a snapshot has id %q", s.ID)
	case len(s.Snapshots) == 0, len(s.Snapshots) > MaxGroup, !s.IsGroup() && len(s.Snapshots) > 1:
		return SnapshotSet{}, Errorf(ErrDamaged, "record of %s has %d snapshots", s.ID, len(s.Snapshots))
	}
	form, err := fs.byID(s.ID)
	if err != nil {
		return SnapshotSet{}, err
	}
	for i, one := range s.Snapshots {
		if err := one.check(form, s, i); err != nil {
			return SnapshotSet{}, err
		}
	}
	return s, nil
}

// check refuses values that no driver wrote in snapshot number i of a set.
func (s Snapshot) check(form Form, set SnapshotSet, i int) error {
	want := set.ID
	if set.IsGroup() {
		want.Name = MemberName(set.ID.Name, i)
	}
	source := s.Source
	source.Name = want.Name
	switch {
	case s.ID != want, source != want, !namePattern.MatchString(s.Source.Name):
		return Errorf(ErrDamaged, "record of %s contains snapshot %s of volume %s, which does not belong to it", set.ID, s.ID, s.Source)
	case s.Size <= 0, s.Bytes < 0:
		return Errorf(ErrDamaged, "record of snapshot %s has the invalid sizeBytes %d or allocatedBytes %d", s.ID, s.Size, s.Bytes)
	case !s.Directory && len(s.Owners) > 0:
		return Errorf(ErrDamaged, "record of snapshot %s of an image has owners %v", s.ID, s.Owners)
	case s.Directory && (s.Block || s.FSType != "" || s.SectorSize != 0 || s.Formatted || s.Encryption != nil), s.Directory != form.Directory:
		return Errorf(ErrDamaged, "record of snapshot %s: isDirectory is %t, which contradicts its backend or its other fields", s.ID, s.Directory)
	case s.Directory:
		return nil
	case s.Block == (s.FSType != ""), !s.Block && !ValidFSType(s.FSType), s.SectorSize != 512 && s.SectorSize != 4096:
		return Errorf(ErrDamaged, "record of snapshot %s has an invalid combination: block %t, fsType %q, sectorSize %d", s.ID, s.Block, s.FSType, s.SectorSize)
	}
	return s.Encryption.check()
}

// Overhead returns the size of the header of an encrypted volume in bytes, by which the image is larger than Size.
func (s Snapshot) Overhead() int64 { return s.Encryption.overhead() }

// Source is the source of a volume's content: a snapshot, or another volume.
type Source struct {
	// Snapshot is true if ID is that of a snapshot, and false if it is that of a volume.
	Snapshot bool `json:"snapshot,omitempty"`
	ID       ID   `json:"id"`
	// Shared is the size of the data that the volume shared with its source when the volume was created, in
	// bytes.
	Shared int64 `json:"sharedBytes,omitempty"`
	// Owners are the volumes that have written the shared data, if the filesystem counts the data as their usage.
	Owners []ID `json:"owners,omitempty"`
}

func (s *Source) String() string {
	switch {
	case s == nil:
		return "nothing"
	case s.Snapshot:
		return "snapshot " + s.ID.String()
	}
	return "volume " + s.ID.String()
}
