// Package backend is the contract between the CSI services and the kinds of storage, the registry
// of the kinds, and the code that several kinds share.
//
// Features that not every backend has are optional interfaces, found by type assertion. The driver
// advertises a feature if at least one kind has it. No service distinguishes kinds by name, and no
// backend imports gRPC or another backend.
package backend

import (
	"context"
	"iter"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Backend creates and attaches the volumes of one kind. Errors are those of package volume.
// The caller serializes the mutating calls for one volume.
type Backend interface {
	// Name is the name in StorageClasses and volume IDs.
	Name() string

	// Create creates a volume, or returns the existing one if it satisfies spec (otherwise
	// ErrIncompatible). The returned volume is durable.
	Create(ctx context.Context, spec volume.Spec) (volume.Volume, error)
	// Delete removes a volume. It succeeds if the volume does not exist. ErrPrecondition if the
	// volume is controller-published, ErrInUse if a device or a program of this node uses it.
	Delete(ctx context.Context, id volume.ID) error
	// Get reads the record of a volume (ErrNotFound, ErrDamaged).
	Get(ctx context.Context, id volume.ID) (volume.Volume, error)
	// List returns up to limit volumes in a stable order. It begins after the volume with the ID
	// after, or with the first volume if after is zero. more reports whether more volumes follow. A
	// volume with an unreadable record has only its ID.
	List(ctx context.Context, after volume.ID, limit int) (volumes []volume.Volume, more bool, err error)
	// Capacity returns the capacity that is available for new volumes with these parameters.
	Capacity(ctx context.Context, q CapacityQuery) (Capacity, error)

	// Attach makes the volume available on this node. A volume with a device is formatted or
	// checked first. The caller mounts the source, unless it is a raw device, and closes it. secrets contain the
	// passphrase of an encrypted volume.
	Attach(ctx context.Context, v volume.Volume, secrets volume.Secrets) (mount.Source, error)
	// Present finds the current source of the volume on this node; ok is false if there is
	// none. A directory is always present. If the record of the volume cannot be read, v has only
	// the ID. The source must recognize the mounts of the volume by the ID alone.
	Present(ctx context.Context, v volume.Volume) (source mount.Source, ok bool, err error)
	// Detach undoes Attach before it returns (ErrPrecondition if the volume is still in use).
	// The caller has unmounted the volume.
	Detach(ctx context.Context, v volume.Volume) error
}

// CapacityQuery contains the arguments of GetCapacity.
type CapacityQuery struct {
	Parameters volume.Parameters
	// FSType and Block describe the requested volume capabilities.
	FSType string
	Block  bool
}

// Capacity is the capacity that is available for new volumes, in bytes.
type Capacity struct {
	Available int64
	// Max and Min bound the size of one volume.
	Max, Min int64
}

// Publication is the controller-publication of a volume to a node.
type Publication struct {
	Node     string
	ReadOnly bool
	// MultiNode means that the volume can be published to other nodes at the same time.
	MultiNode bool
}

// Publisher records the nodes to which volumes are controller-published.
type Publisher interface {
	// Publish records a publication. ErrIncompatible if the volume is published differently to
	// that node, ErrPrecondition if it is published to another node and the two publications
	// exclude each other.
	Publish(ctx context.Context, v volume.Volume, p Publication) error
	// Unpublish removes the publication to a node, or to all nodes if node is empty.
	Unpublish(ctx context.Context, id volume.ID, node string) error
	// PublishedNodes lists the nodes to which v is published.
	PublishedNodes(ctx context.Context, v volume.Volume) ([]string, error)
	// PublishedCount is the number of published volumes of this backend in pools of
	// this node.
	PublishedCount() int
}

// Expander expands volumes.
type Expander interface {
	// Expand expands the storage of the volume, or the reservation of a directory, to at least
	// r.Required, and returns the changed volume. It does not change a volume that is large
	// enough. ErrOutOfRange if there is no room.
	Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error)
	// ResizeDevice makes the device of the volume on this node as large as its storage. The
	// call is cheap if the size is already right. It does nothing for a directory.
	ResizeDevice(ctx context.Context, v volume.Volume, secrets volume.Secrets) error
}

// NamespaceSetter records the namespace to which a FlexVolume volume belongs.
type NamespaceSetter interface {
	// SetNamespace records a namespace.
	SetNamespace(ctx context.Context, id volume.ID, namespace string) error
}

// IOLimiter is implemented by backends whose volumes have a device, on which the I/O of pods can be limited.
type IOLimiter interface {
	// ChangeIOLimits records the limits that change returns for the recorded ones. The volume is in a pool of a node. The record is
	// durable when ChangeIOLimits returns.
	ChangeIOLimits(ctx context.Context, id volume.ID, change func(volume.IOLimits) (volume.IOLimits, error)) error
	// IOLimited returns the IDs of the volumes with a record of limits in usable pools.
	IOLimited() ([]volume.ID, error)
}

// The results of Limiter.Enforced.
const (
	// EnforcedHard means that the volume's device limits it to its capacity.
	EnforcedHard = "hard"
	// EnforcedCooperative means that a quota limits the volume. A sufficiently privileged process can
	// exceed it.
	EnforcedCooperative = "cooperative"
	// EnforcedNot means that nothing limits the volume.
	EnforcedNot = "false"
)

// Limiter reports how volumes are limited to their capacity. The volumes of a backend that does not
// implement it are EnforcedHard.
type Limiter interface {
	// Enforced returns a value for the volume context, which never changes for a volume. If the
	// record cannot be read, v has only the ID.
	Enforced(v volume.Volume) string
}

// Meter measures volumes that share a filesystem with other volumes.
type Meter interface {
	// Measure returns the size and the usage of a volume. ok is false if nothing limits the volume,
	// so that the statistics of its filesystem apply.
	Measure(ctx context.Context, v volume.Volume) (m Measure, ok bool, err error)
}

// Measure is the size of a volume and its usage. If Inodes is 0, the number of inodes is not limited.
type Measure struct {
	Bytes, UsedBytes   int64
	Inodes, UsedInodes int64
}

// BlockProvider provides read-only devices of raw volumes, because a read-only bind mount of a device
// node does not refuse writes.
type BlockProvider interface {
	// ReadOnlyDevice returns the read-only device of the volume, and creates it if there is
	// none.
	ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error)
	// PresentReadOnly finds the read-only device; ok is false if there is none.
	PresentReadOnly(ctx context.Context, v volume.Volume) (device mount.BlockDevice, ok bool, err error)
	// ReleaseReadOnly frees the read-only device, unless it is still published.
	ReleaseReadOnly(ctx context.Context, v volume.Volume) error
}

// StaticProvider serves static volumes: volumes that the driver did not create, that an administrator
// describes in a PersistentVolume, and that have no record.
type StaticProvider interface {
	// StaticVolume reads a volume from its context; ok is false if the context describes no
	// static volume. Invalid values are ErrInvalid.
	StaticVolume(id string, context map[string]string) (v volume.Volume, ok bool, err error)
	// StaticAt returns the source of the static volume that is mounted at path; nil if
	// there is none. Calls that unmount a static volume have only its path.
	StaticAt(path string) (mount.Source, error)
}

// OwnershipVerifier is implemented by backends whose volumes this node can lose while they are
// attached.
type OwnershipVerifier interface {
	// VerifyOwnership returns nil if this node has owned the volume since it was attached.
	// Otherwise the volume must be unstaged (ErrPrecondition; ErrUnavailable if its storage is
	// missing).
	VerifyOwnership(ctx context.Context, v volume.Volume) error
}

// HealthChecker reports the problems of volumes and pools.
type HealthChecker interface {
	// Health examines the volume's data in the pool.
	Health(ctx context.Context, v volume.Volume) []Condition
	// StorageHealth examines the pools of the backend. Several backends may report the same
	// condition of one pool.
	StorageHealth(ctx context.Context) []Condition
}

// OutageReporter is implemented by backends whose pools can be unavailable for a long time, for
// example while a server does not answer.
type OutageReporter interface {
	// Outage returns the conditions of a volume whose lookup failed with err. If it returns none,
	// the health call returns err.
	Outage(id volume.ID, err error) []Condition
}

// Severity is the severity of a condition, after CSI's VolumeHealthErrorType.
type Severity int

const (
	// Degraded means that the volume works, with restrictions.
	Degraded Severity = iota + 1
	// Inaccessible means that the volume cannot be used on this node now.
	Inaccessible
	// DataLoss means that data is lost, or most likely is.
	DataLoss
)

// Condition is a problem of a volume or a pool.
type Condition struct {
	Severity Severity
	Reason   Reason
	Message  string
	// Pool is the pool whose volumes all have the condition; empty if only one volume has it.
	Pool string
}

// PoolUnavailable is the condition of a volume whose pool is unavailable.
func PoolUnavailable(err error) Condition {
	return Condition{Severity: Inaccessible, Reason: ReasonPoolUnavailable, Message: err.Error()}
}

// Snapshotter creates snapshots of volumes. The Create of such a backend also creates volumes from
// a snapshot or a volume (Spec.Source).
type Snapshotter interface {
	// Snapshot creates one snapshot of each volume, all at the same point in time, or returns
	// the existing snapshots if they are of these volumes (otherwise ErrIncompatible). Without
	// spec.Group, volumes has one element. A group is created completely or not at all. The
	// returned set is durable. ErrPrecondition if a volume is in use and cannot be copied
	// consistently, ErrPending while a long copy continues: a retry joins it.
	Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error)
	// DeleteSnapshots removes a set: a single snapshot, or a group. It succeeds if the set does not
	// exist.
	DeleteSnapshots(ctx context.Context, id volume.ID) error
	// Snapshots reads the record of a set (ErrNotFound, ErrDamaged).
	Snapshots(ctx context.Context, id volume.ID) (volume.SnapshotSet, error)
	// ListSnapshots lists snapshots, including those of groups, as List lists volumes, with the
	// same order of pools.
	ListSnapshots(ctx context.Context, after volume.ID, limit int) (snapshots []volume.Snapshot, more bool, err error)
}

// LiveSnapshotter is implemented by a Snapshotter that does not create snapshots of all its volumes in pools of a node while they are in
// use. The backend locks such a volume while it is sent (Transferrer).
type LiveSnapshotter interface {
	Snapshotter
	// LiveSnapshots is LiveSnapshots for a volume of this backend. It returns true if the volume cannot be examined.
	LiveSnapshots(v volume.Volume) bool
}

// LiveSnapshots reports whether snapshots of a volume in a pool of a node can be created while it is in use.
func LiveSnapshots(b Backend, v volume.Volume) bool {
	if l, ok := b.(LiveSnapshotter); ok {
		return l.LiveSnapshots(v)
	}
	_, ok := b.(Snapshotter)
	return ok
}

// Cloner is implemented by backends that copy volumes but do not support snapshots. A Snapshotter copies
// volumes and snapshots.
type Cloner interface {
	// CheckSource refuses a source that cannot be copied (ErrInvalid).
	CheckSource(s volume.Source) error
}

// ChangeTracker lists the allocated ranges of a snapshot, and the changed ranges between two
// snapshots.
type ChangeTracker interface {
	// Allocated yields, in order, the ranges of a snapshot that contain data, beginning at the
	// offset from, in bytes.
	Allocated(ctx context.Context, s volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
	// Changed yields the ranges in which a snapshot may differ from an older one of the same volume.
	Changed(ctx context.Context, older, newer volume.Snapshot, from int64) iter.Seq2[clone.Range, error]
}

// Thawer is implemented by backends that freeze filesystems for a short time during a snapshot.
type Thawer interface {
	// Thaw thaws the filesystems that a killed driver left frozen.
	Thaw(ctx context.Context) error
}
