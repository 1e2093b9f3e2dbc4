package volume

import (
	"maps"
	"slices"
	"strings"
)

// The StorageClass parameters this driver knows.
const (
	ParamBackend     = "backend"
	ParamPool        = "pool"
	ParamFSType      = "csi.storage.k8s.io/fstype"
	ParamAllocation  = "allocation"
	ParamMkfsOptions = "mkfsOptions"
)

// provisionerPrefix marks keys that external-provisioner keeps for itself; it
// passes some of them on (PVC and PV names, and in GetCapacity all of them).
const provisionerPrefix = "csi.storage.k8s.io/"

var knownParameters = []string{ParamBackend, ParamPool, ParamFSType, ParamAllocation, ParamMkfsOptions}

// Allocation says when an image gets its disk space.
type Allocation string

const (
	// Thin means: as it is written.
	Thin Allocation = "thin"
	// Thick means: all of it when the volume is made, for good.
	Thick Allocation = "thick"
)

// Parameters are the parameters of a StorageClass, checked and with their
// defaults.
type Parameters struct {
	Backend    string
	Pool       string // empty: the backend's first pool
	FSType     string // empty: not given here
	Allocation Allocation
	// MkfsOptions are words for mkfs; the backend checks them against its
	// closed list.
	MkfsOptions []string
}

// ParseParameters reads StorageClass parameters. An unknown key, or a value
// that its key does not take, is ErrInvalid.
func ParseParameters(in map[string]string) (Parameters, error) {
	p := Parameters{Backend: "loop", Allocation: Thin}
	for _, key := range slices.Sorted(maps.Keys(in)) {
		if err := p.set(key, in[key]); err != nil {
			return Parameters{}, err
		}
	}
	return p, nil
}

func (p *Parameters) set(key, value string) error {
	switch key {
	case ParamBackend:
		if !backendPattern.MatchString(value) {
			return Errorf(ErrInvalid, "parameter %s=%q: want the name of a backend, for example loop", key, value)
		}
		p.Backend = value
	case ParamPool:
		if !ValidPoolName(value) {
			return Errorf(ErrInvalid, "parameter %s=%q: a pool's name is 1 to 40 of a-z, 0-9 and -", key, value)
		}
		p.Pool = value
	case ParamFSType:
		if value != "" && !ValidFSType(value) {
			return Errorf(ErrInvalid, "parameter %s=%q: want one of %s", key, value, strings.Join(FSTypes, ", "))
		}
		p.FSType = value
	case ParamAllocation:
		if value != string(Thin) && value != string(Thick) {
			return Errorf(ErrInvalid, "parameter %s=%q: want %s or %s", key, value, Thin, Thick)
		}
		p.Allocation = Allocation(value)
	case ParamMkfsOptions:
		p.MkfsOptions = strings.Fields(value)
	default:
		if !strings.HasPrefix(key, provisionerPrefix) {
			return Errorf(ErrInvalid, "parameter %q is unknown: the known ones are %s", key, strings.Join(knownParameters, ", "))
		}
	}
	return nil
}
