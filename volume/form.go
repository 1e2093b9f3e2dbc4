package volume

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"

	strict "sigs.k8s.io/json"
)

// Form is the format of the records of one kind of volume.
type Form struct {
	// Name is the kind's name, as in volume IDs.
	Name string
	// OnNodes is true if directory pools of a node can contain the volumes. OnExports is true if
	// exports can contain them.
	OnNodes, OnExports bool
	// Directory is true if the volumes are directories, and false if they have a device.
	Directory bool
	// Section returns a pointer to an empty section, into which the section of a record is
	// decoded. If Section is nil, the records have no section.
	Section func() Section
}

// Section is the part of a volume's record that only its kind uses.
type Section interface {
	// Check refuses values that no driver wrote (ErrDamaged). It must refuse an
	// empty section, because a missing section is decoded as an empty one.
	Check() error
	// Parameters are the StorageClass parameters that the section records, by key. The volume does not
	// satisfy a request with other values.
	Parameters() map[string]string
}

// Forms are the record formats of all kinds of volume that a program supports.
type Forms []Form

// Guess returns the name of the first kind whose volumes can be in a pool, or an empty string if there is no
// such kind. The pool is an export if onExport is true, otherwise a directory pool of a node. The volumes are
// directories if directory is true, otherwise they have a device.
func (fs Forms) Guess(onExport, directory bool) string {
	for _, f := range fs {
		if f.Directory == directory && (onExport && f.OnExports || !onExport && f.OnNodes) {
			return f.Name
		}
	}
	return ""
}

// find returns the form of a kind, or the zero Form if there is none.
func (fs Forms) find(kind string) Form {
	for _, f := range fs {
		if f.Name == kind {
			return f
		}
	}
	return Form{}
}

// byID returns the form of the record with an ID. It returns ErrDamaged if no form matches the ID.
func (fs Forms) byID(id ID) (Form, error) {
	form := fs.find(id.Backend)
	if form.Name == "" {
		return Form{}, Errorf(ErrDamaged, "record of %s: this driver does not have backend %q: run the version that created the volume", id, id.Backend)
	}
	if id.Shared() && !form.OnExports {
		return Form{}, Errorf(ErrDamaged, "record of %s: the ID names a shared pool, which cannot contain volumes of backend %q: restore the record from a backup", id, id.Backend)
	}
	return form, nil
}

// DecodeStrictly decodes JSON. It refuses unknown fields, repeated fields, names in another case, and
// anything after the value.
func DecodeStrictly(b []byte, into any) error {
	unknown, err := strict.UnmarshalStrict(b, into)
	if err != nil {
		return err
	}
	return errors.Join(unknown...)
}

// DecodeRecord decodes a record strictly. version points to the version field of the record, and known is the
// version that the caller reads. An error states the version of the record if it has one, even if the rest of
// the record is in an unknown format.
func DecodeRecord(b []byte, record any, version *int, known int) error {
	err := DecodeStrictly(b, record)
	switch {
	case err == nil && *version == known:
		return nil
	case err != nil && *version == 0:
		return fmt.Errorf("record: %w", err)
	case *version != known:
		return fmt.Errorf("record has version %d, this driver reads version %d: run a driver that reads version %[1]d", *version, known)
	}
	return fmt.Errorf("record has version %d, which this driver reads, but another format: %w: run the driver that wrote it", *version, err)
}

// decodeRecord is DecodeRecord for the records of volumes and snapshots. Errors are ErrDamaged.
func decodeRecord(b []byte, record any, version *int) error {
	if err := DecodeRecord(b, record, version, RecordVersion); err != nil {
		return Errorf(ErrDamaged, "%w", err)
	}
	return nil
}

// ParseVolume reads the record of a volume strictly: an unknown version, kind or field, or a value
// that no driver wrote, is ErrDamaged. The section is decoded together with the rest, because pools
// read a record in most calls.
func (fs Forms) ParseVolume(b []byte) (Volume, error) {
	form := fs.find(string(firstBackend(b)))
	v, err := form.decode(b)
	if v.Version == RecordVersion && v.ID.Backend != "" && v.ID.Backend != form.Name { // the record was edited
		if form, err = fs.byID(v.ID); err == nil {
			v, err = form.decode(b)
		}
	}
	if err == nil {
		err = v.check()
	}
	if err == nil {
		_, err = fs.byID(v.ID)
	}
	if err == nil {
		err = v.checkMedium(form)
	}
	if err == nil && v.Section != nil {
		err = v.Section.Check()
	}
	if err != nil {
		return Volume{}, err
	}
	return v, nil
}

// firstBackend returns the backend of the first ID in a record. Unless the record was edited, this is
// the backend of the volume.
func firstBackend(b []byte) []byte {
	_, id, _ := bytes.Cut(b, []byte(`"id": "`))
	backend, _, _ := bytes.Cut(id, []byte(":"))
	return backend
}

// decode decodes a record of the form.
func (f Form) decode(b []byte) (v Volume, err error) {
	if f.Section != nil {
		v.Section = f.Section()
	}
	err = decodeRecord(b, &v, &v.Version)
	return v, err
}

// check refuses values that no driver wrote in the fields that all volumes have.
func (v Volume) check() error {
	switch {
	case !namePattern.MatchString(v.ID.Name) && !InlineID(v.ID.Name):
		return Errorf(ErrDamaged, "record has the invalid id %q", v.ID)
	case v.Capacity <= 0:
		return Errorf(ErrDamaged, "record has the invalid sizeBytes %d", v.Capacity)
	case InlineID(v.ID.Name) != (v.Ephemeral != nil), v.Ephemeral != nil && v.ID.Shared():
		return Errorf(ErrDamaged, "record of %s: the field ephemeral (present: %t) contradicts the ID", v.ID, v.Ephemeral != nil)
	case v.Namespace != "" && !ValidNamespace(v.Namespace):
		return Errorf(ErrDamaged, "record has the invalid namespace %q", v.Namespace)
	case v.IOLimits != nil && (v.Directory != nil || v.ID.Shared()):
		return Errorf(ErrDamaged, "record of %s has ioLimits, which only a device in a pool of a node has", v.ID)
	}
	return nil
}

// checkMedium refuses values that no driver wrote in the fields that only directories or only devices have.
func (v Volume) checkMedium(form Form) error {
	switch {
	case (v.Section != nil) != (form.Section != nil):
		return Errorf(ErrDamaged, "record of %s: field section is present: %t, want %t", v.ID, v.Section != nil, form.Section != nil)
	case (v.Directory != nil) != form.Directory:
		return Errorf(ErrDamaged, "record of %s: field directory is present: %t, want %t", v.ID, v.Directory != nil, form.Directory)
	case form.Directory:
		return v.checkDirectory()
	case v.Block == (v.FSType != ""), !v.Block && !ValidFSType(v.FSType):
		return Errorf(ErrDamaged, "record has block %t, which contradicts fsType %q", v.Block, v.FSType)
	case v.SectorSize != 512 && v.SectorSize != 4096:
		return Errorf(ErrDamaged, "record has the invalid sectorSize %d", v.SectorSize)
	}
	return v.Encryption.check()
}

var quotaKindPattern = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// checkDirectory refuses a directory's record that no driver wrote. Every client of the export can write a
// record, and could otherwise make the driver mount a path outside the pool.
func (v Volume) checkDirectory() error {
	d := v.Directory
	if v.Block || v.FSType != "" || v.SectorSize != 0 || len(v.MkfsOptions) > 0 || v.Encryption != nil {
		return Errorf(ErrDamaged, "record of directory %s has fields of a device", v.ID)
	}
	if d.SubDir != "" {
		if err := CheckSubDir(d.SubDir); err != nil {
			return Errorf(ErrDamaged, "record: %v", err)
		}
	}
	if !d.OnDelete.valid() {
		return Errorf(ErrDamaged, "record has the invalid onDelete %q", d.OnDelete)
	}
	if q := d.Quota; q != nil && (q.ID == 0 || v.ID.Shared() || !quotaKindPattern.MatchString(q.Kind)) {
		return Errorf(ErrDamaged, "record of %s has the invalid quota %q with ID %d", v.ID, q.Kind, q.ID)
	}
	return nil
}
