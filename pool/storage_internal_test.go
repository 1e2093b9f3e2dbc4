package pool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// mounted is a section of pools whose records are on their storage. Mounting replaces the directory by a link.
type mounted struct {
	at     string
	fails  error
	mounts int
}

func (*mounted) Kind() Kind                                      { return "mounted" }
func (*mounted) Backend() string                                 { return "mounted" }
func (*mounted) Validate(Config) (string, error)                 { return "", nil }
func (*mounted) String() string                                  { return "storage" }
func (m *mounted) Records(stateDir, pool string) string          { return filepath.Join(stateDir, pool) }
func (m *mounted) Open(Config) Storage                           { return m }
func (*mounted) Scan() error                                     { return nil }
func (*mounted) Usage(u ledger.Usage) ledger.Usage               { return u }
func (*mounted) Find(volume.Volume) (string, int64, error)       { return "", 0, nil }
func (*mounted) Abandon(*os.Root) error                          { return nil }
func (*mounted) Reclaim(context.Context, *os.Root, string) error { return nil }
func (*mounted) Devices() []Device                               { return nil }
func (*mounted) Summary(ledger.Usage) (string, string)           { return "", "" }

// MountRecords implements RecordMounter.
func (m *mounted) MountRecords(_ context.Context, c Config) (func(), error) {
	if m.fails != nil {
		return nil, m.fails
	}
	m.mounts++
	return func() {
		m.mounts--
		_ = os.Remove(c.Directory.Path)
	}, os.Symlink(m.at, c.Directory.Path)
}

// CheckMounted implements RecordMounter.
func (m *mounted) CheckMounted(Config) error {
	if m.mounts == 0 {
		return volume.Errorf(volume.ErrUnavailable, "not mounted")
	}
	return nil
}

// idSection is a section of a record with an ID that the storage assigns.
type idSection struct {
	ID string `json:"id"`
}

func (*idSection) Check() error                  { return nil }
func (*idSection) Parameters() map[string]string { return nil }

// TestRecordMounter: the records are mounted before a pool is opened, and unmounted after it is closed or could not be
// opened. The record of a new volume has what the function that creates the data has added.
func TestRecordMounter(t *testing.T) {
	state, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	m := &mounted{at: t.TempDir()}
	c := Config{Name: "p", Section: m}
	forms := volume.Forms{{Name: "mounted", Section: func() volume.Section { return new(idSection) }}}
	p, err := Open(t.Context(), forms, c, state, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &idSection{ID: "before"}
	v := volume.Volume{Version: volume.RecordVersion, ID: p.ID("mounted", "v"), CoName: "v", Capacity: 1 << 20, FSType: "ext4", SectorSize: 512, Section: s}
	err = p.Create(t.Context(), v, func(dir *os.Root) error {
		b, err := dir.ReadFile(recordFile) // it is written before the data
		if err == nil {
			var written volume.Volume
			if written, err = forms.ParseVolume(b); err == nil && written.Section.(*idSection).ID != "before" {
				t.Errorf("got section %+v while the data is created", written.Section)
			}
		}
		s.ID = "after"
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Lookup("v")
	if err != nil || got.Section.(*idSection).ID != "after" {
		t.Errorf("got record %+v, %v; want the ID that was assigned", got, err)
	}
	if reader, err := OpenReadOnly(t.Context(), forms, c, state.Name()); err != nil {
		t.Errorf("reading the open pool: %v", err)
	} else {
		reader.Close()
	}
	p.Close()
	if _, err := OpenReadOnly(t.Context(), forms, c, state.Name()); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("reading the closed pool: got %v, want ErrUnavailable", err)
	}
	if m.mounts != 0 {
		t.Error("the records of a closed pool are mounted")
	}
	if err := os.WriteFile(filepath.Join(m.at, markerFile), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), forms, c, state, nil); !errors.Is(err, volume.ErrDamaged) || m.mounts != 0 {
		t.Errorf("opening a damaged pool: got %v with %d mounts, want ErrDamaged and none", err, m.mounts)
	}
	m.fails = volume.Errorf(volume.ErrPrecondition, "no storage")
	if _, err := Open(t.Context(), forms, c, state, nil); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("without the storage: got %v, want ErrPrecondition", err)
	}
}
