package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// openPlain opens a node-local pool, and also returns its directory.
func openPlain(t *testing.T) (*Pool, string) {
	t.Helper()
	dir := t.TempDir()
	return newPlace(t, dir).open(t), filepath.Join(dir, "pool")
}

// stopTasks ends a pool's background work, so that a test can replace the pool's medium.
func stopTasks(p *Pool) {
	p.stop()
	p.tasks.Wait()
}

// TestNoAttachedFolder: a volume without a folder for attachments can be synced, unpublished and published.
func TestNoAttachedFolder(t *testing.T) {
	local, at := openPlain(t)
	must(t, local.CreateDirectory(t.Context(), directoryVolume(local, "v", 4096), nil, nothing))
	export := t.TempDir()
	shared := openExportDir(t, export)
	must(t, shared.CreateDirectory(t.Context(), sharedVolume(shared, "v"), nil, nothing))
	for dir, p := range map[string]*Pool{at: local, export: shared} {
		must(t, os.Remove(filepath.Join(dir, FolderPath("v"), attachedDir)))
		must(t, p.SyncVolume("v"))
		must(t, p.Attachments.Detach("v", "n"))
		must(t, p.Attachments.Attach("v", Attachment{Node: "n"}))
		if all, err := p.Attachments.List("v"); err != nil || len(all) != 1 {
			t.Errorf("%s: published to %v (error %v), want node n", dir, all, err)
		}
	}
}

// TestProbe: a disk that cannot be read is found, if the data of the volumes is on it. A missing marker is not such a disk.
func TestProbe(t *testing.T) {
	at := testenv.Filesystem(t, "xfs", "512M")
	directory := newPlace(t, at).open(t)
	records := filepath.Join(at, "records")
	must(t, os.Mkdir(records, 0o700))
	forms := volume.Forms{{Name: "mounted", Section: func() volume.Section { return new(idSection) }}}
	storage, err := Open(t.Context(), forms, Config{Name: "p", Section: &mounted{at: records}}, stateRoot(t), nil)
	must(t, err)
	t.Cleanup(storage.Close)
	probed := func(when string, want error) {
		t.Helper()
		if err := directory.Probe(); !errors.Is(err, want) {
			t.Errorf("%s: got %v of a pool in a directory, want %v", when, err, want)
		}
		if err := storage.Probe(); err != nil {
			t.Errorf("%s: got %v of a pool whose data is on other storage, want none", when, err)
		}
	}
	probed("at first", nil)
	marker := filepath.Join(at, "pool", markerFile)
	must(t, os.Rename(marker, marker+".away"))
	probed("without a marker", nil)
	must(t, os.Rename(marker+".away", marker))
	testenv.Run(t, "xfs_io", "-x", "-c", "shutdown", at)
	probed("unreadable", ErrDiskUnreadable)
}

// failingSync is a medium on which links succeed and syncs fail.
type failingSync struct{ Medium }

func (m failingSync) Link(file, folder *os.File, link func() error) error {
	return m.Medium.Link(file, folder, func() error { return errors.Join(link(), file.Close()) })
}

func (m failingSync) SyncNames(*os.File) error { return os.ErrClosed }

// TestAttachNotDurable: if an attachment was linked but could not be made durable, Attach fails, and the
// volume counts as published. A retry succeeds.
func TestAttachNotDurable(t *testing.T) {
	p, _ := openPlain(t)
	v := directoryVolume(p, "v", 4096)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	stopTasks(p)
	medium := p.medium
	p.medium = failingSync{medium}
	defer func() { p.medium = medium }()
	if err := p.Attachments.Attach("v", Attachment{Node: "n"}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Attach without a sync: got %v, want ErrClosed", err)
	}
	if n := p.AttachedCount(v.ID.Backend); n != 1 {
		t.Errorf("got %d published volumes, want 1", n)
	}
	must(t, p.Attachments.Attach("v", Attachment{Node: "n"}))
}

// TestPlaceNotDurable: placeData fails if the directory was moved to its subDir, but could not be made
// durable.
func TestPlaceNotDurable(t *testing.T) {
	p, at := openPlain(t)
	stopTasks(p)
	medium := p.medium
	p.medium = failingSync{medium}
	defer func() { p.medium = medium }()
	must(t, p.building.makeTmp(t.Context(), "v"))
	must(t, os.Mkdir(filepath.Join(at, tmpDir, "v", DataDir), 0o700))
	if err := p.placeData("v", "placed"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("placeData without a sync: got %v, want ErrClosed", err)
	}
	if _, err := os.Stat(filepath.Join(at, "placed")); err != nil {
		t.Error(err)
	}
}

// TestSoleWriterRemoves: in a node-local pool, a missing volume or entry of the trash does not count as
// removed by another process: deleting the volume fails, and the entry counts until the reaper ran.
func TestSoleWriterRemoves(t *testing.T) {
	p, _ := openPlain(t)
	stopTasks(p)
	if err := p.takeOut("missing", p.trash, "missing.1"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("delete of a missing volume: got %v, want ErrNotExist", err)
	}
	p.ledger.Move(FolderPath("v"), trashDir+"/v.1", ledger.Reservation{Bytes: 4096})
	p.Trash.reaper.add("v.1")
	u, err := p.Usage()
	if err != nil || u.Trash != 1 || u.Promised != 4096 {
		t.Errorf("got %d entries in the trash and %d promised bytes, %v; want 1 and 4096", u.Trash, u.Promised, err)
	}
	must(t, p.Trash.reapEntry(t.Context(), &trashEntry{name: "v.1"}))
	if u, err := p.Usage(); err != nil || u.Promised != 0 {
		t.Errorf("after the removal: got %d promised bytes, %v; want 0", u.Promised, err)
	}
}

// TestAbandonDespiteError: on an export, the entry of a failed create is removed even if the directory
// that was placed outside its folder cannot be removed.
func TestAbandonDespiteError(t *testing.T) {
	dir := t.TempDir()
	p := openExportDir(t, dir)
	must(t, p.building.makeTmp(t.Context(), "v.1"))
	must(t, os.Mkdir(filepath.Join(dir, tmpDir, "v.1", DataDir), 0o700))
	must(t, p.placeData("v.1", "placed"))
	must(t, os.Mkdir(filepath.Join(dir, FolderPath("v")), 0o700)) // without a record, so it counts as damaged
	if err := p.building.abandon(t.Context(), "v.1", "v"); !errors.Is(err, volume.ErrDamaged) {
		t.Errorf("got %v, want ErrDamaged", err)
	}
	wantTmp(t, dir, 0)
}
