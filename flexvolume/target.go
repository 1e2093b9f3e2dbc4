package flexvolume

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volume"
)

// What is in the state directory.
const (
	locksDir   = "locks"   // a file for each pool, and each directory of a server
	targetsDir = "targets" // a record for each directory that a volume is, or may be, mounted at
	stagedDir  = "staged"  // the one mount of each volume
)

// target is a directory that a volume is mounted at, or may be: the record is there
// before the mount is, and until it is gone. A call to unmount has the directory alone.
type target struct {
	Path string `json:"path"`
	// Volume is the ID, or what names a directory of a server.
	Volume string `json:"volume"`
	// Pool is the volume's; empty for a directory of a server.
	Pool string `json:"pool,omitempty"`
	// Silent is since when its server is silent, which keeps it from being taken down, in
	// seconds since the machine was started; 0: it is not known to be.
	Silent int64 `json:"silent,omitempty"`
}

func (t target) lock() string { return lockName(t.Pool, t.Volume) }

// lockName is what two calls must not have at once: a pool, or a directory of a server.
func lockName(pool, handle string) string {
	if pool != "" {
		return "pool-" + pool
	}
	return "share-" + hash(handle)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}

// staging is where a volume is mounted once for all.
func (s *turn) staging(id string) string {
	return filepath.Join(s.state.Name(), stagedDir, hash(id))
}

func recordName(path string) string { return filepath.Join(targetsDir, hash(path)+".json") }

func (s *turn) record(t target) error {
	b, err := json.Marshal(t)
	if err != nil {
		return err
	}
	return atomicfile.Write(s.state, recordName(t.Path), b)
}

func (s *turn) forget(t target) error {
	err := s.state.Remove(recordName(t.Path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// targets are all that are recorded. One whose record is damaged is none: what is
// mounted there keeps its volume from being detached.
func (s *turn) targets(ctx context.Context) ([]target, error) {
	entries, err := fs.ReadDir(s.state.FS(), targetsDir)
	if err != nil {
		return nil, err
	}
	var all []target
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		t, err := readTarget(s.state.FS(), filepath.Join(targetsDir, e.Name()))
		switch {
		case err == nil:
			all = append(all, t)
		case !errors.Is(err, fs.ErrNotExist):
			klog.FromContext(ctx).Error(err, "A record is passed over")
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
		return t, volume.Errorf(volume.ErrDamaged, "record %s is damaged (%w): unmount what it was of, and remove it", name, err)
	}
	return t, nil
}

// recorded is what is known of a directory. One that is not known may be of another
// executable: it is taken down if it is nothing, or of a server.
func (e *Executable) recorded(path string) (target, error) {
	state, err := e.openState()
	if err != nil {
		return target{}, err
	}
	defer state.Close()
	t, err := readTarget(state.FS(), recordName(path))
	if errors.Is(err, fs.ErrNotExist) {
		return target{Path: path, Volume: unknown(path)}, nil
	}
	if err != nil {
		return target{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// unknown stands for the volume at a directory that there is no record of. It is no
// volume ID.
func unknown(path string) string { return "unknown volume at " + path }
