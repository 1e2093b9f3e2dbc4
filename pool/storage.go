package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Section is the configuration of a kind of pool that stores the data of its volumes outside the
// pool's directory. The directory of such a pool contains only records. The package of the kind's
// backend implements Section.
type Section interface {
	// Kind is the key of the section in the configuration of a pool.
	Kind() Kind
	// Backend is the name of the backend that creates the pool's volumes.
	Backend() string
	// Validate checks the section, and that the pool has no keys that the kind does not
	// support. The error (ErrInvalid) begins with the invalid key, which is also the first
	// result.
	Validate(c Config) (key string, err error)
	// String describes where the data is stored, for messages.
	String() string
	// Records is the path of the pool's directory, which differs for each pool.
	Records(stateDir, pool string) string
	// Open returns the storage of a pool. Directory.Path is the directory of its records.
	Open(c Config) Storage
}

// RecordMounter is implemented by a Section whose pools have their records on their own storage, so that they move with
// the data. Records is then a mount point.
type RecordMounter interface {
	// MountRecords prepares the storage, and mounts the directory of the records at Directory.Path, before the pool
	// is opened. It does nothing if the directory is already mounted. unmount is called after the pool is closed.
	// ErrPrecondition if an administrator must act first.
	MountRecords(ctx context.Context, c Config) (unmount func(), err error)
	// CheckMounted explains why the records are not mounted at Directory.Path, for a process that only reads the pool;
	// nil if they are.
	CheckMounted(c Config) error
}

// mountRecords calls MountRecords of the section that c has, if the section has its records on its storage.
func (c Config) mountRecords(ctx context.Context) (unmount func(), err error) {
	mounter, ok := c.Section.(RecordMounter)
	if !ok {
		return func() {}, nil
	}
	if unmount, err = mounter.MountRecords(ctx, c); err != nil {
		return nil, fmt.Errorf("pool %q: %w", c.Name, err)
	}
	return unmount, nil
}

// checkMounted calls CheckMounted of the section that c has, if the section has its records on its storage.
func (c Config) checkMounted() error {
	mounter, ok := c.Section.(RecordMounter)
	if !ok {
		return nil
	}
	if err := mounter.CheckMounted(c); err != nil {
		return fmt.Errorf("pool %q: %w", c.Name, err)
	}
	return nil
}

// Storage stores the data of one pool's volumes. The record of a volume is
// durable before any of its data exists on the storage.
type Storage interface {
	// Scan reads the state of the storage. It is called when the pool is opened, and every
	// minute.
	Scan() error
	// Usage adds the capacity of the storage to the usage that the ledger reports.
	Usage(u ledger.Usage) ledger.Usage
	// Find returns the device with a volume's data, and the volume's usage of the storage in
	// bytes. If err is not nil, device and used may be empty.
	Find(v volume.Volume) (device string, used int64, err error)
	// Abandon prepares the folder of an incomplete volume or set for its move to the trash.
	Abandon(folder *os.Root) error
	// Reclaim frees the storage of the deleted volume or set whose folder is in the trash. The pool calls
	// it again until it returns nil, also after a restart of the driver. It returns nil if nothing
	// is left to free. path is the path of the folder, for errors.
	Reclaim(ctx context.Context, folder *os.Root, path string) error
	// Devices are the devices of the storage at the last Scan.
	Devices() []Device
	// Summary describes the free space in one line (found). advice is empty if no action is needed.
	Summary(u ledger.Usage) (found, advice string)
}

// HeaderEraser is implemented by a Storage whose volumes can be encrypted.
type HeaderEraser interface {
	Storage
	// EraseHeader durably erases the LUKS2 header of a deleted volume, whose folder is in the trash. The pool calls it before
	// Reclaim, and again until it returns nil. It returns nil if there is no header, or Reclaim erases it.
	EraseHeader(ctx context.Context, folder *os.Root, v volume.Volume) error
}

// ErrNotErased means that what was received after the last verified part could not be erased. Then all of it is discarded.
var ErrNotErased = errors.New("erasing the part that was not verified failed")

// ReceivedData is the data on the storage of a pool of a volume that is being received from another node.
type ReceivedData interface {
	// Continue returns the record of the volume if it can have the data of an earlier call, which has written the record before.
	// Unless same is set, the data is that of other content, and is overwritten or zeroed.
	Continue(before volume.Volume, same bool) (v volume.Volume, ok bool)
	// Begin returns the record of the volume, whose data does not exist yet.
	Begin(ctx context.Context) (volume.Volume, error)
	// Open opens the data of the volume, whose record is durable in a folder. If the data does not exist, it is created, and
	// v.Section is completed. The content before the offset kept, which is at most verified, stays. After an error, the data is
	// discarded if nothing of it was verified.
	Open(ctx context.Context, folder *os.Root, v volume.Volume, verified int64) (device *os.File, kept int64, err error)
	// SharesDisk reports whether other volumes have data on the disk with the data.
	SharesDisk() bool
	// Zero makes a range of the data, which was not written since Open, read as zeros. It need not be durable. It calls alive often.
	Zero(ctx context.Context, to *background.Writer, r clone.Range, alive func()) error
	// Close closes the data. Afterwards nothing uses it.
	Close(v volume.Volume, device *os.File) error
}

// ThinStorage is implemented by a Storage that allocates space when data is written, so that a pool can promise more than
// it has. The keys size, reserve and overcommit of the pool apply to it.
type ThinStorage interface {
	Storage
	// Space reads the size and the free space of the storage.
	Space() (ledger.Extent, error)
}

// Device is a device of a pool's storage, for metrics and trivet doctor.
type Device struct {
	Path string
	// Size and Unwiped are in bytes. Unwiped is the part of a deleted volume that is not wiped
	// yet.
	Size, Unwiped int64
	// State is one of a fixed set of words. Detail explains it, and may be empty.
	State, Detail string
	// Advice is the instruction to fix the state; empty if nothing needs to be done.
	Advice string
}

// Arrange returns the configurations of the pools of one node, in which those with a section have an
// Earlier.
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

// Earlier returns the pools of the same kind that precede this one in the configuration.
func (c Config) Earlier() []Config { return c.earlier }

// Within returns the configuration. For a pool with a section it sets Directory.Path to the directory
// of the pool's records.
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

// buildOnStorage makes the record durable, and then calls build, which creates the data on the
// storage. After a crash the record identifies the data that must be freed.
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

// abandonOnStorage prepares the folder of an incomplete volume or set for the trash. ok is false if it has no data on
// the storage.
func (b *building) abandonOnStorage(parent *os.File, entry string) (ok bool, err error) {
	if b.storage == nil {
		return false, nil
	}
	record := recordFile
	if strings.HasSuffix(entry, snapshotSuffix) {
		record = snapshotFile
	}
	if _, err := beneath.Stat(parent, entry+"/"+record); err != nil {
		if beneath.IsNotExist(err) { // the record is written before the data
			return false, nil
		}
		return false, err
	}
	dir, err := beneath.OpenRoot(parent, entry)
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

// Recorded is a record in a pool's directory. Its volume may exist, be in creation or being received, or be deleted.
type Recorded struct {
	Volume volume.Volume
	// Folder is the path of the folder with the record. Trashed means that the folder is in the trash.
	Folder  string
	Trashed bool
}

// WasSent reports whether a volume that is only sent while it is not in use was sent to another node since its last use.
func (r Recorded) WasSent() bool {
	_, err := os.Stat(filepath.Join(r.Folder, contentFile))
	return err == nil
}

// RecordsIn reads all records in the directory of a pool, which need not be open or configured. A
// folder that is moved during the call may be returned twice. unreadable has an error for each record
// that cannot be read, and for each volume without a record.
func RecordsIn(forms volume.Forms, directory string) (all []Recorded, unreadable []error) {
	for _, dir := range []string{receivedDir, tmpDir, volumesDir, trashDir} { // in the order in which volumes move
		path := filepath.Join(directory, dir)
		folders, err := os.ReadDir(path)
		if err != nil && !beneath.IsNotExist(err) {
			unreadable = append(unreadable, err)
		}
		for _, f := range folders {
			r := Recorded{Folder: filepath.Join(path, f.Name()), Trashed: dir == trashDir}
			b, err := os.ReadFile(filepath.Join(r.Folder, recordFile))
			if err == nil {
				r.Volume, err = forms.ParseVolume(b)
			}
			switch {
			case err == nil:
				all = append(all, r)
			case !beneath.IsNotExist(err) || dir == volumesDir && isDir(r.Folder):
				unreadable = append(unreadable, fmt.Errorf("%s: %w", r.Folder, err))
			}
		}
	}
	return all, unreadable
}

func isDir(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}
