package backend

import (
	"context"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Backend makes and presents the volumes of one kind. Errors are those of
// package volume. Mutating calls for one volume come one at a time.
type Backend interface {
	// Name is what StorageClasses and volume IDs call it.
	Name() string

	// Create makes a volume, or returns the one that is there if it is what
	// spec asks for (ErrIncompatible if not). What it returns is durable.
	Create(ctx context.Context, spec volume.Spec) (volume.Volume, error)
	// Delete removes a volume. It is no error if there is none; it is
	// ErrPrecondition while the volume is controller-published, ErrInUse while a
	// device or a program of this node has it.
	Delete(ctx context.Context, id volume.ID) error
	// Get reads a volume's record (ErrNotFound, ErrDamaged).
	Get(ctx context.Context, id volume.ID) (volume.Volume, error)
	// List returns up to limit volumes in a stable order, those that come after
	// one (the zero ID: all), and whether there are more. Of a volume whose record
	// cannot be read it has the ID alone.
	List(ctx context.Context, after volume.ID, limit int) (volumes []volume.Volume, more bool, err error)
	// Capacity tells what could still be made with these parameters.
	Capacity(ctx context.Context, q CapacityQuery) (Capacity, error)
	// Supports tells whether volumes of this kind can have the capability at
	// all (ErrInvalid).
	Supports(c volume.Capability) error

	// Attach makes the volume available on this node: formatted, checked, bound to a
	// device. The caller mounts the source, if it is no raw device, and closes it.
	Attach(ctx context.Context, v volume.Volume) (mount.Source, error)
	// Present finds the source of the volume as it is on this node now; ok is false if
	// there is none. A directory is always present. If the record of v cannot be read, its
	// ID is enough to recognise the mounts of the volume.
	Present(ctx context.Context, v volume.Volume) (source mount.Source, ok bool, err error)
	// Detach undoes Attach, and returns when that is done (ErrPrecondition if something
	// still uses the volume). It is called when the volume has no mounts any more.
	Detach(ctx context.Context, v volume.Volume) error
}

// CapacityQuery is what GetCapacity asks.
type CapacityQuery struct {
	Parameters volume.Parameters
	// FSType and Block are as in the capabilities asked about.
	FSType string
	Block  bool
}

// Capacity is what could still be made, in bytes.
type Capacity struct {
	Available int64
	// Max and Min bound the size of one volume.
	Max, Min int64
}

// Publication says where and how a volume is controller-published.
type Publication struct {
	Node     string
	ReadOnly bool
	// MultiNode: other nodes may have the volume at once.
	MultiNode bool
}

// Publisher records where volumes are controller-published.
type Publisher interface {
	// Publish records a publication. ErrIncompatible if there is another one for the
	// node, ErrPrecondition if another node has the volume and they exclude each
	// other.
	Publish(ctx context.Context, v volume.Volume, p Publication) error
	// Unpublish takes it back; an empty node means all nodes.
	Unpublish(ctx context.Context, id volume.ID, node string) error
	// PublishedNodes lists where v is published.
	PublishedNodes(ctx context.Context, v volume.Volume) ([]string, error)
	// PublishedCount is the number of published volumes of this backend in pools of
	// this node.
	PublishedCount() int
}

// Expander grows volumes.
type Expander interface {
	// Expand grows what is behind the volume, or for a directory what was promised
	// to it, to at least r.Required and returns the volume as it is then. One that is
	// large enough is left as it is. ErrOutOfRange if there is no room.
	Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error)
	// ResizeDevice makes the device of the volume on this node as large as its storage. It
	// is cheap if nothing changed. A directory has no device.
	ResizeDevice(ctx context.Context, v volume.Volume) error
}

// NamespaceSetter records the namespace that a volume of FlexVolume belongs to.
type NamespaceSetter interface {
	// SetNamespace is ErrPrecondition if another namespace than change requires is on record.
	SetNamespace(ctx context.Context, id volume.ID, change volume.NamespaceChange) error
}

// EnforcedHard, EnforcedCooperative and EnforcedNot say how volumes are kept from
// outgrowing their capacity: by what they are made of, by a quota that somebody with
// enough rights gets around, or by nothing.
const (
	EnforcedHard        = "hard"
	EnforcedCooperative = "cooperative"
	EnforcedNot         = "false"
)

// Limiter tells how volumes are kept to their capacity; those of other backends are
// by what they are made of.
type Limiter interface {
	// Enforced is what a volume's context says of it, for good. Of a volume whose
	// record cannot be read the ID is enough.
	Enforced(v volume.Volume) string
}

// Meter measures volumes that are a part of a filesystem.
type Meter interface {
	// Measure tells what a volume has and uses; ok is false where only its filesystem
	// tells.
	Measure(ctx context.Context, v volume.Volume) (m Measure, ok bool, err error)
}

// Measure is the size of a volume and what is used of it; 0 inodes: any number.
type Measure struct {
	Bytes, UsedBytes   int64
	Inodes, UsedInodes int64
}

// BlockProvider makes read-only devices of raw volumes: a read-only bind mount of a device
// node does not refuse writes.
type BlockProvider interface {
	// ReadOnlyDevice returns the read-only device of the volume, and makes it if there is
	// none.
	ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error)
	// PresentReadOnly returns that device; ok is false if there is none.
	PresentReadOnly(ctx context.Context, v volume.Volume) (device mount.BlockDevice, ok bool, err error)
	// ReleaseReadOnly frees that device, unless it is still published.
	ReleaseReadOnly(ctx context.Context, v volume.Volume) error
}

// StaticProvider serves volumes that an administrator describes and the driver did
// not create: they have no record.
type StaticProvider interface {
	// StaticVolume reads a volume from its context; ok is false if the context is of
	// no such volume. Bad values are ErrInvalid.
	StaticVolume(id string, context map[string]string) (v volume.Volume, ok bool, err error)
	// StaticAt returns the source of the static volume that is mounted at path; nil if
	// there is none. Calls that unmount a static volume bring its path alone.
	StaticAt(path string) (mount.Source, error)
}

// OwnershipVerifier has volumes that this node can lose while they are attached.
type OwnershipVerifier interface {
	// VerifyOwnership returns nil if this node has owned the volume since it was attached.
	// Otherwise the volume has to be unstaged (ErrPrecondition).
	VerifyOwnership(ctx context.Context, v volume.Volume) error
}

// HealthChecker finds what is wrong with a volume.
type HealthChecker interface {
	// Health looks at what lies in the pool.
	Health(ctx context.Context, v volume.Volume) []Condition
	// StorageHealth looks at the pools of the backend; others may report the same of
	// them.
	StorageHealth(ctx context.Context) []Condition
}

// OutageReporter has volumes whose pools can be unavailable for long, as when a server is
// silent.
type OutageReporter interface {
	// Outage returns the conditions of a volume that cannot be looked up because of err;
	// none if err is the answer.
	Outage(id volume.ID, err error) []Condition
}

// Severity is how bad a condition is, after CSI's VolumeHealthErrorType.
type Severity int

const (
	// Degraded means: it works, not as it should.
	Degraded Severity = iota + 1
	// Inaccessible means: it cannot be used here and now.
	Inaccessible
	// DataLoss means: data is known to be lost, or most likely is.
	DataLoss
)

// Condition is one thing that is wrong.
type Condition struct {
	Severity Severity
	Reason   Reason
	Message  string
	// Pool is the pool of which all volumes have the condition; empty: the volume alone.
	Pool string
}

// PoolUnavailable is what it means for a volume that its pool is not to be had.
func PoolUnavailable(err error) Condition {
	return Condition{Severity: Inaccessible, Reason: ReasonPoolUnavailable, Message: err.Error()}
}
