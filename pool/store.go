package pool

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// store is an open pool directory with its records: what all parts of a pool share.
type store struct {
	cfg  Config
	uuid string
	// version is of the NFS protocol; empty for a directory pool.
	version string
	files   beneath.Files
	medium  Medium
	storage Storage // nil: the data is in the pool's directory
	ledger  *ledger.Ledger
	root    *os.Root
	// These folders stay open: each commit calls fsync on them, and reads begin there.
	dir, volumes, snapshots, tmp, trash *os.File
	marker                              markerStat
}

// Storage is the medium that has the data of the volumes; nil if the pool's directory has
// it.
func (s *store) Storage() Storage { return s.storage }

// OpenData is OpenDirectory for who reads what is in the directory.
func (s *store) OpenData(v volume.Volume) (*os.File, error) {
	at, err := s.OpenDirectory(v)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	f, err := beneath.OpenDir(at, ".")
	return f, s.medium.Explain(err)
}

// Config is the pool as it is configured.
func (s *store) Config() Config { return s.cfg }

// Dir is the pool's open directory; it stays the pool's.
func (s *store) Dir() *os.File { return s.dir }

// Version is the negotiated version of NFS; empty for a directory pool.
func (s *store) Version() string { return s.version }

// Shared tells whether all nodes reach the pool.
func (s *store) Shared() bool { return s.cfg.Shared() }

// SyncVolumes makes the names of all volumes durable. A caller that finds a volume
// made, or gone, by a call that failed or was killed calls it before it answers.
func (s *store) SyncVolumes() error {
	if err := s.volumes.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateDone)
	return nil
}

// ByID is Lookup for an ID. A pool has volumes of several backends, and an ID that
// somebody made up of one's name is of no volume: ErrNotFound.
func (s *store) ByID(id volume.ID) (volume.Volume, error) {
	v, err := s.Lookup(id.Name)
	if err == nil && v.ID != id {
		err = volume.Errorf(volume.ErrNotFound, "volume %s does not exist: what has its name is %s", id, v.ID)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	return v, nil
}

// Lookup reads a volume's record from the disk. ErrNotFound if there is no
// such volume, ErrDamaged if its record is missing or unreadable.
func (s *store) Lookup(name string) (volume.Volume, error) {
	v, err := s.lookup(name)
	if errors.Is(err, volume.ErrNotFound) {
		if err := s.medium.ConfirmAbsence(); err != nil {
			return volume.Volume{}, err
		}
	}
	return v, err
}

func (s *store) lookup(name string) (volume.Volume, error) {
	v, err := s.readRecord(name)
	if err != nil {
		return volume.Volume{}, err
	}
	if v.ID != s.ID(v.ID.Backend, name) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has the record of %s: was a folder copied or renamed?", name, s.cfg.Name, v.ID)
	}
	return v, nil
}

// readRecord is lookup for a record of whatever volume.
func (s *store) readRecord(name string) (volume.Volume, error) {
	b, there, err := s.readIn(s.volumes, name, recordFile)
	switch {
	case !there && err == nil:
		return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, s.cfg.Name)
	case !there:
		return volume.Volume{}, s.medium.Unreadable(err)
	}
	if beneath.IsNotExist(err) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has no %s: restore it from a backup; its data was not touched", name, s.cfg.Name, recordFile)
	}
	if err != nil && s.inconclusive(err) {
		return volume.Volume{}, s.medium.Unreadable(err)
	}
	if err != nil {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its record: %w: restore it from a backup; its data was not touched", name, s.cfg.Name, err)
	}
	v, err := volume.ParseRecord(b)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("volume %q in pool %q: %w", name, s.cfg.Name, err)
	}
	return v, nil
}

// inconclusive tells whether an error of reading a file says nothing about the file.
func (s *store) inconclusive(err error) bool {
	if errors.Is(err, beneath.ErrIrregular) {
		return false
	}
	own := []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EBADF}
	return slices.ContainsFunc(own, func(e error) bool { return errors.Is(err, e) }) || s.medium.Inconclusive(err)
}

// readIn reads a file that each folder in dir has. there is false if there is no folder
// of that name; with an error it is not known.
func (s *store) readIn(dir *os.File, name, file string) (b []byte, there bool, err error) {
	for range 2 { // another process may make the folder between the two looks
		if b, err = s.files.Read(dir, name+"/"+file); !beneath.IsNotExist(err) {
			break
		}
		st, looked := beneath.Stat(dir, name)
		if beneath.IsNotExist(looked) || looked == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return nil, false, nil
		}
		if looked != nil {
			return nil, false, looked
		}
	}
	return b, true, err
}

// List returns up to limit volumes of a backend whose names come after `after`,
// by name, and whether there are more. Of a volume whose record cannot be read
// it has the ID alone.
func (s *store) List(backend, after string, limit int) (volumes []volume.Volume, more bool, err error) {
	names, err := beneath.Names(s.volumes, ".")
	if err != nil {
		return nil, false, err
	}
	first, found := slices.BinarySearch(names, after)
	if found {
		first++
	}
	for _, name := range names[first:] {
		if len(volumes) == limit {
			return volumes, true, nil
		}
		v, err := s.Lookup(name)
		if errors.Is(err, volume.ErrNotFound) || name != volume.NameFor(name) { // a stray file or folder
			continue
		}
		if errors.Is(err, volume.ErrDamaged) {
			v, err = volume.Volume{ID: s.ID(s.probably(name), name)}, nil
		}
		if err != nil {
			return nil, false, err
		}
		if v.ID.Backend == backend {
			volumes = append(volumes, v)
		}
	}
	return volumes, false, nil
}

// probably is the backend of a volume whose record cannot be read.
func (s *store) probably(name string) string {
	_, noImage := beneath.Stat(s.volumes, name+"/"+ImageFile)
	_, noData := beneath.Stat(s.volumes, name+"/"+DataDir)
	switch {
	case s.storage != nil:
		return s.cfg.Section.Backend()
	case noImage == nil:
		return volume.BackendLoop
	case s.cfg.Shared():
		return volume.BackendNFS
	case noData == nil:
		return volume.BackendLocal
	}
	return volume.BackendLoop
}

// rewrite replaces a volume's record.
func (s *store) rewrite(name string, record []byte) error {
	folder, err := beneath.OpenDir(s.volumes, name)
	if err != nil {
		return s.medium.Explain(err)
	}
	defer folder.Close()
	root, err := beneath.OpenRoot(folder, ".")
	if err != nil {
		return s.medium.Explain(err)
	}
	defer root.Close()
	return atomicfile.Write(root, recordFile, record)
}

// SyncVolume makes durable what a call that failed or was killed may have left
// visible of a volume.
func (s *store) SyncVolume(name string) error {
	if _, err := beneath.Stat(s.volumes, name); err != nil {
		return err
	}
	// A volume need not have these.
	for _, path := range []string{attachedPath(name, singleFile), name + "/" + attachedDir} {
		if err := s.medium.SyncFiles(s.root, volumesDir+"/"+path); err != nil && !beneath.IsNotExist(err) {
			return err
		}
	}
	return s.medium.SyncFiles(s.root, volumePath(name, recordFile), volumeDir(name))
}

// Name is the pool's name in the configuration.
func (s *store) Name() string { return s.cfg.Name }

// ShortUUID is what volume IDs carry: the first 8 hex digits of the UUID.
func (s *store) ShortUUID() string { return s.uuid[:8] }

// ID returns the ID of a volume of a backend in this pool.
func (s *store) ID(backend, name string) volume.ID { return s.medium.ID(backend, name) }

// ImagePath is the path of a volume's image, for programs that want a path; in a
// shared pool it is the server's, for people.
func (s *store) ImagePath(name string) string {
	return s.cfg.place() + "/" + volumePath(name, ImageFile)
}

// OpenFlags adds to the flags of opening a file in the pool those that its medium needs.
func (s *store) OpenFlags(flag int) int { return s.files.Flags | flag }

// UUID is the pool's identity.
func (s *store) UUID() string { return s.uuid }

// Space reads what the pool's filesystem has.
func (s *store) Space() (ledger.Space, error) { return s.medium.Space() }

// recount sets what the ledger holds of a volume to what the disk says. A call
// that failed may have done its work all the same.
func (s *store) recount(name string) {
	r, err := s.readReservation(name)
	s.recounted(volumeDir(name), r, err)
}

// recounted sets what the ledger holds of a folder to what was read of it.
func (s *store) recounted(dir string, r ledger.Reservation, err error) {
	if errors.Is(err, volume.ErrNotFound) && s.medium.ConfirmAbsence() != nil {
		return
	}
	s.ledger.Recount(dir, r, err)
}

// readReservation reads what a volume has: ErrNotFound if there is none, ErrUnavailable if
// that cannot be told. The volumes of a direct pool that another of its names was
// used for are the server's as much. What has a record that cannot be read counts
// with the size of its image; without an image, or data in its own folder, it may
// have a directory anywhere.
func (s *store) readReservation(name string) (ledger.Reservation, error) {
	v, err := s.readRecord(name)
	if err == nil && (v.ID == s.ID(v.ID.Backend, name) || s.alias(v.ID, name)) {
		return ledger.OfVolume(v), nil
	}
	if errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable) {
		return ledger.Reservation{}, err
	}
	r := ledger.Reservation{Backend: ledger.UnknownBackend}
	if image, err := beneath.Stat(s.volumes, name+"/"+ImageFile); err == nil {
		r.Bytes = image.Size
		return r, nil
	}
	_, err = beneath.Stat(s.volumes, name+"/"+DataDir)
	r.Unread = err != nil
	return r, nil
}

// alias tells whether an ID is of this pool's volume name under another direct name
// of the export.
func (s *store) alias(id volume.ID, name string) bool {
	_, _, direct := volume.ParseDirectPool(s.cfg.Name)
	_, _, madeDirect := volume.ParseDirectPool(id.Pool)
	return direct && madeDirect && id.Name == name
}

// Check makes sure that the pool is still what was opened. Every mutating call begins with
// it. A shared pool that is not what it was is opened anew (see Set).
func (s *store) Check() error { return s.medium.Check() }

// CheckMarker reads the marker if it is not the file, unchanged, that was read
// before.
func (s *store) CheckMarker() error {
	var st unix.Statx_t
	// Looking up the name brings what there is to know: a server is not asked twice.
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC
	if err := unix.Statx(int(s.dir.Fd()), markerFile, flags, unix.STATX_BASIC_STATS, &st); err != nil {
		return err
	}
	seen := &s.marker
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if st.Ino == seen.ino && st.Size == seen.size && st.Ctime == seen.ctim && st.Mtime == seen.mtim {
		return nil
	}
	m, err := readMarker(s.root, s.cfg.place())
	if err != nil {
		return err
	}
	if m.UUID != s.uuid {
		return volume.Errorf(volume.ErrUnavailable, "its uuid is %s", m.UUID)
	}
	seen.ino, seen.size, seen.ctim, seen.mtim = st.Ino, st.Size, st.Ctime, st.Mtime
	return nil
}

// OpenDirectory opens a directory volume's data, for stat and such (O_PATH). No part
// of its path may be a link or on another filesystem. ErrDamaged if it is missing, or
// that.
func (s *store) OpenDirectory(v volume.Volume) (*os.File, error) {
	where := DirectoryPath(v)
	f, err := sys.Open(s.dir, where, sys.OneMount, unix.O_PATH|unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOENT):
		if err := s.Check(); err != nil {
			return nil, err
		}
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its directory %s is missing: restore it", v.ID.Name, s.cfg.Name, where)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EXDEV):
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: a part of %s is not the directory that this driver made (%w): put that back", v.ID.Name, s.cfg.Name, where, err)
	case s.inconclusive(err):
		return nil, s.medium.Unreadable(err)
	}
	return f, err
}
