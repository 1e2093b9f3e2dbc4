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

// ParamOnNodeLoss is the StorageClass parameter that says what happens to the claim of a volume whose node no longer
// exists. It is also a key of the volume context.
const ParamOnNodeLoss = "onNodeLoss"

const (
	// NodeLossKeep keeps the claim and its PersistentVolume.
	NodeLossKeep = "keep"
	// NodeLossRelease deletes the claim and its PersistentVolume.
	NodeLossRelease = "release"
)

// Keys that only FlexVolume sets in its calls; no StorageClass needs them.
const (
	// ParamNamespace is the namespace to whose pods FlexVolume gives the volume. It is a
	// parameter of CreateVolume and ValidateVolumeCapabilities, and a mutable parameter of
	// ControllerModifyVolume.
	ParamNamespace = "csi.trivet.dev/namespace"
)

// ProvisionerPrefix begins the keys that Kubernetes adds. The provisioner adds the names of the claim and
// the volume to the parameters of CreateVolume, and leaves all of its keys in those of GetCapacity. The
// kubelet adds keys to a volume context, and replaces those that a pod gives.
const ProvisionerPrefix = "csi.storage.k8s.io/"

// The parameters of CreateVolume in which the provisioner names the claim.
const (
	ParamClaimName      = ProvisionerPrefix + "pvc/name"
	ParamClaimNamespace = ProvisionerPrefix + "pvc/namespace"
)

// OnDelete determines what happens to a directory when its volume is deleted.
type OnDelete string

func (o OnDelete) valid() bool {
	return o == OnDeleteDelete || o == OnDeleteArchive || o == OnDeleteRetain
}

const (
	// OnDeleteDelete removes the directory.
	OnDeleteDelete OnDelete = "delete"
	// OnDeleteArchive keeps the directory under another name.
	OnDeleteArchive OnDelete = "archive"
	// OnDeleteRetain keeps the directory at its path.
	OnDeleteRetain OnDelete = "retain"
)

// Parameters are the parameters of a StorageClass, as a kind of volume accepts them.
type Parameters struct {
	Backend string
	// Pool is the pool's name. If it is empty, the backend's first pool is used. For a class with server
	// and share it is the name that DirectPool returns.
	Pool string
	// Values are all parameters by key, including the kind's defaults and the provisioner's keys.
	Values map[string]string
	// Namespace is the value of ParamNamespace.
	Namespace string
}

// Get returns the value of a parameter. The value is empty if the class does not set the parameter and the
// kind has no default.
func (p Parameters) Get(key string) string { return p.Values[key] }

// MkfsOptions are words for mkfs; the backend checks them against its closed list.
func (p Parameters) MkfsOptions() []string { return strings.Fields(p.Get(ParamMkfsOptions)) }

// DirectoryParameters are the parameters of volumes that are directories.
type DirectoryParameters struct {
	// SubDir is the directory's path in the pool, which may contain variables (see ExpandSubDir). If
	// it is empty, the directory is in the volume's folder.
	SubDir   string
	OnDelete OnDelete // empty means OnDeleteDelete
	// Mode is the permission bits of the directory. If it is nil, the backend's default applies.
	Mode *uint32
	// UID and GID own the directory. nil means root.
	UID, GID *uint32
	// values are all parameters. They contain the values of the variables in SubDir.
	values map[string]string
}
