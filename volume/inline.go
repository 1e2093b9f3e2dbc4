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

// InlineID tells whether s can be the ID of an inline volume: one that a pod describes
// itself, and that lives as long as the pod. It is also the name of the volume's folder,
// which no other volume can have: theirs are shorter, and ParseID takes no such one. So
// no call but those of the kubelet for that ID reaches the volume.
func InlineID(s string) bool { return inlinePattern.MatchString(s) }

// ephemeralKey says in a volume context that a pod describes the volume (Kubernetes,
// CSIDriver, podInfoOnMount).
const ephemeralKey = kubernetesPrefix + "ephemeral"

// kubernetesPrefix begins the keys that the kubelet adds to a volume context, over
// those of the pod.
const kubernetesPrefix = "csi.storage.k8s.io/"

// IsInline tells whether a volume context is of an inline volume.
func IsInline(context map[string]string) bool { return context[ephemeralKey] == "true" }

// The attributes of an inline volume, beside ParamPool.
const (
	AttrSize   = "size"
	AttrFSType = "fsType"
	AttrMedium = "medium"
)

// mediumMemory is the one value of AttrMedium.
const mediumMemory = "memory"

var knownAttributes = []string{AttrSize, ParamPool, AttrFSType, AttrMedium}

// Inline is an inline volume as its pod describes it: an image, or in memory. A directory
// has no size that holds whoever is in the pod.
type Inline struct {
	// Size is in bytes.
	Size int64
	// Memory: it is in the node's memory, and all below is empty but Pod.
	Memory bool
	Pool   string // empty: the first that inline volumes may be in
	FSType string // empty: not given here
	Pod    Pod
}

// Pod is whose an inline volume is, where the orchestrator says so.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Ephemeral is what only the record of an inline volume has.
type Ephemeral struct {
	// Target is where it is mounted.
	Target string `json:"target"`
	Pod    Pod    `json:"pod"`
}

// ParseInline reads the context of an inline volume. Whoever may make a pod writes it:
// what is not in the closed list of attributes, or no value of its key, is ErrInvalid.
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
			return Inline{}, Errorf(ErrInvalid, "volume_context.%s=%q: the volume is in memory: remove it", key, value)
		}
	}
	return in, nil
}

func (in *Inline) set(key, value string) (err error) {
	wrong := func(want string) error {
		return Errorf(ErrInvalid, "volume_context.%s=%.80q: want %s", key, value, want)
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
	case kubernetesPrefix + "pod.namespace":
		in.Pod.Namespace = value
	case kubernetesPrefix + "pod.name":
		in.Pod.Name = value
	case kubernetesPrefix + "pod.uid":
		in.Pod.UID = value
	default:
		if !strings.HasPrefix(key, kubernetesPrefix) {
			return Errorf(ErrInvalid, "volume_context.%.80q is unknown: an inline volume has the volumeAttributes %s", key, strings.Join(knownAttributes, ", "))
		}
	}
	return nil
}

// Class are the StorageClass parameters that mean the same, for the kind of a name.
func (in Inline) Class(kind string) map[string]string {
	class := map[string]string{ParamBackend: kind}
	if in.Pool != "" {
		class[ParamPool] = in.Pool
	}
	if in.FSType != "" {
		class[ParamFSType] = in.FSType
	}
	return class
}

// Spec is a request for the volume: id is the kubelet's ID, c and target say how and where
// it is mounted, p are the parsed parameters of Class.
func (in Inline) Spec(id, target string, c Capability, p Parameters) Spec {
	return Spec{
		CoName: id, Capacity: Range{Required: in.Size}, Capabilities: []Capability{c},
		Parameters: p, Ephemeral: &Ephemeral{Target: target, Pod: in.Pod},
	}
}
