package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func openExportDir(t *testing.T, dir string) *Pool {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Name: "nas", NFS: &NFS{Server: "nas.lan", Export: "/tank", Init: true}}
	p, err := openBase(c, root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.cleans = true
	if err := p.openExport(t.Context(), nil, "", true); err != nil {
		t.Fatal(err)
	}
	return p
}

func sharedVolume(p *Pool, name string) volume.Volume {
	return volume.Volume{Version: volume.RecordVersion, ID: p.ID("nfs", name), CoName: name, Capacity: 1 << 20, Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete}}
}

func known(p *Pool) map[string]bool {
	known, end := p.ledger.read()
	end()
	return known
}

func nothing(*os.File, bool) error { return nil }

// TestLostReplies: a call that was done and answered with an error is done.
func TestLostReplies(t *testing.T) {
	p := openExportDir(t, t.TempDir())
	v := sharedVolume(p, "v")
	if err := p.CreateDirectory(t.Context(), v, nothing); err != nil {
		t.Fatal(err)
	}
	have, err := p.Lookup("v")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.commit(have, "v.gone.1"); err != nil {
		t.Errorf("a rename that was done: %v", err)
	}
	have.Token = "another's"
	if err := p.commit(have, "v.gone.1"); !errors.Is(err, ErrExists) {
		t.Errorf("another's volume: %v", err)
	}
	a := Attachment{Version: attachmentVersion, Node: "n"}
	if err := p.linkAttachment("v", a); err != nil {
		t.Fatal(err)
	}
	if err := p.linkAttachment("v", a); err != nil {
		t.Errorf("a link that was made: %v", err)
	}
	if err := p.removeAttachment("v", "node"); err != nil {
		t.Fatal(err)
	}
	if err := p.removeAttachment("v", "node"); err != nil {
		t.Errorf("a record that was removed: %v", err)
	}
	if err := p.takeOut("v", p.trash, "v.1"); err != nil {
		t.Fatal(err)
	}
	if err := p.takeOut("v", p.trash, "v.1"); err != nil {
		t.Errorf("a volume that was moved: %v", err)
	}
}

// TestSweep: what a process that ended was making is cleared by another, what one
// that lives is making is not.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	dead, lives, cleans := openExportDir(t, dir), openExportDir(t, dir), openExportDir(t, dir)
	for _, p := range []*Pool{dead, lives} {
		entry, err := p.tmpName("v", "1048576")
		if err == nil {
			err = p.makeTmp(t.Context(), entry)
		}
		if err == nil {
			entry, err = p.tmpName("w", "4096"+growSuffix)
		}
		if err == nil {
			err = p.showGrowth(entry)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := cleans.refresh(t.Context(), func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if u, err := cleans.Usage(); err != nil || u.Promised != 2*(1<<20+4096) {
		t.Errorf("being made are %d bytes: %v", u.Promised, err)
	}
	_ = dead.owner.file.Close() // as the kernel does when a process ends
	if err := cleans.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, tmpDir, "*")); err != nil || len(left) != 2 {
		t.Errorf("left are %v: %v", left, err)
	}
	if err := lives.fill(t.Context(), sharedVolume(lives, "v"), "v."+lives.owner.token+".1048576", func(root *os.Root) error { return root.Mkdir(DataDir, 0o700) }, func(string) error { return nil }); err != nil {
		t.Errorf("one that lives: %v", err)
	}
	// One that was given up too early finds that out.
	err := dead.fill(t.Context(), sharedVolume(dead, "w"), "v."+dead.owner.token+".1048576", func(*os.Root) error { return nil }, func(string) error { return nil })
	if err == nil {
		t.Error("half a volume was committed")
	}
	if owners, err := filepath.Glob(filepath.Join(dir, ownersDir, "*")); err != nil || len(owners) != 2 {
		t.Errorf("owners are %v: %v", owners, err)
	}
}

// TestQuietRounds: a process that is alone reads no folder again, and one that is not
// reads only what is new or has grown.
func TestQuietRounds(t *testing.T) {
	dir := t.TempDir()
	a, b := openExportDir(t, dir), openExportDir(t, dir)
	create := func(p *Pool, name string) {
		t.Helper()
		if err := p.CreateDirectory(t.Context(), sharedVolume(p, name), nothing); err != nil {
			t.Fatal(err)
		}
	}
	create(a, "v")
	a.ledger.set(volumeDir("ghost"), stake{bytes: 1}) // a refresh would drop it
	create(a, "w")
	if v, err := a.Lookup("v"); err != nil {
		t.Fatal(err)
	} else if err := a.Grow(t.Context(), v, 2<<20, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	create(a, "x")
	if !known(a)[volumeDir("ghost")] {
		t.Error("the folders were read though nobody else was there")
	}
	b.ledger.set(volumeDir("w"), stake{bytes: 5}) // known, so not read again
	b.ledger.set(volumeDir("v"), stake{bytes: 5})
	b.rounds.seen = page{Writer: "of old"}
	create(b, "y")
	if got := b.ledger.stakes[volumeDir("v")].bytes; got != 2<<20 {
		t.Errorf("the volume that grew counts %d bytes", got)
	}
	if got := b.ledger.stakes[volumeDir("w")].bytes; got != 5 {
		t.Errorf("a volume that is known was read again: %d", got)
	}
	create(a, "z")
	if known(a)[volumeDir("ghost")] || !known(a)[volumeDir("y")] {
		t.Error("the folders were not read though another was there")
	}
}

// FuzzAttachment: whatever stands in the folder of attachments, reading it ends, with
// a node or an error.
func FuzzAttachment(f *testing.F) {
	f.Add([]byte(`{"version":1,"node":"n"}`))
	f.Add([]byte(`{"version":2,"node":"n"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := parseAttachment(b); err == nil && a.Version != attachmentVersion {
			t.Errorf("%q is read as %+v", b, a)
		}
	})
}

// FuzzEntry: names in tmp that anybody made are told apart, or left.
func FuzzEntry(f *testing.F) {
	f.Add("v.0123.4096")
	f.Add("v.0123.4096.grow")
	f.Add("..")
	f.Fuzz(func(t *testing.T, s string) {
		e, ok := parseEntry(s)
		if ok && (e.bytes() < 0 || e.volume+"."+e.owner+"."+e.what != s) {
			t.Errorf("%q is %+v of %d bytes", s, e, e.bytes())
		}
	})
}

// TestTakeBack has creates end between placing a directory among others' and the
// commit: what was placed goes, but not what is somebody's by then.
func TestTakeBack(t *testing.T) {
	for name, test := range map[string]struct {
		meanwhile func(t *testing.T, other *Pool, placed string)
		stays     bool
	}{
		"nobody has it": {meanwhile: func(*testing.T, *Pool, string) {}},
		"written": {stays: true, meanwhile: func(t *testing.T, _ *Pool, placed string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(placed, "f"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		"adopted": {stays: true, meanwhile: func(t *testing.T, other *Pool, _ string) {
			t.Helper()
			if err := other.CreateDirectory(t.Context(), placedVolume(other, "other"), nothing); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			dead, cleans := openExportDir(t, dir), openExportDir(t, dir)
			entry, err := dead.tmpName("v", "4096")
			if err == nil {
				err = dead.makeTmp(t.Context(), entry)
			}
			if err == nil {
				err = os.Mkdir(filepath.Join(dir, tmpDir, entry, DataDir), 0o700)
			}
			if err == nil {
				err = dead.placeData(entry, "team/v")
			}
			if err != nil {
				t.Fatal(err)
			}
			placed := filepath.Join(dir, "team/v")
			test.meanwhile(t, cleans, placed)
			_ = dead.owner.file.Close() // as the kernel does when a process ends
			if err := cleans.sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(placed); errors.Is(err, os.ErrNotExist) == test.stays {
				t.Errorf("afterwards: %v", err)
			}
			if left, err := filepath.Glob(filepath.Join(dir, tmpDir, "*")); err != nil || len(left) != 0 {
				t.Errorf("left are %v: %v", left, err)
			}
		})
	}
}

func placedVolume(p *Pool, name string) volume.Volume {
	v := sharedVolume(p, name)
	v.Directory = &volume.Directory{SubDir: "team/v", OnDelete: volume.OnDeleteDelete, Mode: 0o777}
	return v
}
