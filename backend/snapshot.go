package backend

import (
	"context"
	"iter"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshotter creates snapshots of volumes. Its Create also creates volumes from a snapshot or a
// volume (Spec.Source).
type Snapshotter interface {
	// Snapshot creates one snapshot of each volume, all as of the same moment, or returns the
	// existing ones if they are of these volumes (otherwise ErrIncompatible). Without spec.Group
	// there is one volume. A group is created completely or not at all. The returned set is
	// durable. ErrPrecondition if the use of a volume prevents a consistent copy, ErrPending
	// while a long copy continues: a retry waits for its end.
	Snapshot(ctx context.Context, of []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error)
	// DeleteSnapshots removes a set: a single snapshot, or a group. It succeeds if there is none.
	DeleteSnapshots(ctx context.Context, id volume.ID) error
	// Snapshots reads the record of a set (ErrNotFound, ErrDamaged).
	Snapshots(ctx context.Context, id volume.ID) (volume.SnapshotSet, error)
	// ListSnapshots returns up to limit snapshots, including those of groups, in a stable order,
	// those after one (the zero ID: all), and whether there are more. The order of the pools is
	// that of List.
	ListSnapshots(ctx context.Context, after volume.ID, limit int) (snapshots []volume.Snapshot, more bool, err error)
}

// Cloner copies volumes, and has no snapshots. A Snapshotter copies both.
type Cloner interface {
	// CheckSource refuses a source that cannot be copied (ErrInvalid).
	CheckSource(s volume.Source) error
}

// ChangeTracker lists the allocated ranges of snapshots, and the changed ranges between two.
type ChangeTracker interface {
	// Allocated yields the ranges of a snapshot with data in order, from an offset in bytes on.
	Allocated(ctx context.Context, s volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
	// Changed yields the ranges where a snapshot may differ from an older one of the same volume.
	Changed(ctx context.Context, older, newer volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
}

// Thawer has filesystems that a snapshot freezes for a short time.
type Thawer interface {
	// Thaw thaws the filesystems that a killed driver left frozen.
	Thaw(ctx context.Context) error
}
