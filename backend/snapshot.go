package backend

import (
	"context"
	"iter"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshotter makes snapshots of volumes; of a snapshot, or of a volume, Create makes a
// volume (volume.Spec, Source).
type Snapshotter interface {
	// Snapshot makes one snapshot of each volume, of one moment, or returns those that
	// are there if they are of these volumes (ErrIncompatible if not). Without
	// spec.Group there is one volume; a group is made whole, or not at all. What it
	// returns is durable. ErrPrecondition for a volume that is in use in a way that no moment of it
	// can be had, ErrPending while a long copy goes on: the same call then waits for its
	// end.
	Snapshot(ctx context.Context, of []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error)
	// DeleteSnapshots removes a set: a snapshot that is alone, or a group. It is no error
	// if there is none.
	DeleteSnapshots(ctx context.Context, id volume.ID) error
	// Snapshots reads the record of a set (ErrNotFound, ErrDamaged).
	Snapshots(ctx context.Context, id volume.ID) (volume.SnapshotSet, error)
	// ListSnapshots returns up to limit snapshots, those of groups too, in a stable order:
	// pools as List has them, names within one. They come after one (the zero ID: all);
	// and whether there are more.
	ListSnapshots(ctx context.Context, after volume.ID, limit int) (snapshots []volume.Snapshot, more bool, err error)
}

// Cloner makes volumes of other volumes without having snapshots of them. Every Snapshotter
// makes volumes of both.
type Cloner interface {
	// CheckSource refuses a source that no volume is made of (ErrInvalid).
	CheckSource(s volume.Source) error
}

// ChangeTracker tells what is in the snapshots of images, and what changed between two.
type ChangeTracker interface {
	// Allocated yields what has data in a snapshot from an offset in bytes on, in order.
	Allocated(ctx context.Context, s volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
	// Changed yields where a snapshot may differ from an older one of the same volume.
	Changed(ctx context.Context, older, newer volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
}

// Thawer has filesystems that a snapshot freezes for a moment.
type Thawer interface {
	// Thaw thaws what a driver left frozen that was killed.
	Thaw(ctx context.Context) error
}
