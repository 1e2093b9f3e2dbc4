package flexvolume

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volume"
)

// Files and directories in the state directory.
const (
	locksDir   = "locks"   // a file for each pool and for each NFS directory
	targetsDir = "targets" // a record for each directory where a volume is or may be mounted
	stagedDir  = "staged"  // the staging mount of each volume
	uuidsDir   = "uuids"   // the UUID of each pool that was used, by the pool's name
	// LogFile is the log of the on-demand driver.
	LogFile = "driver.log"
)

const targetVersion = 1

// target is the record of a directory where a volume is or may be mounted. It is written before the
// volume is mounted, and removed after the volume is unmounted. It is needed because a call to unmount
// receives only the directory.
type target struct {
	Version int    `json:"version"`
	Path    string `json:"path"`
	// Volume is the ID of the volume, or the handle of an NFS directory.
	Volume string `json:"volume"`
	// Pool is the volume's pool; empty for an NFS directory.
	Pool string `json:"pool,omitempty"`
	// SilentSince is the uptime of the node in seconds since which the NFS server has not answered. It
	// delays the unmount. 0 means that the server answers.
	SilentSince int64 `json:"silentSinceUptimeSeconds,omitempty"`
}

// lock returns the name of the lock of the volume's pool, or of the NFS directory.
func (t target) lock() string {
	if t.Pool != "" {
		return "pool-" + t.Pool
	}
	return "share-" + hash(t.Volume)
}

// hash returns a string of 32 hexadecimal digits that can be part of a file name.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}

// staging returns the staging path of a volume.
func (s *session) staging(id string) string {
	return filepath.Join(s.state.Name(), stagedDir, hash(id))
}

// recordName returns the path of a target's record in the state directory.
func recordName(path string) string { return filepath.Join(targetsDir, hash(path)+".json") }

func (s *session) writeRecord(t target) error {
	t.Version = targetVersion
	b, err := json.Marshal(t)
	if err != nil {
		return err
	}
	return atomicfile.Write(s.state, recordName(t.Path), b)
}

func (s *session) removeRecord(t target) error {
	name := recordName(t.Path)
	for _, file := range []string{name + atomicfile.Temporary, name} { // a killed writer leaves the first
		if err := s.state.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// targets returns all recorded targets. It omits a target whose record cannot be read; while a volume is
// mounted at such a target, the driver refuses to unstage the volume.
func targets(ctx context.Context, state *os.Root) ([]target, error) {
	entries, err := fs.ReadDir(state.FS(), targetsDir)
	if err != nil {
		return nil, err
	}
	var all []target
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		t, err := readTarget(state.FS(), filepath.Join(targetsDir, e.Name()))
		switch {
		case err == nil:
			all = append(all, t)
		case !errors.Is(err, fs.ErrNotExist):
			klog.FromContext(ctx).Error(err, "Ignored the record of a target")
		}
	}
	return all, nil
}

// readTarget reads a record. It returns ErrDamaged if the content of the record is invalid, and ErrPrecondition
// if another version of the driver wrote it.
func readTarget(state fs.FS, name string) (t target, err error) {
	b, err := fs.ReadFile(state, name)
	if err != nil {
		return t, err
	}
	err = volume.DecodeRecord(b, &t, &t.Version, targetVersion)
	if err != nil && t.Version != 0 {
		return t, volume.Errorf(volume.ErrPrecondition, "%s: %w", name, err)
	}
	if err == nil && (t.Path == "" || t.Volume == "") {
		err = errors.New("path or volume is missing")
	}
	if err != nil {
		return t, volume.Errorf(volume.ErrDamaged, "record %s is damaged (%w): unmount the volume that the record was written for, and remove the record", name, err)
	}
	return t, nil
}

// targetAt returns the recorded target at a path. If there is no record, another executable may have mounted
// the volume, and targetAt returns a target with an unknown volume. A call to unmount then succeeds if
// nothing or an NFS directory is mounted at the path.
func (e *Executable) targetAt(path string) (target, error) {
	state, err := e.openState()
	if err != nil {
		return target{}, err
	}
	defer state.Close()
	t, err := readTarget(state.FS(), recordName(path))
	if errors.Is(err, fs.ErrNotExist) {
		return target{Path: path, Volume: "unknown volume at " + path}, nil // not a valid volume ID
	}
	if err != nil {
		return target{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}
