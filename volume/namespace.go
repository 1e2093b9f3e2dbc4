package volume

import (
	"maps"
	"regexp"
	"slices"
)

var namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// ValidNamespace tells whether s can be the name of a namespace (RFC 1123 label).
func ValidNamespace(s string) bool { return namespacePattern.MatchString(s) }

func checkNamespace(key, value string) error {
	if !ValidNamespace(value) {
		return Errorf(ErrInvalid, "parameter %s=%q: want a namespace: 1 to 63 of a-z, 0-9 and -", key, value)
	}
	return nil
}

// CheckNamespace refuses the volume to the pods of a namespace that it does not belong to
// (ErrPrecondition). A volume without a namespace on record belongs to none: it was made
// by another orchestrator, whose users must not lose it to whoever knows its name.
func (v Volume) CheckNamespace(namespace string) error {
	switch v.Namespace {
	case namespace:
		return nil
	case "":
		return Errorf(ErrPrecondition, "volume %s has no namespace on record, because FlexVolume did not create it: if pods of namespace %q may have it, an administrator gives it to that namespace with the call assign", v.ID, namespace)
	}
	return Errorf(ErrPrecondition, "volume %s belongs to namespace %q, and the pod is in namespace %q: use another volume, or have an administrator give it to that namespace with the call assign", v.ID, v.Namespace, namespace)
}

// NamespaceChange is what ControllerModifyVolume changes.
type NamespaceChange struct {
	Namespace string
	// Before is the namespace that must be on record; nil: any may be.
	Before *string
}

// ParseNamespaceChange reads mutable parameters (ErrInvalid).
func ParseNamespaceChange(in map[string]string) (c NamespaceChange, err error) {
	for _, key := range slices.Sorted(maps.Keys(in)) {
		value := in[key]
		switch key {
		case ParamNamespace:
			c.Namespace = value
		case ParamNamespaceBefore:
			c.Before = &value
		default:
			return c, Errorf(ErrInvalid, "mutable parameter %q is unknown: the known ones are %s and %s", key, ParamNamespace, ParamNamespaceBefore)
		}
	}
	return c, checkNamespace(ParamNamespace, c.Namespace)
}

// Apply returns the volume with the namespace changed (ErrPrecondition if another one than
// Before is on record).
func (c NamespaceChange) Apply(v Volume) (Volume, error) {
	if c.Before != nil && *c.Before != v.Namespace {
		return v, Errorf(ErrPrecondition, "volume %s belongs to namespace %q, and is to be given away only if it belongs to %q", v.ID, v.Namespace, *c.Before)
	}
	v.Namespace = c.Namespace
	return v, nil
}
