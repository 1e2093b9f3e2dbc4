package pool

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// store is an open pool directory with its records. All parts of a pool share it.
type store struct {
	cfg  Config
	uuid string
	// forms describe the records of all backends.
	forms volume.Forms
	// version is the negotiated version of NFS; empty for a directory pool.
	version string
	files   beneath.Files
	medium  Medium
	storage Storage // nil if the data is in the pool's directory
	ledger  *ledger.Ledger
	root    *os.Root
	// These folders stay open, because commits call fsync(2) on them, and files are opened relative
	// to them.
	dir, volumes, snapshots, tmp, trash *os.File

	markerMu sync.Mutex
	marker   markerStat
}

// Storage stores the data of the volumes; nil if the data is in the pool's directory.
func (s *store) Storage() Storage { return s.storage }

// OpenData opens a directory volume's data for reading; see OpenDirectory.
func (s *store) OpenData(v volume.Volume) (*os.File, error) {
	at, err := s.OpenDirectory(v)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	f, err := beneath.OpenDir(at, ".")
	return f, s.medium.Explain(err)
}

// Config is the pool's configuration.
func (s *store) Config() Config { return s.cfg }

// Dir is the pool's open directory. The pool closes it.
func (s *store) Dir() *os.File { return s.dir }

// Version is the negotiated version of NFS; empty for a directory pool.
func (s *store) Version() string { return s.version }

// Shared tells whether the pool is on an export, which all nodes mount.
func (s *store) Shared() bool { return s.cfg.Shared() }

// SyncVolumes makes the names of all volumes durable. A CSI call also uses it before it answers that
// the volume was made or deleted earlier, because the earlier call may have ended before its sync.
func (s *store) SyncVolumes() error {
	if err := s.volumes.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateDone)
	return nil
}

// ByID is Lookup for an ID. ErrNotFound also if the volume with that name has another ID, because a
// pool can contain volumes of several backends.
func (s *store) ByID(id volume.ID) (volume.Volume, error) {
	v, err := s.Lookup(id.Name)
	if err == nil && v.ID != id {
		return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "volume %s does not exist: volume %s has that name", id, v.ID)
	}
	return v, err
}

// Lookup reads a volume's record from the disk. ErrNotFound if there is no such volume,
// ErrDamaged if its record is missing or unreadable.
func (s *store) Lookup(name string) (volume.Volume, error) {
	v, err := parseIn(s, "volume", s.volumes, name, recordFile, s.forms.ParseVolume)
	if err == nil && v.ID != s.ID(v.ID.Backend, name) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has the record of %s: was a folder copied or renamed?", name, s.cfg.Name, v.ID)
	}
	return v, err
}

// parseIn reads and parses the record dir/name/file of a volume or set of snapshots. kind is the word
// for it in errors.
func parseIn[T any](s *store, kind string, dir *os.File, name, file string, parse func([]byte) (T, error)) (record T, err error) {
	b, exists, err := s.readIn(dir, name, file)
	switch {
	case !exists && err == nil:
		if err := s.medium.ConfirmAbsence(); err != nil {
			return record, err
		}
		return record, volume.Errorf(volume.ErrNotFound, "%s %q is not in pool %q", kind, name, s.cfg.Name)
	case !exists, err != nil && s.inconclusive(err):
		return record, s.medium.Unreadable(err)
	case beneath.IsNotExist(err):
		return record, volume.Errorf(volume.ErrDamaged, "%s %q in pool %q has no %s: restore it from a backup; its data was not touched", kind, name, s.cfg.Name, file)
	case err != nil:
		return record, volume.Errorf(volume.ErrDamaged, "%s %q in pool %q: its record: %w: restore it from a backup; its data was not touched", kind, name, s.cfg.Name, err)
	}
	if record, err = parse(b); err != nil {
		err = fmt.Errorf("%s %q in pool %q: %w", kind, name, s.cfg.Name, err)
	}
	return record, err
}

// inconclusive tells whether an error of reading a file says nothing about the file.
func (s *store) inconclusive(err error) bool {
	if errors.Is(err, beneath.ErrIrregular) {
		return false
	}
	processErrors := []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EBADF}
	return slices.ContainsFunc(processErrors, func(e error) bool { return errors.Is(err, e) }) || s.medium.Inconclusive(err)
}

// readIn reads the file dir/name/file. exists is false if the folder dir/name does not exist. If
// exists is false and err is not nil, it is not known whether the folder exists.
func (s *store) readIn(dir *os.File, name, file string) (b []byte, exists bool, err error) {
	for range 2 { // another process may make the folder between Read and Stat
		if b, err = s.files.Read(dir, name+"/"+file); !beneath.IsNotExist(err) {
			break
		}
		st, statErr := beneath.Stat(dir, name)
		if beneath.IsNotExist(statErr) || statErr == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return nil, false, nil
		}
		if statErr != nil {
			return nil, false, statErr
		}
	}
	return b, true, err
}

// List returns up to limit volumes of a backend whose names are greater than `after`, in the order of
// their names, and whether there are more. A volume whose record cannot be read has only its ID.
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
			v, err = volume.Volume{ID: s.ID(s.guessBackend(s.volumes, name), name)}, nil
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

// guessBackend guesses the backend of a volume or snapshot whose record cannot be read from the data
// in its folder. On an export a folder without data can be that of a directory volume, because its
// data can be elsewhere.
func (s *store) guessBackend(dir *os.File, folder string) string {
	if s.storage != nil {
		return s.cfg.Section.Backend()
	}
	_, imageErr := beneath.Stat(dir, folder+"/"+ImageFile)
	_, dataErr := beneath.Stat(dir, folder+"/"+DataDir)
	return s.forms.Guess(s.cfg.Shared(), imageErr != nil && (s.cfg.Shared() || dataErr == nil))
}

// rewrite replaces a volume's record.
func (s *store) rewrite(v volume.Volume) error {
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	return s.inFolder(v.ID.Name, func(folder *os.Root) error { return atomicfile.Write(folder, recordFile, record) })
}

// inFolder calls do with a volume's folder.
func (s *store) inFolder(name string, do func(folder *os.Root) error) error {
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
	return do(root)
}

// SyncVolume makes a volume's record and attachments durable. A call that failed or was killed may
// have written them without a sync.
func (s *store) SyncVolume(name string) error {
	if _, err := beneath.Stat(s.volumes, name); err != nil {
		return err
	}
	// A volume may have no attachment, and no folder for attachments.
	for _, path := range []string{attachedPath(name, singleFile), name + "/" + attachedDir} {
		if err := s.medium.SyncFiles(s.root, volumesDir+"/"+path); err != nil && !beneath.IsNotExist(err) {
			return err
		}
	}
	return s.medium.SyncFiles(s.root, volumePath(name, recordFile), FolderPath(name))
}

// Name is the pool's name in the configuration.
func (s *store) Name() string { return s.cfg.Name }

// ShortUUID is the part of the UUID in volume IDs: its first 8 hex digits.
func (s *store) ShortUUID() string { return shortUUID(s.uuid) }

func shortUUID(uuid string) string { return uuid[:8] }

// ID returns the ID of a volume of a backend in this pool.
func (s *store) ID(backend, name string) volume.ID { return s.medium.ID(backend, name) }

// ImagePath is the path of a volume's image. In a shared pool it is the path on the server, for
// messages only.
func (s *store) ImagePath(name string) string {
	return s.cfg.place() + "/" + volumePath(name, ImageFile)
}

// checkCurrent verifies that a locked file is still at a path of the volume name below volumes. Between open and lock another process may
// have deleted the volume (ErrNotFound), and made a new one with the same name (ErrPending).
func (s *store) checkCurrent(name, path string, f *os.File) error {
	var locked unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &locked); err != nil {
		return err
	}
	current, err := beneath.Stat(s.volumes, path)
	if err == nil && current.Ino == locked.Ino {
		return nil
	}
	if err != nil && !beneath.IsGone(err) {
		return err
	}
	if _, err := s.Lookup(name); errors.Is(err, volume.ErrNotFound) {
		return err
	}
	return volume.Errorf(volume.ErrPending, "volume %q in pool %q was replaced meanwhile: retry", name, s.cfg.Name)
}

// OpenFlags adds the open(2) flags that the medium needs to flag.
func (s *store) OpenFlags(flag int) int { return s.files.Flags | flag }

// UUID is the pool's identity.
func (s *store) UUID() string { return s.uuid }

// Space reads the size and the free space of the pool's filesystem, or of its thin storage.
func (s *store) Space() (ledger.Space, error) {
	thin, ok := s.storage.(ThinStorage)
	if !ok {
		return s.medium.Space()
	}
	e, err := thin.Space()
	return ledger.Space{Directory: e, Filesystem: e}, err
}

// recount updates the ledger from a volume's record on the disk.
func (s *store) recount(name string) {
	r, err := s.volumeReservation(name)
	s.ledger.Recount(FolderPath(name), r, err)
}

// volumeReservation reads a volume's reservation. ErrNotFound if the volume does not exist,
// ErrUnavailable if that is not known. A direct pool also counts the volumes that were made under
// another name of the server. A volume whose record cannot be read counts with the size of its
// image. If its folder contains neither an image nor data, its subDir is not known.
func (s *store) volumeReservation(name string) (ledger.Reservation, error) {
	v, err := parseIn(s, "volume", s.volumes, name, recordFile, s.forms.ParseVolume)
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
	r.UnknownSubDir = err != nil
	return r, nil
}

// alias tells whether an ID is that of this direct pool's volume under another name of the server.
func (s *store) alias(id volume.ID, name string) bool {
	return volume.IsDirectPool(s.cfg.Name) && volume.IsDirectPool(id.Pool) && id.Name == name
}

// Check verifies that the open directory is still the pool. Every call that changes the pool
// begins with it. A shared pool that was replaced is opened again (see Set).
func (s *store) Check() error { return s.medium.Check() }

// CheckMarker verifies the marker. It reads the file only if the file has changed since the last
// read.
func (s *store) CheckMarker() error {
	var st unix.Statx_t
	// The lookup of the name returns the attributes, so DONT_SYNC saves a second request to the server.
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC
	if err := unix.Statx(int(s.dir.Fd()), markerFile, flags, unix.STATX_BASIC_STATS, &st); err != nil {
		return err
	}
	now := markerStat{st.Ino, st.Size, st.Ctime, st.Mtime}
	s.markerMu.Lock()
	defer s.markerMu.Unlock()
	if s.marker == now {
		return nil
	}
	m, err := readMarker(s.root, s.cfg.place())
	if err != nil {
		return err
	}
	if m.UUID != s.uuid {
		return volume.Errorf(volume.ErrUnavailable, "the marker has uuid %s", m.UUID)
	}
	s.marker = now
	return nil
}

// OpenDirectory opens a directory volume's data with O_PATH. ErrDamaged if it is missing, or if
// a part of its path is a link or on another filesystem.
func (s *store) OpenDirectory(v volume.Volume) (*os.File, error) {
	path := DirectoryPath(v)
	f, err := sys.Open(s.dir, path, sys.OneMount, unix.O_PATH|unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOENT):
		if err := s.Check(); err != nil {
			return nil, err
		}
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its directory %s is missing: restore it", v.ID.Name, s.cfg.Name, path)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EXDEV):
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: a part of %s is not the directory that this driver made (%w): restore that directory", v.ID.Name, s.cfg.Name, path, err)
	case s.inconclusive(err):
		return nil, s.medium.Unreadable(err)
	}
	return f, err
}
