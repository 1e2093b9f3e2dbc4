package volume

import "strings"

// The keys of StorageClass parameters.
const (
	ParamBackend     = "backend"
	ParamPool        = "pool"
	ParamFSType      = "csi.storage.k8s.io/fstype"
	ParamMkfsOptions = "mkfsOptions"
	ParamServer      = "server"
	ParamShare       = "share"
	// ParamExport is another word for ParamShare: what servers and pools call it.
	ParamExport   = "export"
	ParamSubDir   = "subDir"
	ParamOnDelete = "onDelete"
	ParamMode     = "mode"
	// ParamMountPermissions is what csi-driver-nfs calls the mode.
	ParamMountPermissions = "mountPermissions"
	ParamUID              = "uid"
	ParamGID              = "gid"
)

// Keys of calls that FlexVolume makes; no StorageClass needs them.
const (
	// ParamNamespace is the only namespace whose pods FlexVolume mounts a volume for: in the
	// parameters of CreateVolume and ValidateVolumeCapabilities, and in the mutable
	// parameters of ControllerModifyVolume.
	ParamNamespace = "csi.trivet.dev/namespace"
	// ParamNamespaceBefore is the namespace that must be on record when
	// ControllerModifyVolume changes it; if absent, any may be.
	ParamNamespaceBefore = "csi.trivet.dev/namespace-before"
)

// ProvisionerPrefix begins the keys that external-provisioner uses itself. It passes some of
// them on (names of the claim and the volume; in GetCapacity all of them).
const ProvisionerPrefix = "csi.storage.k8s.io/"

// OnDelete says what becomes of a directory whose volume is deleted.
type OnDelete string

const (
	// OnDeleteDelete removes it.
	OnDeleteDelete OnDelete = "delete"
	// OnDeleteArchive renames it, and keeps it.
	OnDeleteArchive OnDelete = "archive"
	// OnDeleteRetain leaves it where it is.
	OnDeleteRetain OnDelete = "retain"
)

// Parameters are the parameters of a StorageClass, as a kind of volume accepts them.
type Parameters struct {
	Backend string
	// Pool is the pool's name; empty: the backend's first pool. It stands for server and
	// share where the class gives those (DirectPool).
	Pool string
	// Values are all parameters by key, with the kind's defaults, and what the provisioner
	// adds.
	Values map[string]string
	// Namespace is ParamNamespace.
	Namespace string
}

// Get is the value of a parameter; empty if the class does not give it and the kind has no
// default.
func (p Parameters) Get(key string) string { return p.Values[key] }

// MkfsOptions are words for mkfs; the backend checks them against its closed list.
func (p Parameters) MkfsOptions() []string { return strings.Fields(p.Get(ParamMkfsOptions)) }

// DirectoryParameters are those of volumes that are directories.
type DirectoryParameters struct {
	// SubDir is a template (see ExpandSubDir) of the directory's path in the pool;
	// empty: in the volume's own folder.
	SubDir   string
	OnDelete OnDelete // empty: delete
	// Mode are the permission bits of the directory; nil: those of the backend.
	Mode *uint32
	// UID and GID own the directory; nil: root.
	UID, GID *uint32
	// names are what templates stand for.
	names map[string]string
}
