package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/pool/shared"
	"github.com/trivet-csi/trivet/volume"
)

const (
	recordFile = "volume.json"
	// ImageFile is the name of a volume's image in its folder.
	ImageFile = "image"
)

func volumeDir(name string) string { return volumesDir + "/" + name }

// FolderPath is the path of a volume's folder below the pool.
func FolderPath(name string) string { return volumeDir(name) }

func volumePath(name, file string) string { return volumesDir + "/" + name + "/" + file }

// ErrExists means: another process has made the volume. The caller looks it up and compares.
var ErrExists = fmt.Errorf("%w: it exists", volume.ErrPending)

// Create makes a volume: build fills its folder, then record and folder are
// committed by one rename. Nothing of it is there before, all of it after, and
// what it returns is durable. The caller has checked that there is none yet;
// ErrExists if another process was faster.
//
// What changes a pool runs to its end, here and below: the end of ctx does not end it.
func (p *Pool) Create(ctx context.Context, v volume.Volume, build func(dir *os.Root) error) error {
	return p.make(ctx, v, build, func(string) error { return nil })
}

// make is Create; place, given the folder's name in tmp, moves out of it what does
// not stay there.
func (p *Pool) make(ctx context.Context, v volume.Volume, build func(dir *os.Root) error, place func(entry string) error) error {
	if err := p.Check(); err != nil {
		return err
	}
	defer p.ledger.Begin(volumeDir(v.ID.Name))()
	v.Token = NewUUID()
	err := p.create(context.WithoutCancel(ctx), v, build, place)
	if err == nil {
		err = p.SyncVolumes()
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.medium.Explain(err)
}

func (p *Pool) create(ctx context.Context, v volume.Volume, build func(dir *os.Root) error, place func(entry string) error) error {
	entry, err := p.medium.Entry(v.ID.Name, v.Capacity, "")
	if err != nil {
		return err
	}
	fill := func() error { return p.fill(ctx, v, entry, build, place) }
	if hasSubDir(v) { // from the check of its place to the commit nobody else makes one
		return p.medium.Reserve(ctx, volumeDir(v.ID.Name), ledger.OfVolume(v), func() error {
			if err := p.building.makeTmp(ctx, entry); err != nil {
				return err
			}
			return fill()
		})
	}
	if err := p.medium.Reserve(ctx, volumeDir(v.ID.Name), ledger.OfVolume(v), func() error { return p.building.makeTmp(ctx, entry) }); err != nil {
		return err
	}
	return fill()
}

func (p *Pool) fill(ctx context.Context, v volume.Volume, entry string, build func(dir *os.Root) error, place func(entry string) error) error {
	err := p.buildTmp(entry, v, build)
	if err == nil {
		err = place(entry)
	}
	if err == nil {
		crashpoint.Here(crashpoint.CreateBuilt)
		err = p.commit(v, entry)
	}
	if err != nil {
		return errors.Join(err, p.building.abandon(ctx, entry, v.ID.Name))
	}
	if v.Directory != nil { // whose limit was not known before
		p.ledger.Set(volumeDir(v.ID.Name), ledger.OfVolume(v))
	}
	crashpoint.Here(crashpoint.CreateCommitted)
	return nil
}

// commit makes a volume of what was built. After an error the record that is there tells
// whose volume it is: a reply may have been lost.
func (p *Pool) commit(v volume.Volume, entry string) error {
	failed := beneath.Rename(p.tmp, entry, p.volumes, v.ID.Name)
	if failed == nil {
		return nil
	}
	have, err := p.Lookup(v.ID.Name)
	switch {
	case err == nil && have.Token == v.Token:
		return nil
	case err == nil:
		return volume.Errorf(ErrExists, "volume %q in pool %q was made by another process meanwhile: try again", v.ID.Name, p.cfg.Name)
	case !errors.Is(err, volume.ErrNotFound):
		return err
	case beneath.IsNotExist(failed):
		return volume.Errorf(volume.ErrUnavailable, "volume %q in pool %q: another process has cleared what was being made: try again", v.ID.Name, p.cfg.Name)
	}
	return failed
}

func (p *Pool) buildTmp(entry string, v volume.Volume, build func(dir *os.Root) error) error {
	dir, err := beneath.OpenRoot(p.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	if p.storage != nil {
		record, err := v.MarshalRecord()
		if err != nil {
			return err
		}
		return p.building.buildOnStorage(dir, record, build)
	}
	if err := build(dir); err != nil {
		return err
	}
	record, err := v.MarshalRecord() // after build, which says in it what it has made
	if err != nil {
		return err
	}
	// Made here, where one fsync covers it, for the calls that publish.
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	if err := writeSynced(dir, recordFile, record); err != nil {
		return err
	}
	if v.Directory == nil {
		return p.medium.SyncFiles(dir, ImageFile, ".")
	}
	return p.medium.SyncFiles(dir, ".")
}

// writeSynced writes a new file, and makes its content durable.
func writeSynced(dir *os.Root, name string, b []byte) error {
	f, err := dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// Grow promises the volume its new, larger capacity, lets apply make it true,
// and records it. Nothing stays promised if apply fails. The caller holds the
// volume's folder (LockVolume).
func (p *Pool) Grow(ctx context.Context, v volume.Volume, capacity int64, apply func() error) error {
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.medium.CompleteGrowth(ctx, v.ID.Name); err != nil {
		return p.medium.Explain(err)
	}
	defer p.ledger.Begin(volumeDir(v.ID.Name))()
	more := capacity - v.Capacity
	v.Capacity = capacity
	err := p.medium.Reserve(context.WithoutCancel(ctx), volumeDir(v.ID.Name), ledger.OfVolume(v), func() error { return p.medium.AnnounceGrowth(v.ID.Name, more) })
	if err == nil {
		err = apply()
	}
	if err == nil {
		err = p.recordGrowth(ctx, v)
	} else {
		err = errors.Join(err, p.medium.WithdrawGrowth(v.ID.Name))
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.medium.Explain(err)
}

// CompleteGrowth tells other processes of growth that a call of this one has recorded and
// could not tell them. The caller holds the volume's folder (LockVolume).
func (p *Pool) CompleteGrowth(ctx context.Context, name string) error {
	return p.medium.CompleteGrowth(ctx, name)
}

// Adopt records that a volume has become larger than its record says: by a call
// that was cut off after the image, or because the record is an old one from a
// backup. The bytes are there, so they count as promised, room or not. The caller
// holds the volume's folder (LockVolume).
func (p *Pool) Adopt(ctx context.Context, v volume.Volume, capacity int64) error {
	err := p.medium.AnnounceGrowth(v.ID.Name, capacity-v.Capacity)
	if err == nil {
		v.Capacity = capacity
		err = p.recordGrowth(ctx, v)
	}
	return p.medium.Explain(err)
}

func (p *Pool) recordGrowth(ctx context.Context, v volume.Volume) error {
	crashpoint.Here(crashpoint.GrowImage)
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	if err := p.rewrite(v.ID.Name, record); err != nil {
		return err
	}
	p.recount(v.ID.Name)
	crashpoint.Here(crashpoint.GrowRecord)
	return p.medium.CompleteGrowth(ctx, v.ID.Name)
}

// SetNamespace records the only namespace whose pods may mount the volume. The caller
// holds the volume's folder (LockVolume).
func (p *Pool) SetNamespace(v volume.Volume, namespace string) error {
	if err := p.Check(); err != nil {
		return err
	}
	v.Namespace = namespace
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	return p.rewrite(v.ID.Name, record)
}

// LockVolume keeps other processes from growing the volume, or binding it to a
// device of the size it has, until the lock is closed. ErrPending if another has
// it for over a second.
func (p *Pool) LockVolume(ctx context.Context, name string) (io.Closer, error) {
	f, err := p.medium.OpenLock(name)
	if beneath.IsNotExist(err) {
		return nil, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
	}
	if err != nil {
		return nil, p.medium.Explain(err)
	}
	err = flockPatiently(ctx, f)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = volume.Errorf(volume.ErrPending, "volume %q is being grown, staged or copied by another call: try again", name)
	}
	if shared.NoLocks(err) {
		err = nil
	}
	if err != nil {
		return nil, errors.Join(p.medium.Explain(err), f.Close())
	}
	return f, nil
}

func flock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
