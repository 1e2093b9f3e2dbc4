package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// MaxIDLength is the longest volume ID in bytes (CSI specification, "Size
// Limits").
const MaxIDLength = 128

var (
	backendPattern = regexp.MustCompile(`^[a-z]{1,16}$`)
	poolPattern    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	uuidPattern    = regexp.MustCompile(`^[0-9a-f]{8}$`)
	namePattern    = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)
)

// ID identifies a volume in the cluster. Its text is `<backend>:<pool>:<name>` in a shared pool and
// `<backend>:<pool>.<8 hex digits of the pool's UUID>:<name>` in a node-local pool.
type ID struct {
	Backend string
	// Pool is the name of a pool in the configuration, or of a direct pool (see DirectPool).
	Pool string
	// PoolUUID is the first 8 hex digits of a node-local pool's UUID; empty for a shared pool.
	PoolUUID string
	// Name is also the name of the volume's folder: the subdirectory of the pool with the volume's record and
	// its data. For an inline volume it is the kubelet's ID (InlineID).
	Name string
}

// ParseID parses an ID. It returns ErrNotFound if the text is not in the format of String, because no such volume
// can exist.
func ParseID(s string) (ID, error) { return parseID(s, namePattern.MatchString) }

// parseID is ParseID for IDs whose names validName accepts.
func parseID(s string, validName func(string) bool) (ID, error) {
	if len(s) > MaxIDLength {
		return ID{}, Errorf(ErrNotFound, "volume ID of %d bytes was not created by this driver: its IDs have at most %d", len(s), MaxIDLength)
	}
	backend, rest, _ := strings.Cut(s, ":")
	pool, name, _ := strings.Cut(rest, ":")
	id := ID{Backend: backend, Pool: pool, Name: name}
	if !backendPattern.MatchString(id.Backend) || !validName(id.Name) || !id.cutPool() {
		return ID{}, Errorf(ErrNotFound, "volume ID %q was not created by this driver: its IDs have the form <backend>:<pool>[.<uuid>]:<name>", s)
	}
	return id, nil
}

// cutPool separates the UUID from the pool, and reports whether both are well-formed.
func (id *ID) cutPool() bool {
	if _, _, direct := ParseDirectPool(id.Pool); direct {
		return true
	}
	pool, uuid, local := strings.Cut(id.Pool, ".")
	id.Pool, id.PoolUUID = pool, uuid
	return poolPattern.MatchString(pool) && (!local || uuidPattern.MatchString(uuid))
}

// String is the inverse of ParseID.
func (id ID) String() string {
	pool := id.Pool
	if id.PoolUUID != "" {
		pool += "." + id.PoolUUID
	}
	return id.Backend + ":" + pool + ":" + id.Name
}

// Shared reports whether the volume is in a pool that all nodes mount.
func (id ID) Shared() bool { return id.PoolUUID == "" }

// MarshalText returns the ID for a record.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads an ID from a record. It may be that of an inline volume, a snapshot or a group.
func (id *ID) UnmarshalText(text []byte) error {
	parsed, err := parseID(string(text), func(name string) bool {
		return snapshotNamePattern.MatchString(name) || IsGroup(name) || InlineID(name)
	})
	if err != nil {
		return err
	}
	*id = parsed
	return nil
}

// NameFor derives a volume's folder name from the orchestrator's name alone, so that create, delete and lock
// need no lookup: the name itself if it matches [a-z0-9-]{1,63}, otherwise a hash of it. The record contains
// the full name, so that a collision is detected.
func NameFor(coName string) string {
	if namePattern.MatchString(coName) {
		return coName
	}
	sum := sha256.Sum256([]byte(coName))
	return "h-" + hex.EncodeToString(sum[:])[:60]
}

// ValidPoolName reports whether s can name a pool: 1 to 40 of [a-z0-9-],
// beginning and ending with a letter or digit.
func ValidPoolName(s string) bool { return poolPattern.MatchString(s) }
