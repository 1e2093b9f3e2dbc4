package pool

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

const (
	markerFile    = "pool.json"
	markerVersion = 1
	// knownDir is a folder of the state directory. It has a file with the UUID of each pool that was
	// opened. If a known pool's directory has no marker, its disk is probably not mounted.
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

// readMarker reads the marker in a pool's directory. fs.ErrNotExist if there is none.
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
		return marker{}, volume.Errorf(volume.ErrDamaged, "%s/%s is not a pool marker: restore it from a backup; it contains the version, the pool's uuid and its name", place, markerFile)
	}
	if m.Version != markerVersion {
		return marker{}, volume.Errorf(volume.ErrPrecondition, "%s/%s has version %d, this driver reads version %d: run a driver that reads version %[3]d", place, markerFile, m.Version, markerVersion)
	}
	return m, nil
}

// newMarker is the marker of a new pool.
func newMarker(name string) marker {
	return marker{Version: markerVersion, UUID: uuid.NewString(), Name: name}
}

func (m marker) encode() []byte {
	b, _ := json.Marshal(m) // cannot fail, because a marker has only strings and a number
	return append(b, '\n')
}

// knownPool is what the state directory says about a pool.
type knownPool struct {
	uuid string // of the pool that was opened under this name before; empty if none was
	file string // path of the file with the UUID, for errors
}

// recall reads the UUID of a pool from the state directory.
func recall(stateDir, name string) (knownPool, error) {
	file := filepath.Join(stateDir, knownDir, url.PathEscape(name)) // the name of a direct pool contains slashes
	known, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return knownPool{uuid: string(known), file: file}, err
}

// identify returns the UUID of the pool in a directory. A directory without a marker is made a
// pool if no pool is expected there: none was opened under this name before, and the
// configuration has no UUID.
func identify(root *os.Root, c Config, o opener, known knownPool) (string, error) {
	expected := cmp.Or(c.UUID, known.uuid)
	m, err := readMarker(root, c.place())
	switch {
	case errors.Is(err, fs.ErrNotExist) && expected != "":
		return "", volume.Errorf(volume.ErrPrecondition, "pool %q: %s has no %s, but should contain pool %s: is its disk mounted? If the pool is lost and a new one is needed, remove uuid from the configuration and %s",
			c.Name, c.place(), markerFile, expected, known.file)
	case errors.Is(err, fs.ErrNotExist):
		if err := o.mayCreate(); err != nil {
			return "", err
		}
		return o.create(root)
	case err != nil:
		return "", o.explainRead(err)
	}
	if err := o.checkName(m); err != nil {
		return "", err
	}
	if expected != "" && m.UUID != expected {
		return "", volume.Errorf(volume.ErrPrecondition, "pool %q: %s contains pool %s, but should contain pool %s: mount the right disk there, or, if the pool was replaced on purpose, correct uuid in the configuration and remove %s",
			c.Name, c.place(), m.UUID, expected, known.file)
	}
	return m.UUID, nil
}

// remember durably records the UUID of a pool in the state directory.
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

// markerStat is the state of the marker file when it was last read.
type markerStat struct {
	ino, size  uint64
	ctim, mtim unix.StatxTimestamp
}

// requireMountPoint refuses a directory that is not a mount point (ErrPrecondition).
func requireMountPoint(path string) error {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BASIC_STATS, &st); err != nil {
		return err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return volume.Errorf(volume.ErrPrecondition, "%s is not a mount point, and requireMount is set: mount its disk, or correct directory.path", path)
	}
	return nil
}
