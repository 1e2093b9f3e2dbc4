package volume

import (
	"maps"
	"regexp"
	"slices"
)

var namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// ValidNamespace reports whether s can be the name of a namespace (RFC 1123 label).
func ValidNamespace(s string) bool { return namespacePattern.MatchString(s) }

// CheckNamespace returns ErrPrecondition unless the volume belongs to the namespace. A volume without a
// namespace in its record belongs to none, because another orchestrator created it: a pod must not get
// access only because it knows the name.
func (v Volume) CheckNamespace(namespace string) error {
	switch v.Namespace {
	case namespace:
		return nil
	case "":
		return Errorf(ErrPrecondition, "volume %s has no namespace in its record, because FlexVolume did not create it: to allow pods of namespace %q to use it, assign it to that namespace with the call assign", v.ID, namespace)
	}
	return Errorf(ErrPrecondition, "volume %s belongs to namespace %q, and the pod is in namespace %q: use another volume, or have an administrator assign it to that namespace with the call assign", v.ID, v.Namespace, namespace)
}

// ParseNamespaceChange returns the namespace in mutable parameters. It returns ErrInvalid for an unknown key or an
// invalid namespace.
func ParseNamespaceChange(in map[string]string) (namespace string, err error) {
	for _, key := range slices.Sorted(maps.Keys(in)) {
		if key != ParamNamespace {
			return "", Errorf(ErrInvalid, "mutable parameter %q is unknown: the known one is %s", key, ParamNamespace)
		}
	}
	namespace = in[ParamNamespace]
	if !ValidNamespace(namespace) {
		return "", Errorf(ErrInvalid, "parameter %s=%q: expected a namespace: 1 to 63 of a-z, 0-9 and -", ParamNamespace, namespace)
	}
	return namespace, nil
}
