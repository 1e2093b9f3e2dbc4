// Package crashpoint lists the points at which tests kill a process: test/crash kills the driver, and test/e2e kills the command
// kubectl trivet move. Each point follows a step with a persistent effect. In the normal binary Here does nothing and is inlined. A
// binary with the build tag
// `crashpoints` kills itself at the point that the environment variable TRIVET_CRASH_AT names.
package crashpoint

// Point names a point in a call that changes persistent state.
type Point string

// The points by call, in the order in which they are reached. A comment describes the state at the point. "Committed"
// means that the volume or snapshot was renamed to its final path, and "not answered" that the call has not returned.
const (
	CreateReserved    Point = "create-reserved"    // empty temporary directory created
	CreateHalfFormat  Point = "create-half-format" // filesystem body written to a new image, no superblock
	CreateImage       Point = "create-image"       // image created, with a filesystem if there is a template of it, no record
	CreateZeroed      Point = "create-zeroed"      // raw logical volume zeroed, not recorded
	ClaimEntry        Point = "claim-entry"        // record in tmp, of a disk's partition tables only the sector with the entry written
	ClaimMarked       Point = "claim-marked"       // a disk's partition tables complete, not committed
	CreateLimited     Point = "create-limited"     // directory with a quota created, no record
	CreatePlaced      Point = "create-placed"      // directory moved to its subDir, not committed
	CreateBuilt       Point = "create-built"       // complete and durable, not committed
	CreateCommitted   Point = "create-committed"   // renamed into place, rename not yet durable
	CreateDone        Point = "create-done"        // durable, not answered
	ReceiveSynced     Point = "receive-synced"     // a part of an image from another node durable, not recorded
	ReceiveRecorded   Point = "receive-recorded"   // the part recorded, the image incomplete or not committed
	ReceiveMade       Point = "receive-made"       // all entries of a directory from another node made, not recorded
	ReceiveMoved      Point = "receive-moved"      // the complete image moved to its entry in tmp
	ReceiveAbandoned  Point = "receive-abandoned"  // an incomplete image that is discarded, not moved to the trash
	FreezeFrozen      Point = "freeze-frozen"      // filesystems frozen, not copied
	SnapshotData      Point = "snapshot-data"      // data of a snapshot durable, no record
	SnapshotBuilt     Point = "snapshot-built"     // snapshot complete and durable, not committed
	SnapshotCommitted Point = "snapshot-committed" // renamed into place, rename not yet durable
	SnapshotDone      Point = "snapshot-done"      // durable, not answered
	SnapshotDeleted   Point = "snapshot-deleted"   // a snapshot in the trash, rename not yet durable
	CheckAttached     Point = "check-attached"     // copy of a volume that is checked attached, not checked
	AttachWritten     Point = "attach-written"     // attach record written under a temporary name
	AttachLinked      Point = "attach-linked"      // attach record in place
	DetachRemoved     Point = "detach-removed"     // attach record removed
	StageLocked       Point = "stage-locked"       // image locked, filesystem not written
	StageEncrypted    Point = "stage-encrypted"    // container complete and durable, not recorded
	StageOpened       Point = "stage-opened"       // container open, not closed by the kernel
	StageErased       Point = "stage-erased"       // signatures in a new container erased, container not recorded
	StageFormatting   Point = "stage-formatting"   // intent to format durable
	StageHalfFormat   Point = "stage-half-format"  // filesystem body written, no superblock
	StageFormatted    Point = "stage-formatted"    // filesystem complete, not recorded
	StageIdentified   Point = "stage-identified"   // identity of a copied filesystem changed, not recorded
	StageNoted        Point = "stage-noted"        // only a disk's backup partition table records that it may contain data
	StageMarked       Point = "stage-marked"       // recorded as formatted
	StageBound        Point = "stage-bound"        // loop device bound, discards not disabled
	StageAttached     Point = "stage-attached"     // loop device or partition attached
	StageMounted      Point = "stage-mounted"      // filesystem mounted, attached to no path
	StageDone         Point = "stage-done"         // mounted at the staging path, not answered
	PublishTarget     Point = "publish-target"     // target created, not mounted
	PublishReadOnly   Point = "publish-read-only"  // read-only device for a block target created
	PublishDone       Point = "publish-done"       // mounted at the target, not answered
	GrowImage         Point = "grow-image"         // image grown, record unchanged
	GrowZeroed        Point = "grow-zeroed"        // extents for a raw logical volume zeroed, not added to it
	GrowFreed         Point = "grow-freed"         // the zeroed extents free, not added to it
	GrowBackup        Point = "grow-backup"        // a disk's backup partition table grown, primary unchanged
	GrowRecord        Point = "grow-record"        // record written, not answered
	GrowDevice        Point = "grow-device"        // device grown, filesystem unchanged
	GrowDone          Point = "grow-done"          // filesystem grown, not answered
	ModifyRecorded    Point = "modify-recorded"    // limits of I/O recorded, not effective
	UnpublishGone     Point = "unpublish-gone"     // unmounted, target exists
	UnpublishTarget   Point = "unpublish-target"   // target removed, read-only device not removed
	UnpublishDone     Point = "unpublish-done"     // all removed, not answered
	UnstageMount      Point = "unstage-mount"      // unmounted, device not detached
	UnstageGone       Point = "unstage-gone"       // device detached, not answered
	DeleteErased      Point = "delete-erased"      // header of an encrypted volume erased
	DeleteRenamed     Point = "delete-renamed"     // in the trash, rename not yet durable
	DeleteDone        Point = "delete-done"        // durable, not answered
	ReapRemoved       Point = "reap-removed"       // data of a directory removed, its quota ID not released
	ReapStarted       Point = "reap-started"       // trash entry partly removed
	ReapZeroed        Point = "reap-zeroed"        // a part of a disk zeroed, and recorded
	ReapErasing       Point = "reap-erasing"       // disk wiped, partition tables partly removed
)

// The points of `kubectl trivet move` in the order in which they are reached.
const (
	MoveBegun    Point = "move-begun"     // state recorded, no other object
	MoveSnapshot Point = "move-snapshot"  // snapshot taken, if there is one, no claim of the copy
	MoveCopying  Point = "move-copying"   // claim of the copy created, copy not complete
	MoveCopied   Point = "move-copied"    // a copy complete, the older ones not deleted
	MoveCordoned Point = "move-cordoned"  // node cordoned, no pod evicted
	MoveStopped  Point = "move-stopped"   // volume not used, not recorded
	MoveCaughtUp Point = "move-caught-up" // last copy complete, not recorded
	MoveKept     Point = "move-kept"      // a second object for the old volume
	MoveLost     Point = "move-lost"      // claim without a PersistentVolume
	MoveReplaced Point = "move-replaced"  // claim with the new volume, not recorded
	MoveRunning  Point = "move-running"   // pod with the new volume, not recorded
	MoveReleased Point = "move-released"  // PersistentVolume of the last copy deleted, its claim not
	MoveCopyGone Point = "move-copy-gone" // claim of the copy deleted, its snapshot not
	MoveOldGone  Point = "move-old-gone"  // old volume deleted, state not removed
	MoveAborting Point = "move-aborting"  // claim with the old volume, copies not deleted
)

// Move contains all points of `kubectl trivet move`.
var Move = []Point{
	MoveBegun, MoveSnapshot, MoveCopying, MoveCopied, MoveCordoned, MoveStopped, MoveCaughtUp, MoveKept, MoveLost, MoveReplaced,
	MoveRunning, MoveReleased, MoveCopyGone, MoveOldGone, MoveAborting,
}

// All contains all points of the driver. test/crash fails if one of them is never reached.
var All = []Point{
	CreateReserved, CreateHalfFormat, CreateImage, CreateZeroed, CreateLimited, CreatePlaced, ClaimEntry, ClaimMarked, CreateBuilt, CreateCommitted, CreateDone,
	ReceiveSynced, ReceiveRecorded, ReceiveMade, ReceiveMoved, ReceiveAbandoned,
	FreezeFrozen, SnapshotData, SnapshotBuilt, SnapshotCommitted, SnapshotDone, SnapshotDeleted, CheckAttached,
	AttachWritten, AttachLinked, DetachRemoved,
	StageLocked, StageEncrypted, StageOpened, StageErased, StageFormatting, StageHalfFormat, StageFormatted, StageIdentified, StageNoted, StageMarked,
	StageBound, StageAttached, StageMounted, StageDone,
	PublishTarget, PublishReadOnly, PublishDone,
	GrowZeroed, GrowFreed, GrowImage, GrowBackup, GrowRecord, GrowDevice, GrowDone,
	ModifyRecorded,
	UnpublishGone, UnpublishTarget, UnpublishDone, UnstageMount, UnstageGone,
	DeleteErased, DeleteRenamed, DeleteDone, ReapRemoved, ReapStarted, ReapZeroed, ReapErasing,
}
