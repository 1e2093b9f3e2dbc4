package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"time"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// OpenReadOnly opens a pool only to read it, whether or not a driver has it open: nothing is created,
// repaired, locked or flushed. The state directory may be missing. It returns the errors of Open, and
// ErrUnavailable for a directory that was never a pool. For a missing directory the error is
// fs.ErrNotExist, and also ErrPrecondition if a disk should be mounted there.
func OpenReadOnly(ctx context.Context, forms volume.Forms, c Config, stateDir string) (*Pool, error) {
	return OpenReadOnlyOn(ctx, new(ledger.Filesystems), forms, c, stateDir)
}

// OpenReadOnlyOn is OpenReadOnly for one of several pools that are open at the same time and share f.
func OpenReadOnlyOn(ctx context.Context, f *ledger.Filesystems, forms volume.Forms, c Config, stateDir string) (*Pool, error) {
	c = c.Within(stateDir)
	if err := c.checkMounted(); err != nil {
		return nil, err
	}
	at, err := siteOf(c.Directory.Path)
	if err != nil {
		return nil, fmt.Errorf("pool %q: directory.path: %w", c.Name, err)
	}
	l := joinLedger(f, at, c)
	p, st, err := openRoot(forms, c, l)
	if errors.Is(err, fs.ErrNotExist) {
		err = missing(c, stateDir, err)
	}
	if err != nil {
		l.Leave()
		return nil, err
	}
	return p.openReadOnly(ctx, &directoryOpener{Config: c, stat: st}, stateDir)
}

// openReadOnly opens a pool whose directory is open, and closes it after an error.
func (p *Pool) openReadOnly(ctx context.Context, o opener, stateDir string) (*Pool, error) {
	known, err := recall(stateDir, p.cfg.Name)
	if err == nil {
		err = p.open(ctx, o, known, func(string) error { return nil })
	}
	if err == nil {
		err = p.readRecords(ctx)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// missing explains why a pool's directory does not exist: its disk is not mounted
// (ErrPrecondition), or no driver has made it yet (err).
func missing(c Config, stateDir string, err error) error {
	known, recallErr := recall(stateDir, c.Name)
	if recallErr != nil {
		return recallErr
	}
	if expected := cmp.Or(c.UUID, known.uuid); expected != "" {
		return volume.Errorf(volume.ErrPrecondition, "%w, but it should contain pool %s: mount its disk. If the pool is lost and a new one is needed, remove uuid from the configuration and %s",
			err, expected, known.file)
	}
	if c.RequireMount {
		return volume.Errorf(volume.ErrPrecondition, "%w, and requireMount is set: mount its disk", err)
	}
	return err
}

// Entry is the folder of a volume, or another entry of the pool's folder of volumes.
type Entry struct {
	Name string
	// Volume is the record. It is empty if the record cannot be read.
	Volume volume.Volume
	// Used is the disk space in bytes of the image, of a limited directory, or on the pool's
	// storage; 0 for others.
	Used  int64
	State FormatState
	// Receiving means that the content is being received from another node, so that the volume does not exist yet.
	Receiving bool
	// CopyOf is the volume of another node whose snapshot of the time Snapshotted the volume still is. It is zero if the volume was
	// not received, or was staged or changed since.
	CopyOf      volume.ID
	Snapshotted time.Time
	// Device is the path of the volume's device on the pool's storage; empty for others,
	// and if it is missing.
	Device string
	// Nodes are the nodes to which the volume is controller-published.
	Nodes []string
	// Err is the first error of reading the record, the data or the attachments.
	Err error
}

// Progress returns the state of formatting: State, or `blank` for a volume whose filesystem is not created yet. It
// is empty for a directory and for a raw device, and if the volume could not be read. For a volume that is being received, it is
// Receiving.
func (e Entry) Progress() string {
	switch v := e.Volume; {
	case e.Receiving:
		return Receiving
	case v.Directory != nil, v.Block:
		return ""
	case e.State == "" && e.Err == nil:
		return "blank"
	}
	return string(e.State)
}

// Receiving is the state of a volume that is being received from another node.
const Receiving = "receiving"

// Entries reads all entries among the volumes, sorted by name, and then the volumes that are being received.
func (p *Pool) Entries() ([]Entry, error) {
	names, err := beneath.Names(p.volumes, ".")
	if err != nil {
		return nil, err
	}
	entries := make([]Entry, 0, len(names))
	for _, name := range names {
		e, err := p.entry(name)
		if beneath.IsNotExist(err) || errors.Is(err, volume.ErrNotFound) { // deleted meanwhile
			continue
		}
		e.Err = err
		entries = append(entries, e)
	}
	return append(entries, p.receivedEntries()...), nil
}

// receivedEntries reads the volumes that are being received. It leaves out those that end meanwhile.
func (p *Pool) receivedEntries() (entries []Entry) {
	if p.Shared() {
		return nil
	}
	names, _ := beneath.Names(p.dir, receivedDir) // without the folder, there are none
	for _, name := range names {
		v, err := p.receivedVolume(name)
		if err != nil {
			continue
		}
		e := Entry{Name: name, Volume: v, Receiving: true, Used: allocated(p.dir, receivedPath(name)+"/"+ImageFile)}
		if p.storage != nil {
			e.Device, e.Used, _ = p.storage.Find(v) // the data may not be created yet
		}
		if u, limited, err := p.Quotas.Usage(v); limited && err == nil {
			e.Used = u.Bytes
		}
		entries = append(entries, e)
	}
	return entries
}

// entry reads one entry. With an error, the entry has what could be read.
func (p *Pool) entry(name string) (Entry, error) {
	e := Entry{Name: name, Used: allocated(p.volumes, name+"/"+ImageFile)}
	v, err := p.Lookup(name)
	if errors.Is(err, volume.ErrNotFound) {
		return e, p.notAVolume(name)
	}
	if err != nil {
		return e, err
	}
	e.Volume = v
	if p.storage != nil {
		if e.Device, e.Used, err = p.storage.Find(v); err != nil {
			return e, err
		}
	}
	if u, limited, err := p.Quotas.Usage(v); limited && err == nil {
		e.Used = u.Bytes
	}
	if e.State, err = p.Images.State(name); err != nil {
		return e, err
	}
	if !p.Shared() {
		content := p.Images.receivedContent(name)
		e.CopyOf, e.Snapshotted = content.Lineage, content.Created
	}
	attachments, attachmentErr := p.Attachments.List(name)
	for _, a := range attachments {
		e.Nodes = append(e.Nodes, a.Node)
	}
	if err := p.checkData(v); err != nil {
		return e, err
	}
	return e, attachmentErr
}

// checkData verifies that a volume's data exists. For data on storage, Storage.Find does that.
func (p *Pool) checkData(v volume.Volume) error {
	switch {
	case p.storage != nil:
		return nil
	case v.Directory == nil:
		return p.checkImage(v)
	}
	dir, err := p.OpenDirectory(v)
	if err != nil {
		return err
	}
	return dir.Close()
}

// checkImage verifies that a volume's image exists and has its full length.
func (p *Pool) checkImage(v volume.Volume) error {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer image.Close()
	info, err := image.Stat()
	if err == nil && info.Size() < v.StorageSize() {
		err = volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its image is shorter than the %s of its record: restore it", v.ID.Name, p.cfg.Name, volume.ExactSize(v.StorageSize()))
	}
	return err
}

// notAVolume is the error of an entry among the volumes that is not a volume; fs.ErrNotExist if
// there is no entry of that name.
func (p *Pool) notAVolume(name string) error {
	if _, err := beneath.Stat(p.volumes, name); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "%s/%s/%s is not the folder of a volume: move it out of the pool", p.cfg.place(), volumesDir, name)
}

// Leftovers counts the entries of tmp (making) and of the trash (removing). A driver clears both when
// it starts.
func (p *Pool) Leftovers() (making, removing int, err error) {
	tmp, err := beneath.Names(p.tmp, ".")
	if err != nil {
		return 0, 0, err
	}
	trash, err := beneath.Names(p.trash, ".")
	return len(tmp), len(trash), err
}

// Remembered returns the UUIDs that the state directory has recorded, by pool name.
func Remembered(stateDir string) (map[string]string, error) {
	entries, err := os.ReadDir(stateDir + "/" + knownDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	known := map[string]string{}
	for _, e := range entries {
		name, err := url.PathUnescape(e.Name())
		if err != nil { // not a file of the driver
			continue
		}
		m, err := recall(stateDir, name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.file, err)
		}
		known[name] = m.uuid
	}
	return known, nil
}
