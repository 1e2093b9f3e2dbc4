package pool_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// plants make foreign files in place of a file of the driver.
var plants = map[string]func(path string) error{
	"pipe":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
	"device": func(path string) error { return syscall.Mknod(path, syscall.S_IFCHR|0o600, 1<<8|5) }, // /dev/zero
	"socket": func(path string) error { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) },
	"folder": func(path string) error { return os.Mkdir(path, 0o700) },
	"link":   func(path string) error { return os.Symlink("/etc/hostname", path) },
	"huge": func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40))
	},
}

// promptly fails a test whose step waits for what was planted.
func promptly(t *testing.T, step func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- step() }()
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("it hangs")
		return nil
	}
}

// TestPlantedInVolume: a foreign file in place of a volume's own file is neither followed nor
// waited for, and the volume is damaged.
func TestPlantedInVolume(t *testing.T) {
	testenv.RequireRoot(t)
	e := newExport(t)
	p := e.open(t)
	for kind, plant := range plants {
		t.Run(kind, func(t *testing.T) {
			v := addDirectory(t, p, kind, "", volume.OnDeleteDelete)
			must(t, p.Attachments.Attach(v.ID.Name, pool.Attachment{Node: "a"}))
			at := func(name string) string { return filepath.Join(e.dir, "volumes", kind, name) }
			place := func(path string) (undo func()) {
				t.Helper()
				if err := os.Rename(path, path+".away"); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
				must(t, plant(path))
				return func() {
					must(t, os.Remove(path))
					_ = os.Rename(path+".away", path)
				}
			}
			undo := place(at("volume.json"))
			wantError(t, promptly(t, func() error { _, err := p.Lookup(kind); return err }), volume.ErrDamaged, kind)
			wantError(t, promptly(t, func() error { _, _, err := p.List("nfs", "", 100); return err }), nil)
			// Nothing of an export is opened to be synced, so that no delegation is granted.
			must(t, promptly(t, func() error { return p.SyncVolume(kind) }))
			undo()

			undo = place(at("attached/node"))
			must(t, promptly(t, func() error { return p.SyncVolume(kind) }))
			wantError(t, promptly(t, func() error { _, err := p.Attachments.List(kind); return err }), volume.ErrDamaged, "attached/node")
			undo()

			undo = place(at("image"))
			if kind != "huge" { // a file like any
				_, err := p.Images.Open(kind, os.O_RDONLY)
				wantError(t, err, volume.ErrDamaged, "not a regular file")
				wantError(t, promptly(t, func() error { _, err := p.Images.Lock(kind); return err }), volume.ErrDamaged, "not a regular file")
			}
			undo()

			undo = place(at("lock"))
			err := promptly(t, func() error {
				lock, err := p.LockVolume(t.Context(), kind)
				if err == nil {
					lock.Close()
				}
				return err
			})
			if kind != "huge" {
				wantError(t, err, volume.ErrPrecondition, "lock", "remove")
			}
			undo()
			must(t, p.Attachments.Detach(kind, ""))
			must(t, p.Remove(t.Context(), v))
		})
	}
	e.awaitEmptyTrash(t)
}

// TestPlantedFolder: no operation follows a link in place of a volume's folder.
func TestPlantedFolder(t *testing.T) {
	e := newExport(t)
	p := e.open(t)
	addDirectory(t, p, "victim", "", volume.OnDeleteDelete)
	must(t, p.Attachments.Attach("victim", pool.Attachment{Node: "a"}))
	must(t, os.Symlink("victim", filepath.Join(e.dir, "volumes/own")))
	must(t, os.Symlink("/etc", filepath.Join(e.dir, "volumes/etc")))
	for _, name := range []string{"own", "etc"} {
		_, err := p.Lookup(name)
		if !errors.Is(err, volume.ErrDamaged) && !errors.Is(err, volume.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := p.Attachments.List(name); err == nil {
			t.Errorf("%s: attachments of another were read", name)
		}
		if err := p.Attachments.Detach(name, ""); err == nil {
			t.Errorf("%s: detached", name)
		}
		if err := p.Attachments.Attach(name, pool.Attachment{Node: "b"}); err == nil {
			t.Errorf("%s: attached", name)
		}
		if err := p.Images.BeginFormat(name); err == nil {
			t.Errorf("%s: marked", name)
		}
	}
	if at, err := p.Attachments.List("victim"); err != nil || len(at) != 1 || at[0].Node != "a" {
		t.Errorf("the victim is attached to %v, %v", at, err)
	}
}

// TestPlantedInPool: the error for a foreign file in place of a pool's own file names the file.
// Foreign files in the pool's folders do not prevent its use.
func TestPlantedInPool(t *testing.T) {
	testenv.RequireRoot(t)
	for kind, plant := range plants {
		for _, name := range []string{"pool.json", ".trivet/ledger", ".trivet/reaper"} {
			t.Run(kind+" "+filepath.Base(name), func(t *testing.T) {
				if kind == "huge" && name != "pool.json" { // a file like any
					return
				}
				e := newExport(t)
				e.open(t)
				path := filepath.Join(e.dir, name)
				_ = os.Remove(path)
				must(t, plant(path))
				var s *pool.Set
				must(t, promptly(t, func() error { s = e.process(t, true); return nil }))
				p, err := s.Named("nas")
				if name == "pool.json" {
					wantError(t, s.States()[0].Err, volume.ErrDamaged, "pool.json")
					return
				}
				must(t, err)
				err = promptly(t, func() error {
					return p.CreateDirectory(t.Context(), directory(p, "v", "", volume.OnDeleteDelete), nil, open777)
				})
				if name == ".trivet/ledger" {
					wantError(t, err, volume.ErrPrecondition, "ledger", "remove")
				} else {
					must(t, err)
				}
			})
		}
		t.Run(kind+" everywhere", func(t *testing.T) {
			e := newExport(t)
			addDirectory(t, e.open(t), "v", "", volume.OnDeleteDelete)
			for _, dir := range []string{"volumes", ".trivet/tmp", ".trivet/trash", ".trivet/owners"} {
				must(t, plant(filepath.Join(e.dir, dir, "planted")))
				must(t, plant(filepath.Join(e.dir, dir, "planted.a.1.grow")))
			}
			p := e.open(t)
			addDirectory(t, p, "w", "", volume.OnDeleteDelete)
			e.awaitEmptyTrash(t)
			if left := e.names(t, ".trivet/tmp"); left != "" {
				t.Errorf("left in tmp: %s", left)
			}
		})
	}
}

// TestStuckLeftovers: an entry that cannot be cleared stays, and the pool works.
func TestStuckLeftovers(t *testing.T) {
	e := newExport(t)
	e.open(t)
	long := make([]byte, 255)
	for i := range long {
		long[i] = 'x'
	}
	e.mkdir(t, ".trivet/tmp/"+string(long)) // it has no room for what discard adds
	p := e.open(t)
	v := addDirectory(t, p, "v", "", volume.OnDeleteDelete)
	must(t, p.Remove(t.Context(), v))
	e.awaitEmptyTrash(t)
}

// TestOtherName: the IDs of a shared pool's volumes contain its name, so another name is refused.
func TestOtherName(t *testing.T) {
	e := newExport(t)
	addDirectory(t, e.open(t), "v", "", volume.OnDeleteDelete)
	other := e
	other.cfg.Name = "other"
	other.refuses(t, true, volume.ErrPrecondition, `"nas"`, "use that name")
	name, err := volume.DirectPool("nas.lan", "/tank")
	must(t, err)
	direct := e
	direct.cfg, _ = pool.DirectConfig(name)
	direct.refuses(t, true, volume.ErrPrecondition, "pool: nas")
	// Two names of one server are two direct pools.
	d := newExport(t)
	d.cfg = direct.cfg
	s := d.process(t, true)
	s.Initialise(context.Background())
	_, err = s.Named(name)
	must(t, err)
	d.cfg.Name, err = volume.DirectPool("10.0.0.1", "/tank")
	must(t, err)
	_, err = d.process(t, true).Named(d.cfg.Name)
	must(t, err)
	d.cfg.Name = "nas"
	d.refuses(t, true, volume.ErrPrecondition, "server", "share")
}
