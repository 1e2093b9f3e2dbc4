package volume

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// ParamConsistency is what a VolumeSnapshotClass may say of the moment that a snapshot
// shows.
const ParamConsistency = "consistency"

// Consistency is what a snapshot of a volume that is in use is like.
type Consistency string

const (
	// ConsistencyCrash shows the volume as after a power cut at one moment, with all in
	// it that was written before the call.
	ConsistencyCrash Consistency = "crash"
	// ConsistencyFrozen shows its filesystem unmounted cleanly, for it is frozen
	// meanwhile.
	ConsistencyFrozen Consistency = "frozen"
)

// SnapshotParameters are those of a VolumeSnapshotClass or a VolumeGroupSnapshotClass.
type SnapshotParameters struct {
	Consistency Consistency
}

// ParseSnapshotParameters reads the parameters of a snapshot's class. An unknown key, or
// a value that its key does not take, is ErrInvalid.
func ParseSnapshotParameters(in map[string]string) (SnapshotParameters, error) {
	p := SnapshotParameters{Consistency: ConsistencyCrash}
	for _, key := range slices.Sorted(maps.Keys(in)) {
		switch value := in[key]; {
		case key == ParamConsistency:
			p.Consistency = Consistency(value)
			if p.Consistency != ConsistencyCrash && p.Consistency != ConsistencyFrozen {
				return p, Errorf(ErrInvalid, "parameter %s=%q: want %s or %s", key, value, ConsistencyCrash, ConsistencyFrozen)
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
	// Group: a group is asked for, be it of one volume.
	Group      bool
	Parameters SnapshotParameters
}

// Name is that of the set.
func (s SnapshotSpec) Name() string {
	if s.Group {
		return GroupName(s.CoName)
	}
	return NameFor(s.CoName)
}

// MaxGroup is how many snapshots a group may have.
const MaxGroup = 100

const groupSuffix = ".group"

var (
	snapshotNamePattern = regexp.MustCompile(`^[a-z0-9-]{1,63}(\.[0-9]{3})?$`)
	groupNamePattern    = regexp.MustCompile(`^[a-z0-9-]{1,63}\.group$`)
)

// GroupName is the name in the ID of a group of snapshots, by the orchestrator's name.
func GroupName(coName string) string { return NameFor(coName) + groupSuffix }

// IsGroup tells whether a name is of a group of snapshots.
func IsGroup(name string) bool { return groupNamePattern.MatchString(name) }

// ValidSetName tells whether the driver makes a set of snapshots of that name.
func ValidSetName(name string) bool { return namePattern.MatchString(name) || IsGroup(name) }

// MemberName is the name of one snapshot of a group.
func MemberName(group string, index int) string {
	return fmt.Sprintf("%s.%03d", strings.TrimSuffix(group, groupSuffix), index)
}

// SetOf is the name of the snapshot's set (see SnapshotSet): of its group, or its own.
func SetOf(snapshot string) string {
	if group, _, ok := strings.Cut(snapshot, "."); ok {
		return group + groupSuffix
	}
	return snapshot
}

// ParseSnapshotID takes the ID of a snapshot apart: ErrNotFound if there can be none
// such. Its form is that of a volume's, and its pool the volume's.
func ParseSnapshotID(s string) (ID, error) { return parseID(s, snapshotNamePattern.MatchString) }

// ParseGroupID is ParseSnapshotID for a group of snapshots.
func ParseGroupID(s string) (ID, error) { return parseID(s, IsGroup) }

// SnapshotSet is the record of snapshots that were taken at one moment and live
// together: of one volume, or of a group.
type SnapshotSet struct {
	Version int `json:"version"`
	ID      ID  `json:"id"`
	// CoName is the orchestrator's name, in full.
	CoName    string     `json:"name"`
	Created   time.Time  `json:"created"`
	Snapshots []Snapshot `json:"snapshots"`
	// Token tells the call that made the set from others that made one of the same
	// name; in shared pools.
	Token string `json:"token,omitempty"`
}

// Snapshot is what there is to know of one.
type Snapshot struct {
	ID ID `json:"id"`
	// Source is the volume that it shows.
	Source ID `json:"source"`
	// Size is the least capacity of a volume that is made of it, in bytes.
	Size int64 `json:"sizeBytes"`
	// Bytes is what it can come to cost, in bytes: all that it has, though it may share
	// that with others.
	Bytes int64 `json:"allocatedBytes"`
	// Shared: it shared what it has when it was made.
	Shared bool `json:"shared,omitempty"`
	// Owners are the volumes besides Source that have written what is in it, where the
	// filesystem counts that with them.
	Owners []ID `json:"owners,omitempty"`
	// Directory: it is a directory; the fields below are of images.
	Directory  bool   `json:"directory,omitempty"`
	Block      bool   `json:"block,omitempty"`
	FSType     string `json:"fsType,omitempty"`
	SectorSize int    `json:"sectorSize,omitempty"`
	// Formatted: the filesystem was complete; else there is none yet.
	Formatted bool `json:"formatted,omitempty"`
	// Created is the set's, and Group its ID if it is a group.
	Created time.Time `json:"-"`
	Group   ID        `json:"-"`
}

// Writers are all volumes that have written what is in the snapshot, as far as their
// filesystem counts it with them.
func (s Snapshot) Writers() []ID { return append([]ID{s.Source}, s.Owners...) }

// IsGroup tells whether the set is a group.
func (s SnapshotSet) IsGroup() bool { return IsGroup(s.ID.Name) }

// Bytes is what the set can come to cost.
func (s SnapshotSet) Bytes() (sum int64) {
	for _, one := range s.Snapshots {
		sum += one.Bytes
	}
	return sum
}

// Members are the snapshots, with what they have of the set.
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

// Marshal writes the record as it lies on the disk.
func (s SnapshotSet) Marshal() ([]byte, error) {
	b, err := json.MarshalIndent(s, "", "  ")
	return append(b, '\n'), err
}

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
	form, err := fs.of(s.ID)
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

// check refuses what no driver wrote of the snapshot that is the i-th of a set.
func (s Snapshot) check(form Form, of SnapshotSet, i int) error {
	want := of.ID
	if of.IsGroup() {
		want.Name = MemberName(of.ID.Name, i)
	}
	source := s.Source
	source.Name = want.Name
	switch {
	case s.ID != want, source != want, !namePattern.MatchString(s.Source.Name):
		return Errorf(ErrDamaged, "record of %s has snapshot %s of volume %s", of.ID, s.ID, s.Source)
	case s.Size <= 0, s.Bytes < 0:
		return Errorf(ErrDamaged, "record of snapshot %s has sizeBytes %d, allocatedBytes %d", s.ID, s.Size, s.Bytes)
	case !s.Directory && len(s.Owners) > 0:
		return Errorf(ErrDamaged, "record of snapshot %s of an image has owners %v", s.ID, s.Owners)
	case s.Directory && (s.Block || s.FSType != "" || s.SectorSize != 0 || s.Formatted), s.Directory != form.Directory:
		return Errorf(ErrDamaged, "record of snapshot %s has a directory: %t, or fields of the other kind", s.ID, s.Directory)
	case s.Directory:
		return nil
	case s.Block == (s.FSType != ""), !s.Block && !ValidFSType(s.FSType), s.SectorSize != 512 && s.SectorSize != 4096:
		return Errorf(ErrDamaged, "record of snapshot %s has block %t with fsType %q, sectorSize %d", s.ID, s.Block, s.FSType, s.SectorSize)
	}
	return nil
}

// Source is what a volume was made of: a snapshot, or another volume.
type Source struct {
	// Snapshot: ID is a snapshot's, else a volume's.
	Snapshot bool `json:"snapshot,omitempty"`
	ID       ID   `json:"id"`
	// Shared is how much the volume shared with its source when it was made, in bytes.
	Shared int64 `json:"sharedBytes,omitempty"`
	// Owners are the volumes that have written that, where the filesystem counts it with
	// them.
	Owners []ID `json:"owners,omitempty"`
}

func (s Source) String() string {
	if s.Snapshot {
		return "snapshot " + s.ID.String()
	}
	return "volume " + s.ID.String()
}
