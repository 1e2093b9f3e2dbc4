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
	locksDir   = "locks"   // a file for each pool, and each directory of a server
	targetsDir = "targets" // a record for each directory where a volume is, or may be, mounted
	stagedDir  = "staged"  // the staging mount of each volume
	uuidsDir   = "uuids"   // the UUID of each pool that was used, by the pool's name
	// LogFile is the log of the on-demand driver.
	LogFile = "driver.log"
)

// target is a directory where a volume is mounted, or may be: the record is written before the mount
// is made and removed after the mount. A call to unmount receives only the directory.
type target struct {
	Path string `json:"path"`
	// Volume is the ID, or the handle of a directory of a server.
	Volume string `json:"volume"`
	// Pool is the volume's pool; empty for a directory of a server.
	Pool string `json:"pool,omitempty"`
	// Silent is the time since which the server does not answer, in seconds after the start of the
	// machine. It delays the unmount. 0: the server answers.
	Silent int64 `json:"silent,omitempty"`
}

// lock returns the name of the lock of the pool, or of the directory of a server.
func (t target) lock() string {
	if t.Pool != "" {
		return "pool-" + t.Pool
	}
	return "share-" + hash(t.Volume)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}

// staging returns the staging path of a volume.
func (s *session) staging(id string) string {
	return filepath.Join(s.state.Name(), stagedDir, hash(id))
}

func recordName(path string) string { return filepath.Join(targetsDir, hash(path)+".json") }

func (s *session) record(t target) error {
	b, err := json.Marshal(t)
	if err != nil {
		return err
	}
	return atomicfile.Write(s.state, recordName(t.Path), b)
}

func (s *session) forget(t target) error {
	if err := s.state.Remove(recordName(t.Path)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// targets returns all recorded targets. It omits a damaged record: a volume that is mounted there
// cannot be unstaged.
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
			klog.FromContext(ctx).Error(err, "A record is ignored")
		}
	}
	return all, nil
}

func readTarget(state fs.FS, name string) (t target, err error) {
	b, err := fs.ReadFile(state, name)
	if err != nil {
		return t, err
	}
	if err := json.Unmarshal(b, &t); err != nil || t.Path == "" || t.Volume == "" {
		return t, volume.Errorf(volume.ErrDamaged, "record %s is damaged (%w): unmount the volume that it was written for, and remove the record", name, err)
	}
	return t, nil
}

// recorded returns the target at a directory. A directory without a record may be of another
// executable: the call succeeds if nothing or a directory of a server is mounted there.
func (e *Executable) recorded(path string) (target, error) {
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
