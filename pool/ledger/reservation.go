package ledger

import (
	"slices"

	"github.com/trivet-csi/trivet/volume"
)

// UnknownBackend is the backend of a volume whose record cannot be read.
const UnknownBackend = "unknown"

// Reservation is the entry of the ledger for one folder of a pool.
type Reservation struct {
	Backend string
	Bytes   int64
	// Trashed means that the volume or set is deleted, and its space is not free yet.
	Trashed bool
	// Exists means that the data existed before the volume, so the pool needs no room for it.
	Exists bool
	// SubDir is the volume's directory outside its folder; empty if it has none. UnknownSubDir means
	// that the volume may have any SubDir, because its record cannot be read. Retain means that the
	// directory is not deleted with the volume.
	SubDir        string
	UnknownSubDir bool
	Retain        bool
	// Quota is the limit of a directory; zero if it has none. Unmeasured means that the volume is a
	// directory without a limit, so its usage is not known.
	Quota      volume.Quota
	Unmeasured bool
	// Snapshots are those of a set; nil for a volume.
	Snapshots []volume.Snapshot
	// Cloned means that the volume was made from another volume or a snapshot. Shared is the size of
	// the data that it shared with its source at first, in bytes.
	Cloned bool
	Shared int64
	// Owners are the volumes that have written the shared data. It counts as their usage.
	Owners []volume.ID
	// Inode is the inode number of the folder before its record was read; 0 if it is not known. A
	// folder with the same name and another number belongs to another volume.
	Inode uint64
}

// OfVolume is the reservation of a volume.
func OfVolume(v volume.Volume) Reservation {
	r := Reservation{Backend: v.ID.Backend, Bytes: v.StorageSize()}
	if v.Source != nil {
		r.Cloned, r.Shared, r.Owners = true, v.Source.Shared, v.Source.Owners
	}
	if len(r.Owners) > 0 { // the limits of the owners are raised by the shared bytes
		r.Bytes += r.Shared
	}
	if v.Directory != nil {
		r.SubDir, r.Retain = v.Directory.SubDir, v.Directory.OnDelete == volume.OnDeleteRetain
		r.Unmeasured = v.Directory.Quota == nil
		if q := v.Directory.Quota; q != nil {
			r.Quota = *q
		}
	}
	return r
}

// OfSet is the reservation of a set of snapshots.
func OfSet(s volume.SnapshotSet) Reservation {
	return Reservation{Backend: s.ID.Backend, Bytes: s.Bytes(), Snapshots: slices.Clone(s.Snapshots)}
}

// InTrash is the reservation after the deletion of the volume or set. It has no subDir: the directory
// was moved into the folder, or is retained without a volume.
func (r Reservation) InTrash() Reservation {
	r.Trashed, r.SubDir, r.Retain, r.UnknownSubDir = true, "", false, false
	return r
}

// Writers are the volumes whose limits depend on this reservation, because they have written data that
// the copy or the snapshots share.
func (r Reservation) Writers() []volume.ID {
	all := r.Owners
	for _, s := range r.Snapshots {
		if s.Directory {
			all = append(slices.Clip(all), s.Writers()...)
		}
	}
	return all
}

// sets is 1 for a set of snapshots, else 0.
func (r Reservation) sets() int {
	if r.Snapshots != nil {
		return 1
	}
	return 0
}
