package ledger

import (
	"slices"

	"github.com/trivet-csi/trivet/volume"
)

// UnknownBackend stands for the backend of a volume whose record cannot be read.
const UnknownBackend = "unknown"

// Reservation is what the ledger holds of one folder of a pool.
type Reservation struct {
	Backend string
	Bytes   int64
	// Trashed: it is of a deleted volume or snapshot whose space is not free yet.
	Trashed bool
	// SubDir is the volume's directory outside its folder, and Retain whether that
	// outlives the volume; empty: none.
	SubDir string
	Retain bool
	// Quota is what limits the volume; zero: nothing. Unmeasured: the volume is a
	// directory, and what it uses is not known.
	Quota      volume.Quota
	Unmeasured bool
	// Snapshots are those of a set; nil for a volume.
	Snapshots []volume.Snapshot
	// Cloned: the volume was made of another one or of a snapshot. Shared is what it
	// shared with that when it was made, in bytes.
	Cloned bool
	Shared int64
	// Owners have written what is shared, and it counts as theirs.
	Owners []volume.ID
	// Unread: the record cannot be read, so the volume's directory is not known.
	Unread bool
	// Inode is the inode number of the folder before its record was read; 0: not known.
	// A folder of the same name with another number is another volume's.
	Inode uint64
}

// OfVolume is the reservation of a volume.
func OfVolume(v volume.Volume) Reservation {
	r := Reservation{Backend: v.ID.Backend, Bytes: v.Capacity}
	if v.Source != nil {
		r.Cloned, r.Shared, r.Owners = true, v.Source.Shared, v.Source.Owners
	}
	if len(r.Owners) > 0 { // their limits are raised by as much
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

// InTrash is the reservation after the volume or set was deleted. A directory outside the
// folder is no longer the volume's.
func (r Reservation) InTrash() Reservation {
	r.Trashed, r.SubDir, r.Retain, r.Unread = true, "", false, false
	return r
}

// Writers are the volumes whose limits depend on this reservation: they have written what
// it shares, or its snapshots have.
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
