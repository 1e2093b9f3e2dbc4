package emptydir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const recordVersion = 1

// record describes a volume with the default medium. It is written once the volume is complete. It is
// removed after the directory is removed and its quota ID is released.
type record struct {
	Version int `json:"version"`
	// Kind and ID identify the quota that limits the directory to Bytes. Without a limit, all three
	// are zero.
	Kind  quota.Kind `json:"kind,omitempty"`
	ID    uint64     `json:"id,omitempty"`
	Bytes int64      `json:"limitBytes,omitempty"`
}

const suffix = ".json"

func (p *Plugin) records() string { return filepath.Join(p.host.Paths().Plugin(Name), "records") }

// load reads a record; nil if there is none.
func (p *Plugin) load(key string) (*record, error) {
	r := &record{}
	err := plugins.ReadRecord(filepath.Join(p.records(), key+suffix), r, &r.Version, recordVersion)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no record is a valid result
	}
	if err != nil {
		return nil, fmt.Errorf("%w: correct the record, or remove it and recreate the pod", err)
	}
	return r, nil
}

// save writes a record durably.
func (p *Plugin) save(key string, r *record) error {
	if err := os.MkdirAll(p.records(), 0o750); err != nil {
		return err
	}
	r.Version = recordVersion
	return atomicfile.WriteJSON(p.records(), key+suffix, r)
}

// keys returns the keys of all records.
func (p *Plugin) keys() ([]string, error) {
	entries, err := plugins.Entries(p.records())
	var keys []string
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), suffix); ok {
			keys = append(keys, key)
		}
	}
	return keys, err
}

// ids returns the quota IDs in all records.
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

// forget releases the quota ID of a volume and removes its record if the directory was removed.
// Otherwise it does nothing. It returns quota.ErrBusy while data is still charged to the ID. It reads the
// record before it checks the directory, because a concurrent SetUp creates the directory before it
// writes a new record.
func (p *Plugin) forget(key string) error {
	p.recording.Lock()
	defer p.recording.Unlock()
	r, err := p.load(key)
	uid, name, _ := strings.Cut(key, ".")
	if _, missing := os.Lstat(p.host.Paths().PodVolume(types.UID(uid), Name, name)); !errors.Is(missing, fs.ErrNotExist) {
		return missing
	}
	if err != nil || r == nil {
		return err
	}
	if r.ID != 0 {
		err := p.withQuota(func(fs *quota.FS) error {
			if fs.Kind() != r.Kind { // quotas were disabled, or the data is on another filesystem now
				return nil
			}
			return fs.Release(r.ID)
		})
		if err != nil {
			return fmt.Errorf("releasing the quota ID %d: %w", r.ID, err)
		}
	}
	return os.Remove(filepath.Join(p.records(), key+suffix))
}

// sweep removes the records of removed volumes whose quota IDs were busy when the previous manager
// ended. After an error, the next call tries again. After a success, later calls do nothing.
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

// withQuota calls f with the quotas of the filesystem that contains the pods' directories.
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
