package volume

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
)

// Form describes the records of one kind of volume.
type Form struct {
	// Name is the kind's name, as in volume IDs.
	Name string
	// OnNodes and OnExports tell whether directory pools of a node, and exports, can hold
	// the volumes.
	OnNodes, OnExports bool
	// Directory: the volumes are directories; others have a device.
	Directory bool
	// Section returns an empty section, a pointer that the section of a record is decoded
	// into; nil: the records have no section.
	Section func() Section
}

// Section is the part of a volume's record that only its kind knows.
type Section interface {
	// Check refuses values that no driver wrote (ErrDamaged).
	Check() error
	// Parameters are the StorageClass parameters that the section records, by key. A request
	// with other values is not for the volume.
	Parameters() map[string]string
}

// Forms are the forms of all kinds that a program knows.
type Forms []Form

// Guess is the first kind of directories, or of devices, that an export or a directory pool
// of a node can hold; empty if there is none.
func (fs Forms) Guess(onExport, directory bool) string {
	for _, f := range fs {
		if f.Directory == directory && (onExport && f.OnExports || !onExport && f.OnNodes) {
			return f.Name
		}
	}
	return ""
}

// of is the form of a record with an ID (ErrDamaged).
func (fs Forms) of(id ID) (Form, error) {
	i := slices.IndexFunc(fs, func(f Form) bool { return f.Name == id.Backend })
	if i < 0 {
		return Form{}, Errorf(ErrDamaged, "record of %s: this driver does not know backend %q: run the version that made it", id, id.Backend)
	}
	if id.Shared() && !fs[i].OnExports {
		return Form{}, Errorf(ErrDamaged, "record of %s, which is in no pool of one node", id)
	}
	return fs[i], nil
}

// decode reads JSON strictly.
func decode(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// ParseVolume reads the record of a volume strictly: an unknown version, kind or field, or a
// value that no driver wrote, is ErrDamaged.
func (fs Forms) ParseVolume(b []byte) (Volume, error) {
	var r struct {
		Volume
		Section json.RawMessage `json:"section"` // in place of the volume's
	}
	if err := decode(b, &r); err != nil {
		return Volume{}, Errorf(ErrDamaged, "record: %w", err)
	}
	v := r.Volume
	err := v.check()
	if err != nil {
		return Volume{}, err
	}
	form, err := fs.of(v.ID)
	if err == nil {
		err = v.checkMedium(form)
	}
	if err == nil {
		v.Section, err = form.section(r.Section)
	}
	if err != nil {
		return Volume{}, err
	}
	return v, nil
}

// section decodes the section of a record; nil: the record has none.
func (f Form) section(raw json.RawMessage) (Section, error) {
	if f.Section == nil && raw == nil {
		return nil, nil //nolint:nilnil // the kind has no section
	}
	if f.Section == nil || raw == nil {
		return nil, Errorf(ErrDamaged, "record of backend %s has a section: %t", f.Name, raw != nil)
	}
	s := f.Section()
	if err := decode(raw, s); err != nil {
		return nil, Errorf(ErrDamaged, "record: section: %w", err)
	}
	return s, s.Check()
}

// check refuses values that no driver wrote in the fields that all volumes have.
func (v Volume) check() error {
	switch {
	case v.Version != RecordVersion:
		return Errorf(ErrDamaged, "record has version %d, this driver reads version %d: run the driver that wrote it, or a newer one", v.Version, RecordVersion)
	case !namePattern.MatchString(v.ID.Name) && !InlineID(v.ID.Name):
		return Errorf(ErrDamaged, "record has id %q", v.ID)
	case v.Capacity <= 0:
		return Errorf(ErrDamaged, "record has capacityBytes %d", v.Capacity)
	case InlineID(v.ID.Name) != (v.Ephemeral != nil), v.Ephemeral != nil && v.ID.Shared():
		return Errorf(ErrDamaged, "record of %s is of an inline volume: %t", v.ID, v.Ephemeral != nil)
	case v.Namespace != "" && !ValidNamespace(v.Namespace):
		return Errorf(ErrDamaged, "record has namespace %q", v.Namespace)
	}
	return nil
}

// checkMedium refuses values that no driver wrote in the fields of a directory or a device.
func (v Volume) checkMedium(form Form) error {
	switch {
	case (v.Directory != nil) != form.Directory:
		return Errorf(ErrDamaged, "record of %s has a directory: %t", v.ID, v.Directory != nil)
	case form.Directory:
		return v.checkDirectory()
	case v.Block == (v.FSType != ""), !v.Block && !ValidFSType(v.FSType):
		return Errorf(ErrDamaged, "record has block %t with fsType %q", v.Block, v.FSType)
	case v.SectorSize != 512 && v.SectorSize != 4096:
		return Errorf(ErrDamaged, "record has sectorSize %d", v.SectorSize)
	}
	return nil
}

var quotaKindPattern = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// checkDirectory refuses a directory's record that no driver wrote. Everything that can write
// to the export can write a record: a path outside of the pool would be mounted.
func (v Volume) checkDirectory() error {
	d := v.Directory
	if v.Block || v.FSType != "" || v.SectorSize != 0 || len(v.MkfsOptions) > 0 {
		return Errorf(ErrDamaged, "record is of a directory and has fields of a device")
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
