package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// openPlain opens a node-local pool, and returns its directory.
func openPlain(t *testing.T) (*Pool, string) {
	t.Helper()
	dir := t.TempDir()
	return newPlace(t, dir).open(t), filepath.Join(dir, "pool")
}

// stopTasks ends a pool's background work, so that a test may change what that reads.
func stopTasks(p *Pool) {
	p.stop()
	p.tasks.Wait()
}

// TestNoAttachedFolder: a volume without a folder for attachments can be published.
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
			t.Errorf("%s: published to %v: %v", dir, all, err)
		}
	}
}

// failingSync is a medium that links, and then cannot make durable what it did.
type failingSync struct{ Medium }

func (m failingSync) Link(file, folder *os.File, link func() error) error {
	return m.Medium.Link(file, folder, func() error { return errors.Join(link(), file.Close()) })
}

func (m failingSync) SyncNames(*os.File) error { return os.ErrClosed }

// TestAttachNotDurable: a publication that is recorded but not durable fails, and counts as
// published. It is not mistaken for a link that succeeded with a lost reply.
func TestAttachNotDurable(t *testing.T) {
	p, _ := openPlain(t)
	v := directoryVolume(p, "v", 4096)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	stopTasks(p)
	medium := p.medium
	p.medium = failingSync{medium}
	defer func() { p.medium = medium }()
	if err := p.Attachments.Attach("v", Attachment{Node: "n"}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file was not made durable: %v", err)
	}
	if n := p.AttachedCount(v.ID.Backend); n != 1 {
		t.Errorf("%d volumes count as published, want the one that is recorded", n)
	}
	must(t, p.Attachments.Attach("v", Attachment{Node: "n"}))
}

// TestPlaceNotDurable: a directory that was moved to its place, but not durably, is not mistaken
// for a move that succeeded with a lost reply.
func TestPlaceNotDurable(t *testing.T) {
	p, at := openPlain(t)
	stopTasks(p)
	medium := p.medium
	p.medium = failingSync{medium}
	defer func() { p.medium = medium }()
	must(t, p.building.makeTmp(t.Context(), "v"))
	must(t, os.Mkdir(filepath.Join(at, tmpDir, "v", DataDir), 0o700))
	if err := p.placeData("v", "placed"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the place was not made durable: %v", err)
	}
	if _, err := os.Stat(filepath.Join(at, "placed")); err != nil {
		t.Error(err)
	}
}

// TestSoleWriterRemoves: in a node-local pool, a missing volume or entry of the trash does not
// count as removed by another process.
func TestSoleWriterRemoves(t *testing.T) {
	p, _ := openPlain(t)
	stopTasks(p)
	if err := p.takeOut("missing", p.trash, "missing.1"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("deleting a missing volume: %v", err)
	}
	p.Trash.movedToTrash(FolderPath("v"), "v.1", ledger.Reservation{Bytes: 4096})
	u, err := p.Usage()
	if err != nil || u.Trash != 1 || u.Promised != 4096 {
		t.Errorf("%d entries are in the trash, and %d bytes promised, %v; want one of 4096", u.Trash, u.Promised, err)
	}
	must(t, p.Trash.reapEntry(t.Context(), &trashEntry{name: "v.1"}))
	if u, err := p.Usage(); err != nil || u.Promised != 0 {
		t.Errorf("%d bytes are promised after the removal, %v", u.Promised, err)
	}
}

// TestAbandonDespiteError: an entry that another process could still commit is removed, even if the
// placed directory cannot be removed.
func TestAbandonDespiteError(t *testing.T) {
	dir := t.TempDir()
	p := openExportDir(t, dir)
	must(t, p.building.makeTmp(t.Context(), "v.1"))
	must(t, os.Mkdir(filepath.Join(dir, tmpDir, "v.1", DataDir), 0o700))
	must(t, p.placeData("v.1", "placed"))
	must(t, os.Mkdir(filepath.Join(dir, FolderPath("v")), 0o700)) // it has no record
	if err := p.building.abandon(t.Context(), "v.1", "v"); !errors.Is(err, volume.ErrDamaged) {
		t.Errorf("it says %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, tmpDir)); err != nil || len(left) != 0 {
		t.Errorf("left are %v: %v", left, err)
	}
}
