package emptydir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/quota"
)

// record is of a volume on the disk. It is written once the volume is complete, and
// removed when its directory is gone and its ID given back.
type record struct {
	// Kind and ID limit the directory to Bytes; empty if nothing does.
	Kind  quota.Kind `json:"kind,omitempty"`
	ID    uint64     `json:"id,omitempty"`
	Bytes int64      `json:"bytes,omitempty"`
}

const suffix = ".json"

func (p *Plugin) records() string { return filepath.Join(p.host.Paths().Plugin(Name), "records") }

// load reads a record; nil if there is none.
func (p *Plugin) load(key string) (*record, error) {
	path := filepath.Join(p.records(), key+suffix)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no record is an answer
	}
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s: %w: remove it; the volume's limit is lost with it", path, err)
	}
	return r, nil
}

// save writes a record durably.
func (p *Plugin) save(key string, r *record) error {
	if err := os.MkdirAll(p.records(), 0o750); err != nil {
		return err
	}
	return atomicfile.WriteJSON(p.records(), key+suffix, r)
}

// keys are those of all records.
func (p *Plugin) keys() ([]string, error) {
	entries, err := os.ReadDir(p.records())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var keys []string
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), suffix); ok {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// ids are those that records have.
func (p *Plugin) ids() (map[uint64]bool, error) {
	keys, err := p.keys()
	if err != nil {
		return nil, err
	}
	ids := map[uint64]bool{}
	for _, key := range keys {
		if r, err := p.load(key); err == nil && r != nil {
			ids[r.ID] = true
		}
	}
	return ids, nil
}

// forget gives back the ID of a volume whose directory is gone, and removes its record.
// quota.ErrBusy while data still counts on the ID. The record is read before the directory
// is looked for: a volume that is made anew meanwhile has the directory first, and waits
// until the record that it had is gone.
func (p *Plugin) forget(key string) error {
	p.recording.Lock()
	defer p.recording.Unlock()
	r, err := p.load(key)
	uid, name, _ := strings.Cut(key, ".")
	if _, looked := os.Lstat(p.host.Paths().PodVolume(types.UID(uid), Name, name)); !errors.Is(looked, fs.ErrNotExist) {
		return looked
	}
	if err != nil || r == nil {
		return err
	}
	if r.ID != 0 {
		if err := p.release(r); err != nil {
			return fmt.Errorf("giving back ID %d of the limit: %w", r.ID, err)
		}
	}
	return os.Remove(filepath.Join(p.records(), key+suffix))
}

func (p *Plugin) release(r *record) error {
	return p.withQuota(func(fs *quota.FS) error {
		if fs.Kind() != r.Kind { // limits are off, or the data were moved to another filesystem
			return nil
		}
		return fs.Release(r.ID)
	})
}

// sweep forgets volumes that are gone, and whose IDs were busy when the manager ended.
// What fails is left to the next call; when nothing does, there is none any more.
func (p *Plugin) sweep() {
	if p.swept.Load() {
		return
	}
	keys, err := p.keys()
	for _, key := range keys {
		err = errors.Join(err, p.forget(key))
	}
	p.swept.Store(err == nil)
}

// withQuota runs f with the filesystem that has the pods.
func (p *Plugin) withQuota(f func(*quota.FS) error) error {
	dir, err := os.Open(p.host.Paths().Pods())
	if err != nil {
		return err
	}
	defer dir.Close()
	fs, err := quota.Open(dir)
	if err != nil {
		return err
	}
	defer fs.Close() //nolint:errcheck // nothing was written through it
	return f(fs)
}
