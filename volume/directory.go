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

// reserved are the names at the top of a pool that are its own.
var reserved = []string{"volumes", "snapshots", "groups", "archived", "retained", "pool.json", ".trivet", "lost+found"}

// templates are what a subDir may contain, and the key of the provisioner that
// says what each stands for (external-provisioner, --extra-create-metadata).
var templates = map[string]string{
	"${pvc.metadata.name}": ProvisionerPrefix + "pvc/name",
	templateNamespace:      ProvisionerPrefix + "pvc/namespace",
	templatePV:             ProvisionerPrefix + "pv/name",
}

const (
	templateNamespace = "${pvc.metadata.namespace}"
	templatePV        = "${pv.metadata.name}"
)

func templateNames(in map[string]string) map[string]string {
	names := map[string]string{}
	for template, key := range templates {
		if value := in[key]; value != "" {
			names[template] = value
		}
	}
	return names
}

// Directory reads the parameters of directories (ErrInvalid).
func (p Parameters) Directory() (DirectoryParameters, error) {
	d := DirectoryParameters{names: templateNames(p.Values)}
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

// set reads one parameter.
func (d *DirectoryParameters) set(key, value string) (err error) {
	switch key {
	case ParamSubDir:
		d.SubDir = value
	case ParamOnDelete:
		d.OnDelete = OnDelete(value)
		if !slices.Contains([]OnDelete{OnDeleteDelete, OnDeleteArchive, OnDeleteRetain}, d.OnDelete) {
			return Errorf(ErrInvalid, "parameter %s=%q: want %s, %s or %s", key, value, OnDeleteDelete, OnDeleteArchive, OnDeleteRetain)
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

// setMode reads permission bits. With csi-driver-nfs 0 means: leave them.
func (d *DirectoryParameters) setMode(key, value string) error {
	n, err := strconv.ParseUint(value, 8, 16)
	if err != nil || n > 0o7777 {
		return Errorf(ErrInvalid, "parameter %s=%q: want permission bits in octal, such as 0770", key, value)
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

func parseOwner(key, value string) (*uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n == 1<<32-1 { // which chown(2) takes for "leave it"
		return nil, Errorf(ErrInvalid, "parameter %s=%q: want a number from 0 to 4294967294", key, value)
	}
	id := uint32(n)
	return &id, nil
}

// ExpandSubDir puts the names of claim and volume into the template, and checks
// the path that comes out (ErrInvalid). Empty without a template.
func (d DirectoryParameters) ExpandSubDir() (string, error) {
	if d.SubDir == "" {
		return "", nil
	}
	if err := d.checkNamespaces(); err != nil {
		return "", err
	}
	var pairs []string
	for template := range templates {
		if !strings.Contains(d.SubDir, template) {
			continue
		}
		name, given := d.names[template]
		if !given {
			return "", Errorf(ErrInvalid, "parameter %s=%q: nobody says what %s is: run external-provisioner with --extra-create-metadata", ParamSubDir, d.SubDir, template)
		}
		if strings.Contains(name, "/") || name == "." || name == ".." {
			return "", Errorf(ErrInvalid, "parameter %s=%q: %s is %q, which is no name of a directory", ParamSubDir, d.SubDir, template, name)
		}
		pairs = append(pairs, template, name)
	}
	out := strings.NewReplacer(pairs...).Replace(d.SubDir)
	if strings.Contains(out, "${") {
		return "", Errorf(ErrInvalid, "parameter %s=%q: known are ${pvc.metadata.name}, ${pvc.metadata.namespace} and ${pv.metadata.name}", ParamSubDir, d.SubDir)
	}
	return out, CheckSubDir(out)
}

// checkNamespaces refuses a template that can give one retained directory to claims of
// two namespaces. The namespace must be a part of the path by itself: a-b/c and a/b-c
// would otherwise be one name.
func (d DirectoryParameters) checkNamespaces() error {
	if d.OnDelete != OnDeleteRetain || slices.Contains(strings.Split(d.SubDir, "/"), templateNamespace) || strings.Contains(d.SubDir, templatePV) {
		return nil
	}
	return Errorf(ErrInvalid, "parameter %s=%q: with %s=%s claims of several namespaces would share the directory: make %s a part of the path by itself, as in %[5]s/${pvc.metadata.name}, or use %[6]s; a directory that namespaces do share is a static volume",
		ParamSubDir, d.SubDir, ParamOnDelete, OnDeleteRetain, templateNamespace, templatePV)
}

// CheckSubDir refuses (ErrInvalid) what cannot be the path of a volume's directory
// in its pool: it stays in the pool, is not the pool's own, and is one line.
func CheckSubDir(s string) error {
	first, _, _ := strings.Cut(s, "/")
	parts := strings.Split(s, "/")
	switch {
	case s == "" || path.Clean(s) != s || path.IsAbs(s) || slices.Contains(parts, "..") || s == ".":
		return Errorf(ErrInvalid, "%s %q: want a relative path without . and .. and empty parts", ParamSubDir, s)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return Errorf(ErrInvalid, "%s %q: want a path without control characters", ParamSubDir, s)
	case len(s) > MaxSubDir || slices.ContainsFunc(parts, func(p string) bool { return len(p) > maxComponent }):
		return Errorf(ErrInvalid, "%s of %d bytes: at most %d are allowed, and %d between two slashes", ParamSubDir, len(s), MaxSubDir, maxComponent)
	case slices.Contains(reserved, first):
		return Errorf(ErrInvalid, "%s %q: %s is the pool's own: use another directory", ParamSubDir, s, first)
	}
	return nil
}
