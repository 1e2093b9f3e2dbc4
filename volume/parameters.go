package volume

import (
	"fmt"
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
	ParamWipe             = "wipe"
)

// provisionerPrefix marks keys that external-provisioner keeps for itself; it
// passes some of them on (PVC and PV names, and in GetCapacity all of them).
const provisionerPrefix = "csi.storage.k8s.io/"

var knownParameters = []string{
	ParamBackend, ParamPool, ParamFSType, ParamAllocation, ParamMkfsOptions,
	ParamServer, ParamShare, ParamExport, ParamSubDir, ParamOnDelete, ParamMode, ParamMountPermissions, ParamUID, ParamGID,
	ParamWipe,
}

// The backends that parameters and IDs name.
const (
	BackendLoop  = "loop"
	BackendNFS   = "nfs"
	BackendLocal = "local"
)

// Allocation says when an image gets its disk space.
type Allocation string

const (
	// Thin means: as it is written.
	Thin Allocation = "thin"
	// Thick means: all of it when the volume is made, for good.
	Thick Allocation = "thick"
)

// Wipe says what happens to the data of a disk when its volume is deleted.
type Wipe string

const (
	// WipeDiscard gives the storage back where the disk guarantees zeros afterwards, and
	// overwrites everything where it does not.
	WipeDiscard Wipe = "discard"
	// WipeZero overwrites everything.
	WipeZero Wipe = "zero"
	// WipeNone leaves the data to whoever gets the disk next, and overwrites only what a
	// format is recognised by.
	WipeNone Wipe = "none"
)

func (w Wipe) valid() bool { return w == WipeDiscard || w == WipeZero || w == WipeNone }

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

// Parameters are the parameters of a StorageClass, checked and with their
// defaults.
type Parameters struct {
	Backend string
	// Pool is the pool's name; empty: the backend's first pool. Where the class
	// gives server and share it stands for them (DirectPool).
	Pool       string
	FSType     string // empty: not given here
	Allocation Allocation
	// MkfsOptions are words for mkfs; the backend checks them against its
	// closed list.
	MkfsOptions []string
	Directory   DirectoryParameters
	Wipe        Wipe // empty: discard
}

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

// defaults are what holds where nothing is said.
func defaults() Parameters { return Parameters{Allocation: Thin} }

// ParseParameters reads StorageClass parameters. An unknown key, or a value
// that its key does not take, is ErrInvalid.
func ParseParameters(in map[string]string) (Parameters, error) {
	p := defaults()
	p.Directory.names = templateNames(in)
	for _, key := range slices.Sorted(maps.Keys(in)) {
		if err := p.set(key, in[key]); err != nil {
			return Parameters{}, err
		}
	}
	if err := p.setDirectPool(in); err != nil {
		return Parameters{}, err
	}
	if p.Backend == "" {
		p.Backend = BackendLoop
	}
	if err := p.checkKeys(in); err != nil {
		return Parameters{}, err
	}
	return p, nil
}

// keysOf are the parameters of images and those of directories, by backend.
var keysOf = map[string][]string{
	BackendLoop:  {ParamFSType, ParamAllocation, ParamMkfsOptions},
	BackendNFS:   directoryKeys,
	BackendLocal: append([]string{ParamFSType, ParamMkfsOptions, ParamWipe}, directoryKeys...),
}

var directoryKeys = []string{ParamSubDir, ParamOnDelete, ParamMode, ParamMountPermissions, ParamUID, ParamGID}

// checkKeys refuses parameters that mean nothing to the backend: who gives them
// counts on them.
func (p *Parameters) checkKeys(in map[string]string) error {
	own, known := keysOf[p.Backend]
	for _, key := range slices.Sorted(maps.Keys(in)) {
		if of := backendsWith(key); known && in[key] != "" && len(of) > 0 && !slices.Contains(own, key) {
			return Errorf(ErrInvalid, "parameter %s=%q is of backend %s, this class has backend %s: remove one of them", key, in[key], strings.Join(of, " and "), p.Backend)
		}
	}
	return nil
}

// backendsWith are those that a parameter is of; none for one that all have.
func backendsWith(key string) (of []string) {
	for _, backend := range slices.Sorted(maps.Keys(keysOf)) {
		if slices.Contains(keysOf[backend], key) {
			of = append(of, backend)
		}
	}
	return of
}

// setDirectPool takes server and share together for a pool. A class of
// csi-driver-nfs has them and no backend.
func (p *Parameters) setDirectPool(in map[string]string) error {
	server := in[ParamServer]
	share, err := Share(in)
	switch {
	case err != nil:
		return fmt.Errorf("parameters %w", err)
	case server == "" && share == "":
		return nil
	}
	switch {
	case server == "" || share == "":
		return Errorf(ErrInvalid, "parameters %s=%q, %s=%q: give both, or neither and a %s", ParamServer, server, ParamShare, share, ParamPool)
	case p.Pool != "":
		return Errorf(ErrInvalid, "parameters %s=%q and %s=%q: both say where the volume lies; give one", ParamPool, p.Pool, ParamServer, server)
	}
	p.Pool, err = DirectPool(server, share)
	if p.Backend == "" {
		p.Backend = BackendNFS
	}
	return err
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
	case ParamWipe:
		p.Wipe = Wipe(value)
		if !p.Wipe.valid() {
			return Errorf(ErrInvalid, "parameter %s=%q: want %s, %s or %s", key, value, WipeDiscard, WipeZero, WipeNone)
		}
	case ParamMkfsOptions:
		p.MkfsOptions = strings.Fields(value)
	case ParamServer, ParamShare, ParamExport: // see setDirectPool
	case ParamSubDir, ParamOnDelete, ParamMode, ParamMountPermissions, ParamUID, ParamGID:
		return p.Directory.set(key, value)
	default:
		if !strings.HasPrefix(key, provisionerPrefix) {
			return Errorf(ErrInvalid, "parameter %q is unknown: the known ones are %s", key, strings.Join(knownParameters, ", "))
		}
	}
	return nil
}
