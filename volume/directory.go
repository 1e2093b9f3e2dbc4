package volume

import (
	"path"
	"slices"
	"strconv"
	"strings"
)

// MaxSubDir is the longest path of a directory in its pool, in bytes.
const MaxSubDir = 1024

// maxComponent is the longest file name, in bytes (path_resolution(7)).
const maxComponent = 255

// reserved are the names in the top directory of a pool that only the driver uses.
var reserved = []string{"volumes", "snapshots", "groups", "archived", "retained", "pool.json", ".trivet", "lost+found"}

// subDirVariables maps each variable that a subDir may contain to the parameter with its value
// (external-provisioner, --extra-create-metadata).
var subDirVariables = map[string]string{
	"${pvc.metadata.name}": ParamClaimName,
	variableNamespace:      ParamClaimNamespace,
	variablePV:             ProvisionerPrefix + "pv/name",
}

const (
	variableNamespace = "${pvc.metadata.namespace}"
	variablePV        = "${pv.metadata.name}"
)

// Directory parses the parameters of directories. It returns ErrInvalid for an invalid value.
func (p Parameters) Directory() (DirectoryParameters, error) {
	d := DirectoryParameters{values: p.Values}
	for _, key := range []string{ParamSubDir, ParamOnDelete, ParamMode, ParamMountPermissions, ParamUID, ParamGID} {
		value, given := p.Values[key]
		if !given {
			continue
		}
		if err := d.set(key, value); err != nil {
			return DirectoryParameters{}, err
		}
	}
	return d, nil
}

// set parses one parameter.
func (d *DirectoryParameters) set(key, value string) (err error) {
	switch key {
	case ParamSubDir:
		d.SubDir = value
	case ParamOnDelete:
		d.OnDelete = OnDelete(value)
		if !d.OnDelete.valid() {
			return Errorf(ErrInvalid, "parameter %s=%q: expected %s, %s or %s", key, value, OnDeleteDelete, OnDeleteArchive, OnDeleteRetain)
		}
	case ParamMode, ParamMountPermissions:
		err = d.setMode(key, value)
	case ParamUID:
		d.UID, err = parseOwner(key, value)
	case ParamGID:
		d.GID, err = parseOwner(key, value)
	}
	return err
}

// setMode parses permission bits. As in csi-driver-nfs, mountPermissions=0 does not change the mode.
func (d *DirectoryParameters) setMode(key, value string) error {
	n, err := strconv.ParseUint(value, 8, 16)
	if err != nil || n > maxMode {
		return Errorf(ErrInvalid, "parameter %s=%q: expected permission bits in octal, such as 0770", key, value)
	}
	if n == 0 && key == ParamMountPermissions {
		return nil
	}
	mode := uint32(n)
	if d.Mode != nil && *d.Mode != mode {
		return Errorf(ErrInvalid, "parameters %s and %s differ: give one", ParamMode, ParamMountPermissions)
	}
	d.Mode = &mode
	return nil
}

// parseOwner parses a user or group ID.
func parseOwner(key, value string) (*uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n == 1<<32-1 { // chown(2) does not change an ID to this value
		return nil, Errorf(ErrInvalid, "parameter %s=%q: expected a number from 0 to 4294967294", key, value)
	}
	id := uint32(n)
	return &id, nil
}

// ExpandSubDir replaces the variables in SubDir, and checks the resulting path (ErrInvalid). The result
// is empty if SubDir is empty.
func (d DirectoryParameters) ExpandSubDir() (string, error) {
	if d.SubDir == "" {
		return "", nil
	}
	if err := d.checkNamespaces(); err != nil {
		return "", err
	}
	var pairs []string
	for variable, key := range subDirVariables {
		if !strings.Contains(d.SubDir, variable) {
			continue
		}
		name := d.values[key]
		if name == "" {
			return "", Errorf(ErrInvalid, "parameter %s=%q: the request has no value for %s: run external-provisioner with --extra-create-metadata", ParamSubDir, d.SubDir, variable)
		}
		if strings.Contains(name, "/") || name == "." || name == ".." {
			return "", Errorf(ErrInvalid, "parameter %s=%q: %s is %q, which is not a valid directory name", ParamSubDir, d.SubDir, variable, name)
		}
		pairs = append(pairs, variable, name)
	}
	out := strings.NewReplacer(pairs...).Replace(d.SubDir)
	if strings.Contains(out, "${") {
		return "", Errorf(ErrInvalid, "parameter %s=%q: it contains an unknown variable: the known ones are ${pvc.metadata.name}, ${pvc.metadata.namespace} and ${pv.metadata.name}", ParamSubDir, d.SubDir)
	}
	return out, CheckSubDir(out)
}

// checkNamespaces refuses a SubDir that can give one retained directory to claims of two namespaces. The
// namespace must be a complete component of the path. Otherwise claim c of namespace a-b, and claim b-c of
// namespace a, could both get the directory a-b-c.
func (d DirectoryParameters) checkNamespaces() error {
	if d.OnDelete != OnDeleteRetain || slices.Contains(strings.Split(d.SubDir, "/"), variableNamespace) || strings.Contains(d.SubDir, variablePV) {
		return nil
	}
	return Errorf(ErrInvalid, "parameter %s=%q: with %s=%s claims of several namespaces would share the directory: make %s a complete component of the path, as in %[5]s/${pvc.metadata.name}, or use %[6]s; for a directory that namespaces share on purpose, create a static volume",
		ParamSubDir, d.SubDir, ParamOnDelete, OnDeleteRetain, variableNamespace, variablePV)
}

// CheckSubDir refuses (ErrInvalid) a path that is not inside the pool, that is reserved for the driver, that
// is too long, or that contains control characters.
func CheckSubDir(s string) error {
	first, _, _ := strings.Cut(s, "/")
	parts := strings.Split(s, "/")
	switch {
	case s == "" || path.Clean(s) != s || path.IsAbs(s) || slices.Contains(parts, "..") || s == ".":
		return Errorf(ErrInvalid, "%s %q: expected a relative path without . and .. and empty parts", ParamSubDir, s)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return Errorf(ErrInvalid, "%s %q: expected a path without control characters", ParamSubDir, s)
	case len(s) > MaxSubDir || slices.ContainsFunc(parts, func(p string) bool { return len(p) > maxComponent }):
		return Errorf(ErrInvalid, "%s of %d bytes: at most %d bytes are allowed, and %d in each component of the path", ParamSubDir, len(s), MaxSubDir, maxComponent)
	case slices.Contains(reserved, first):
		return Errorf(ErrInvalid, "%s %q: %s is used by the pool itself: use another directory", ParamSubDir, s, first)
	}
	return nil
}
