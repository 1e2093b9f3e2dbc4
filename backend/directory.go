package backend

import (
	"cmp"
	"os"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// DefaultMode of a volume's directory lets every pod write, whatever user it runs as:
// nothing else tells them apart where no fsGroup is set.
const DefaultMode = 0o777

// DirectoryParameters are the parameters of kinds whose volumes are directories.
// CheckDirectory checks them.
var DirectoryParameters = []Parameter{
	{
		Key: volume.ParamSubDir, Valid: anything,
		Want: "a relative path, which may contain `${pvc.metadata.name}`, `${pvc.metadata.namespace}` and `${pv.metadata.name}`",
		Doc:  "The path of the directory in the pool or export. An existing directory is adopted with its content. The names at the top of a pool are reserved. With `onDelete: retain` the path needs the component `${pvc.metadata.namespace}`, or `${pv.metadata.name}`. Default: a folder of the volume's own.",
	},
	{
		Key: volume.ParamOnDelete, Values: []string{string(volume.OnDeleteDelete), string(volume.OnDeleteArchive), string(volume.OnDeleteRetain)},
		Doc: "[What happens to the directory](nfs.md#delete-archive-retain) when the volume is deleted. Default: `delete`.",
	},
	{
		Key: volume.ParamMode, Valid: anything, Want: "permission bits in octal",
		Doc: "The permissions of the volume's top directory when it is created. Default: `0777`; an adopted directory keeps its own.",
	},
	{
		Key: volume.ParamMountPermissions, Valid: anything, Want: "permission bits in octal",
		Doc: "Another name of `mode`, as in csi-driver-nfs. `0` means the default.",
	},
	{
		Key: volume.ParamUID, Valid: anything, Want: "a number from 0 to 4294967294",
		Doc: "The owner of the top directory when it is created. Default: root. `fsGroup` of a pod is applied afterwards.",
	},
	{
		Key: volume.ParamGID, Valid: anything, Want: "a number from 0 to 4294967294",
		Doc: "The group of the top directory when it is created. Default: root's.",
	},
}

// CheckDirectory refuses invalid parameters of directories (ErrInvalid).
func CheckDirectory(p volume.Parameters) error {
	_, err := p.Directory()
	return err
}

// Asked are the parameters of the directory that is requested, with SubDir expanded
// (ErrInvalid).
func Asked(spec volume.Spec) (asked volume.DirectoryParameters, err error) {
	if asked, err = spec.Parameters.Directory(); err == nil {
		asked.SubDir, err = asked.ExpandSubDir()
	}
	return asked, err
}

// DirectoryRecord is the record of a volume that is a directory and that is to be made.
// PrepareDirectory writes into it what the directory is like.
func DirectoryRecord(id volume.ID, spec volume.Spec, size int64, asked volume.DirectoryParameters) volume.Volume {
	v := volume.Volume{
		Version:   volume.RecordVersion,
		ID:        id,
		CoName:    spec.CoName,
		Capacity:  size,
		Namespace: spec.Parameters.Namespace,
		Directory: &volume.Directory{
			SubDir:   asked.SubDir,
			OnDelete: cmp.Or(asked.OnDelete, volume.OnDeleteDelete),
			Mode:     DefaultMode,
		},
		Created: time.Now().UTC().Truncate(time.Second),
	}
	if spec.Source != nil {
		source := *spec.Source
		v.Source = &source
	}
	return v
}

// PrepareDirectory gives a volume's directory the mode and the owner that are asked
// for, and writes into the record what it has then. One that was there before, not made,
// keeps what nobody asked to be otherwise. An error of changing the owner is a
// *os.PathError with Op "fchown".
func PrepareDirectory(dir *os.File, made bool, asked volume.DirectoryParameters, record *volume.Directory) error {
	if err := chown(dir, asked); err != nil {
		return err
	}
	mode := uint32(DefaultMode)
	if asked.Mode != nil {
		mode = *asked.Mode
	}
	if made || asked.Mode != nil { // after chown(2), which takes bits away
		if err := syscall.Fchmod(int(dir.Fd()), mode); err != nil {
			return &os.PathError{Op: "fchmod", Path: dir.Name(), Err: err}
		}
	}
	after, uid, gid, err := pool.Status(dir)
	if err == nil {
		record.Mode, record.UID, record.GID = after&0o7777, uid, gid
	}
	return err
}

// chown changes the owner where it is to be another. A server that makes all users
// one refuses, and need not be asked if that one is the one.
func chown(dir *os.File, asked volume.DirectoryParameters) error {
	_, uid, gid, err := pool.Status(dir)
	if err != nil {
		return err
	}
	toUID, toGID := uid, gid
	if asked.UID != nil {
		toUID = *asked.UID
	}
	if asked.GID != nil {
		toGID = *asked.GID
	}
	if toUID == uid && toGID == gid {
		return nil
	}
	if err := syscall.Fchown(int(dir.Fd()), int(toUID), int(toGID)); err != nil {
		return &os.PathError{Op: "fchown", Path: dir.Name(), Err: err}
	}
	return nil
}
