package volume

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

// inlinePattern is the form of the IDs that a kubelet makes for inline volumes
// (Kubernetes, pkg/volume/csi, makeVolumeHandle).
var inlinePattern = regexp.MustCompile(`^csi-[0-9a-f]{64}$`)

// InlineID reports whether s can be the ID of an inline volume: a volume that a pod describes, and that
// exists as long as the pod. The ID is also the name of the volume's folder. The folder names of other
// volumes are shorter, and ParseID refuses inline IDs, so calls for other volumes cannot reach an inline
// volume.
func InlineID(s string) bool { return inlinePattern.MatchString(s) }

// ephemeralKey is "true" in the volume context of an inline volume (Kubernetes, CSIDriver,
// podInfoOnMount).
const ephemeralKey = ProvisionerPrefix + "ephemeral"

// IsInline reports whether a volume context is of an inline volume.
func IsInline(context map[string]string) bool { return context[ephemeralKey] == "true" }

// The attributes of an inline volume, beside ParamPool.
const (
	AttrSize   = "size"
	AttrFSType = "fsType"
	AttrMedium = "medium"
)

// mediumMemory is the only value of AttrMedium.
const mediumMemory = "memory"

var knownAttributes = []string{AttrSize, ParamPool, AttrFSType, AttrMedium}

// Inline is an inline volume as its pod describes it: a volume with a filesystem in a pool, or a filesystem in memory.
// Directories are not supported, because not every filesystem can enforce their size.
type Inline struct {
	// Size is in bytes.
	Size int64
	// Memory is true if the volume is in the node's memory. Pool and FSType are then empty.
	Memory bool
	// Pool is the name of a pool. If it is empty, the first pool that allows inline volumes is used.
	Pool string
	// FSType is empty if the pod does not request a filesystem.
	FSType string
	Pod    Pod
}

// Pod identifies the pod of an inline volume. Fields that the orchestrator does not give are empty.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Ephemeral is the part of the record that only inline volumes have.
type Ephemeral struct {
	// Target is the path where the volume is mounted.
	Target string `json:"target"`
	Pod    Pod    `json:"pod"`
}

// ParseInline reads the context of an inline volume. Every user who can create a pod can write it, so an
// attribute that is not in the closed list, or an invalid value, is ErrInvalid.
func ParseInline(context map[string]string) (Inline, error) {
	var in Inline
	for _, key := range slices.Sorted(maps.Keys(context)) {
		if err := in.set(key, context[key]); err != nil {
			return Inline{}, err
		}
	}
	if in.Size == 0 {
		return Inline{}, Errorf(ErrInvalid, "volume_context.%s is missing: give the volume's size in its volumeAttributes, such as 1Gi", AttrSize)
	}
	for _, key := range []string{ParamPool, AttrFSType} {
		if value, given := context[key]; in.Memory && given {
			return Inline{}, Errorf(ErrInvalid, "volume_context.%s=%q is not possible for a volume in memory: remove the attribute %[1]s", key, value)
		}
	}
	return in, nil
}

// set stores one attribute. It returns ErrInvalid for an unknown key or an invalid value.
func (in *Inline) set(key, value string) (err error) {
	wrong := func(expected string) error {
		return Errorf(ErrInvalid, "volume_context.%s=%.80q: expected %s", key, value, expected)
	}
	switch key {
	case AttrSize:
		if in.Size, err = ParseSize(value); err != nil || in.Size == 0 {
			return wrong("a size above zero: a whole number of bytes, or one with Ki, Mi, Gi or Ti")
		}
	case ParamPool:
		if in.Pool = value; !ValidPoolName(value) {
			return wrong("the name of a pool: 1 to 40 of a-z, 0-9 and -")
		}
	case AttrFSType:
		if in.FSType = value; !ValidFSType(value) {
			return wrong("one of " + strings.Join(FSTypes, ", "))
		}
	case AttrMedium:
		if in.Memory = value == mediumMemory; !in.Memory {
			return wrong(mediumMemory + ", or nothing for a volume in a pool")
		}
	case ProvisionerPrefix + "pod.namespace":
		in.Pod.Namespace = value
	case ProvisionerPrefix + "pod.name":
		in.Pod.Name = value
	case ProvisionerPrefix + "pod.uid":
		in.Pod.UID = value
	default:
		if !strings.HasPrefix(key, ProvisionerPrefix) {
			return Errorf(ErrInvalid, "volume_context.%.80q is unknown: an inline volume has the volumeAttributes %s", key, strings.Join(knownAttributes, ", "))
		}
	}
	return nil
}

// Class returns the equivalent StorageClass parameters for a kind.
func (in Inline) Class(kind string) map[string]string {
	class := map[string]string{ParamBackend: kind, ParamPool: in.Pool, ParamFSType: in.FSType}
	maps.DeleteFunc(class, func(_, value string) bool { return value == "" })
	return class
}

// Spec returns a request for the volume. id is the ID from the kubelet, c and target are the capability and
// the path of the mount, p are the parsed parameters that Class returned.
func (in Inline) Spec(id, target string, c Capability, p Parameters) Spec {
	return Spec{
		CoName: id, Capacity: Range{Required: in.Size}, Capabilities: []Capability{c},
		Parameters: p, Ephemeral: &Ephemeral{Target: target, Pod: in.Pod},
	}
}
