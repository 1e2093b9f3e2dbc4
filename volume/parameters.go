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
	// ParamExport is a synonym of ParamShare.
	ParamExport   = "export"
	ParamSubDir   = "subDir"
	ParamOnDelete = "onDelete"
	ParamMode     = "mode"
	// ParamMountPermissions is the name of ParamMode in csi-driver-nfs.
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

// ProvisionerPrefix begins the keys that Kubernetes adds: the provisioner to parameters (names of the claim
// and the volume, in GetCapacity all of its own keys), the kubelet to a volume context, where they
// replace keys that a pod gives.
const ProvisionerPrefix = "csi.storage.k8s.io/"

// OnDelete is the treatment of a directory whose volume is deleted.
type OnDelete string

func (o OnDelete) valid() bool {
	return o == OnDeleteDelete || o == OnDeleteArchive || o == OnDeleteRetain
}

const (
	// OnDeleteDelete removes it.
	OnDeleteDelete OnDelete = "delete"
	// OnDeleteArchive renames and keeps it.
	OnDeleteArchive OnDelete = "archive"
	// OnDeleteRetain keeps it at its path.
	OnDeleteRetain OnDelete = "retain"
)

// Parameters are the parameters of a StorageClass, as a kind of volume accepts them.
type Parameters struct {
	Backend string
	// Pool is the pool's name; empty: the backend's first pool. If the class gives server and share,
	// it is their DirectPool.
	Pool string
	// Values are all parameters by key, with the kind's defaults and the provisioner's keys.
	Values map[string]string
	// Namespace is ParamNamespace.
	Namespace string
}

// Get is the value of a parameter; empty if the class does not give it and the kind has no
// default.
func (p Parameters) Get(key string) string { return p.Values[key] }

// MkfsOptions are words for mkfs; the backend checks them against its closed list.
func (p Parameters) MkfsOptions() []string { return strings.Fields(p.Get(ParamMkfsOptions)) }

// DirectoryParameters are the parameters of volumes that are directories.
type DirectoryParameters struct {
	// SubDir is the directory's path in the pool, which may contain variables (see ExpandSubDir);
	// empty: the directory is in the volume's folder.
	SubDir   string
	OnDelete OnDelete // empty: delete
	// Mode is the permission bits of the directory; nil: the backend's default.
	Mode *uint32
	// UID and GID own the directory; nil: root.
	UID, GID *uint32
	// values are all parameters, which have the values of the variables in SubDir.
	values map[string]string
}
