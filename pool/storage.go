package pool

import (
	"context"
	"os"
	"path/filepath"
	"slices"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Section is the part of a pool's configuration that belongs to one kind of pool, which has the
// data of its volumes outside the pool's directory. The directory then contains only records.
// The package of the kind's backend implements it.
type Section interface {
	// Kind is the key of the section in the configuration of a pool.
	Kind() Kind
	// Backend is the name of the backend that makes the pool's volumes.
	Backend() string
	// Validate checks the section, and that the pool has no keys that the kind does not
	// support. The error (ErrInvalid) begins with the invalid key, which is also the first
	// result.
	Validate(c Config) (key string, err error)
	// String describes the place of the data, for messages.
	String() string
	// Records is the path of the pool's directory. No other pool has the same.
	Records(stateDir, pool string) string
	// Open returns the storage of a pool. Directory.Path is the directory of its records.
	Open(c Config) Storage
}

// Storage is the medium that has the data of one pool's volumes. The record of a volume is
// durable before any of its data exists on the storage.
type Storage interface {
	// Scan reads the state of the storage. It is called when the pool is opened, and every
	// minute.
	Scan() error
	// Usage completes the usage that the ledger has with the capacity of the storage.
	Usage(u ledger.Usage) ledger.Usage
	// Find returns the device that has a volume's data, and the volume's usage of the storage
	// in bytes. Together with an error, either may be zero.
	Find(v volume.Volume) (device string, used int64, err error)
	// Abandon prepares the folder of a volume that was not completed for the trash.
	Abandon(folder *os.Root) error
	// Reclaim frees the storage of a folder in the trash. It is repeated until it succeeds, if
	// need be by the next driver, and succeeds if nothing is left to free. path is the
	// folder's, for errors.
	Reclaim(ctx context.Context, folder *os.Root, path string) error
	// Devices are the devices of the storage at the last Scan.
	Devices() []Device
	// Summary describes the free space in one line. advice is empty unless it needs
	// attention.
	Summary(u ledger.Usage) (found, advice string)
}

// Device is a device of a pool's storage, for metrics and trivet doctor.
type Device struct {
	Path string
	// Size and Unwiped are in bytes. Unwiped is the part of a deleted volume that has to be
	// wiped.
	Size, Unwiped int64
	// State is one word of a closed list, Detail explains it; Detail may be empty.
	State, Detail string
	// Advice says how to fix the state; empty if nothing needs to be done.
	Advice string
}

// Arrange sets Earlier in the configurations of the pools of one node.
func Arrange(configs []Config) []Config {
	configs = slices.Clone(configs)
	for i, c := range configs {
		if c.Section == nil {
			continue
		}
		configs[i].earlier = slices.DeleteFunc(slices.Clone(configs[:i]), func(other Config) bool {
			return other.Section == nil || other.Kind() != c.Kind()
		})
	}
	return configs
}

// Earlier are the pools of the same kind that come before this one in the configuration.
func (c Config) Earlier() []Config { return c.earlier }

// Within is the configuration with the directory of the pool's records set.
func (c Config) Within(stateDir string) Config {
	if c.Section != nil {
		c.Directory.Path = c.Section.Records(stateDir, c.Name)
	}
	return c
}

// RecordPath is the path of a volume's record in a pool of this node, for messages.
func (c Config) RecordPath(name string) string {
	return filepath.Join(c.Directory.Path, volumePath(name, recordFile))
}

// AwaitEmpty waits up to ledger.DrainTime until the trash contains only stuck entries.
func (t *Trash) AwaitEmpty() {
	if t.ledger.HasTrash() {
		t.reaper.drain(ledger.DrainTime)
	}
}

// buildOnStorage makes a volume whose data build makes on the storage. The record is durable
// before build is called: with it the data is found again if the volume is not completed.
func (b *building) buildOnStorage(dir *os.Root, record []byte, build func(dir *os.Root) error) error {
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.Write(dir, recordFile, record); err != nil {
		return err
	}
	if err := b.tmp.Sync(); err != nil {
		return err
	}
	return build(dir)
}

// abandonOnStorage prepares the folder of an incomplete volume for the trash; false if the volume
// has nothing on the storage.
func (b *building) abandonOnStorage(entry string) (ok bool, err error) {
	if b.storage == nil {
		return false, nil
	}
	if _, err := beneath.Stat(b.tmp, entry+"/"+recordFile); err != nil { // the record is written before the data
		return false, nil
	}
	dir, err := beneath.OpenRoot(b.tmp, entry)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	return true, b.storage.Abandon(dir)
}

// ReadTrashed reads the record in a folder of the trash; ok is false if it has none.
func ReadTrashed(forms volume.Forms, folder *os.Root) (v volume.Volume, ok bool, err error) {
	b, err := folder.ReadFile(recordFile)
	if beneath.IsNotExist(err) {
		return v, false, nil
	}
	if err == nil {
		v, err = forms.ParseVolume(b)
	}
	return v, err == nil, err
}

// Recorded is a record in a pool's directory: of a volume, or of one that is being made or
// was deleted.
type Recorded struct {
	Volume volume.Volume
	// Folder has the record; in the trash if Trashed.
	Folder  string
	Trashed bool
}

// RecordsIn reads all records in the directory of a pool, which need not be open or configured. A
// folder that moves meanwhile is found at its old path, its new path, or both. Records that cannot
// be read are left out.
func RecordsIn(forms volume.Forms, directory string) []Recorded {
	var all []Recorded
	for _, dir := range []string{tmpDir, volumesDir, trashDir} { // in the order in which volumes move
		folders, _ := os.ReadDir(filepath.Join(directory, dir)) // missing: it has none
		for _, f := range folders {
			folder := filepath.Join(directory, dir, f.Name())
			b, err := os.ReadFile(filepath.Join(folder, recordFile))
			if err != nil {
				continue
			}
			if v, err := forms.ParseVolume(b); err == nil {
				all = append(all, Recorded{Volume: v, Folder: folder, Trashed: dir == trashDir})
			}
		}
	}
	return all
}
