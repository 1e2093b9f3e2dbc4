package pool

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

const (
	markerFile    = "pool.json"
	markerVersion = 1
	// knownDir is where the state directory remembers which pool was seen
	// under which name, so that an unmounted disk is noticed.
	knownDir = "known-pools"
)

// marker is the content of pool.json.
type marker struct {
	Version int    `json:"version"`
	UUID    string `json:"uuid"`
	Name    string `json:"name"`
}

var fullUUID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

func validUUID(s string) bool { return fullUUID.MatchString(s) }

// NewUUID makes a random UUID (RFC 9562, version 4) in text.
func NewUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// readMarker returns fs.ErrNotExist where there is none.
func readMarker(root *os.Root, place string) (marker, error) {
	b, err := beneath.ReadRoot(root, markerFile)
	if errors.Is(err, beneath.ErrIrregular) || errors.Is(err, unix.EFBIG) {
		return marker{}, volume.Errorf(volume.ErrDamaged, "%s/%s: %w: restore it from a backup", place, markerFile, err)
	}
	if err != nil {
		return marker{}, err
	}
	var m marker
	if err := json.Unmarshal(b, &m); err != nil || !validUUID(m.UUID) {
		return marker{}, volume.Errorf(volume.ErrDamaged, "%s/%s is no pool marker: restore it from a backup; it holds the version, the pool's uuid and its name", place, markerFile)
	}
	if m.Version != markerVersion {
		return marker{}, volume.Errorf(volume.ErrPrecondition, "%s/%s has version %d, this driver knows version %d: run a newer driver", place, markerFile, m.Version, markerVersion)
	}
	return m, nil
}

// memory is what the state directory says of a pool.
type memory struct {
	uuid string // that was seen under its name; empty: none yet
	file string // that says so
}

// recall reads what the state directory, which is at dir, remembers of a pool.
func recall(state fs.FS, dir, name string) (memory, error) {
	file := knownDir + "/" + url.PathEscape(name) // a direct pool's has slashes
	known, err := fs.ReadFile(state, file)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return memory{uuid: string(known), file: dir + "/" + file}, err
}

// identify finds out which pool the directory holds. With create a new one is made
// of it, only if it is empty and no other was ever seen under this name.
func identify(root *os.Root, c Config, known memory, create bool) (string, error) {
	want := known.uuid
	if c.UUID != "" {
		want = c.UUID
	}
	m, err := readMarker(root, c.place())
	if errors.Is(err, fs.ErrNotExist) && want == "" {
		if err := mayInitialise(c, create); err != nil {
			return "", err
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return initialise(root, c, want, known.file)
	}
	if err != nil {
		return "", err
	}
	if err := checkName(c, m); err != nil {
		return "", err
	}
	if want != "" && m.UUID != want {
		return "", volume.Errorf(volume.ErrPrecondition, "pool %q: %s holds pool %s, expected is %s: mount the right disk there, or, if the pool was replaced on purpose, correct uuid in the configuration and remove %s",
			c.Name, c.place(), m.UUID, want, known.file)
	}
	return m.UUID, nil
}

// checkName refuses a shared pool that was made under another name, which the IDs of
// its volumes have. Exports that no configuration names have one per name of their
// server.
func checkName(c Config, m marker) error {
	_, _, direct := volume.ParseDirectPool(c.Name)
	_, _, madeDirect := volume.ParseDirectPool(m.Name)
	switch {
	case !c.Shared() || m.Name == c.Name || m.Name == "" || direct && madeDirect:
		return nil
	case direct:
		return volume.Errorf(volume.ErrPrecondition, "%s is the pool %q of a configuration: give the StorageClass %s: %[2]s in place of %[4]s and %[5]s", c.place(), m.Name, volume.ParamPool, volume.ParamServer, volume.ParamShare)
	case madeDirect:
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s has the volumes of StorageClasses that give it as %s and %s: go on with those, or export another directory for this pool", c.Name, c.place(), volume.ParamServer, volume.ParamShare)
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is the pool %q, which the IDs of its volumes have: name it so in the configuration, or export another directory for this pool", c.Name, c.place(), m.Name)
}

// errNotMade is of an export that no configuration names and that has no pool yet.
var errNotMade = fmt.Errorf("%w: no pool", volume.ErrUnavailable)

// mayInitialise refuses to make a pool of what may be no such thing.
func mayInitialise(c Config, create bool) error {
	_, _, direct := volume.ParseDirectPool(c.Name)
	switch {
	case direct && !create:
		return volume.Errorf(errNotMade, "pool %q: %s is not a pool, so no volume is there: the first volume of a StorageClass makes it one", c.Name, c.place())
	case c.Shared() && !c.NFS.Init:
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not a pool: if it is the right export, make it one with `trivet pool init`, or set nfs.init: true in the configuration", c.Name, c.place())
	case c.Shared() && !create:
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s is not a pool yet: the driver that serves the controller makes it one", c.Name, c.place())
	case !create:
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %s is not a pool yet: the driver makes it one when it starts", c.Name, c.place())
	}
	return nil
}

func initialise(root *os.Root, c Config, want, knownFile string) (string, error) {
	if want != "" {
		return "", volume.Errorf(volume.ErrPrecondition, "pool %q: %s has no %s, expected is pool %s: is its disk mounted? If the pool is lost and a new one is wanted, remove uuid from the configuration and %s",
			c.Name, c.place(), markerFile, want, knownFile)
	}
	if c.Shared() {
		return initialiseExport(root, c)
	}
	if err := refuseForeignFiles(root, c.Name); err != nil {
		return "", err
	}
	m := marker{Version: markerVersion, UUID: NewUUID(), Name: c.Name}
	b, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	if err := atomicfile.Write(root, markerFile, append(b, '\n')); err != nil {
		return "", fmt.Errorf("pool %q: %w", c.Name, err)
	}
	return m.UUID, nil
}

func refuseForeignFiles(root *os.Root, name string) error {
	entries, err := beneath.RootNames(root, ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e != "lost+found" && e != markerFile+".tmp" {
			return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is no pool and not empty (it has %q): give the pool an empty directory", name, root.Name(), e)
		}
	}
	return nil
}

func remember(state *os.Root, name, uuid string) error {
	path := knownDir + "/" + url.PathEscape(name)
	if old, err := state.ReadFile(path); err == nil && string(old) == uuid {
		return nil
	}
	if err := state.Mkdir(knownDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return atomicfile.Write(state, path, []byte(uuid))
}

// markerSeen is the marker file as it was when it was last read.
type markerSeen struct {
	mu         sync.Mutex
	ino, size  uint64
	ctim, mtim unix.StatxTimestamp
}

func requireMountPoint(path string) error {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BASIC_STATS, &st); err != nil {
		return err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return volume.Errorf(volume.ErrPrecondition, "%s is not a mount point, and requireMount is set: mount its disk", path)
	}
	return nil
}
