package pool_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// plants are functions that make a foreign file in place of a file of the driver, by kind of file.
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

// promptly returns the result of a step. It fails the test if the step waits for a planted file.
func promptly(t *testing.T, step func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- step() }()
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("timed out: the step waits for a planted file")
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
			replace := func(name string) (undo func()) {
				t.Helper()
				path := filepath.Join(e.dir, "volumes", kind, name)
				if err := os.Rename(path, path+".away"); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
				must(t, plant(path))
				return func() {
					must(t, os.Remove(path))
					_ = os.Rename(path+".away", path)
				}
			}
			undo := replace("volume.json")
			wantError(t, promptly(t, func() error { _, err := p.Lookup(kind); return err }), volume.ErrDamaged, kind)
			wantError(t, promptly(t, func() error { _, _, err := p.List("nfs", "", 100); return err }), nil)
			// SyncVolume opens no file of an export, so that the server grants no delegation.
			must(t, promptly(t, func() error { return p.SyncVolume(kind) }))
			undo()

			undo = replace("attached/node")
			must(t, promptly(t, func() error { return p.SyncVolume(kind) }))
			wantError(t, promptly(t, func() error { _, err := p.Attachments.List(kind); return err }), volume.ErrDamaged, "attached/node")
			undo()

			undo = replace("image")
			if kind != "huge" { // a regular file is not refused
				_, err := p.Images.Open(kind, os.O_RDONLY)
				wantError(t, err, volume.ErrDamaged, "not a regular file")
				wantError(t, promptly(t, func() error { _, err := p.Images.Lock(kind); return err }), volume.ErrDamaged, "not a regular file")
			}
			undo()

			undo = replace("lock")
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
	// One link leads to another volume of the pool, the other one leads out of the pool.
	must(t, os.Symlink("victim", filepath.Join(e.dir, "volumes/own")))
	must(t, os.Symlink("/etc", filepath.Join(e.dir, "volumes/etc")))
	for _, name := range []string{"own", "etc"} {
		_, err := p.Lookup(name)
		if !errors.Is(err, volume.ErrDamaged) && !errors.Is(err, volume.ErrNotFound) {
			t.Errorf("%s: Lookup returned %v, want ErrDamaged or ErrNotFound", name, err)
		}
		if _, err := p.Attachments.List(name); err == nil {
			t.Errorf("%s: List followed the link", name)
		}
		if err := p.Attachments.Detach(name, ""); err == nil {
			t.Errorf("%s: Detach followed the link", name)
		}
		if err := p.Attachments.Attach(name, pool.Attachment{Node: "b"}); err == nil {
			t.Errorf("%s: Attach followed the link", name)
		}
		if err := p.Images.BeginFormat(name); err == nil {
			t.Errorf("%s: BeginFormat followed the link", name)
		}
	}
	if at, err := p.Attachments.List("victim"); err != nil || len(at) != 1 || at[0].Node != "a" {
		t.Errorf("attachments of the victim: got %v, %v; want one to node a", at, err)
	}
}

// TestPlantedInPool: a foreign file in place of a pool's own file causes an error with its name, or is
// ignored. Foreign files in the pool's folders do not prevent the use of the pool.
func TestPlantedInPool(t *testing.T) {
	testenv.RequireRoot(t)
	for kind, plant := range plants {
		for _, name := range []string{"pool.json", ".trivet/ledger", ".trivet/reaper"} {
			t.Run(kind+" "+filepath.Base(name), func(t *testing.T) {
				if kind == "huge" && name != "pool.json" { // a regular file is not refused
					return
				}
				e := newExport(t)
				e.open(t)
				path := filepath.Join(e.dir, name)
				_ = os.Remove(path)
				must(t, plant(path))
				var s *pool.Set
				must(t, promptly(t, func() error { s = e.process(t, maintaining); return nil }))
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
		t.Run(kind+" in each folder", func(t *testing.T) {
			e := newExport(t)
			addDirectory(t, e.open(t), "v", "", volume.OnDeleteDelete)
			for _, dir := range []string{"volumes", ".trivet/tmp", ".trivet/trash", ".trivet/owners"} {
				must(t, plant(filepath.Join(e.dir, dir, "planted")))
				must(t, plant(filepath.Join(e.dir, dir, "planted.a.1.grow"))) // named like an announced growth
			}
			p := e.open(t)
			addDirectory(t, p, "w", "", volume.OnDeleteDelete)
			e.awaitEmptyTrash(t)
			e.wantEmptyTmp(t)
		})
	}
}

// TestStuckLeftovers: an entry of tmp that cannot be removed stays, and the pool works.
func TestStuckLeftovers(t *testing.T) {
	e := newExport(t)
	e.open(t)
	e.mkdir(t, ".trivet/tmp/"+strings.Repeat("x", 255)) // too long for the suffix of entries in the trash
	p := e.open(t)
	v := addDirectory(t, p, "v", "", volume.OnDeleteDelete)
	must(t, p.Remove(t.Context(), v))
	e.awaitEmptyTrash(t)
}

// TestOtherName: a shared pool is not opened under another name, because the IDs of its volumes contain
// the name. A direct pool has several names.
func TestOtherName(t *testing.T) {
	e := newExport(t)
	addDirectory(t, e.open(t), "v", "", volume.OnDeleteDelete)
	other := e
	other.cfg.Name = "other"
	other.wantRefused(t, maintaining, volume.ErrPrecondition, `"nas"`, "use that name")
	name, err := volume.DirectPool("nas.lan", "/tank")
	must(t, err)
	direct := e
	direct.cfg, _ = pool.DirectConfig(name)
	direct.wantRefused(t, maintaining, volume.ErrPrecondition, "pool: nas")
	// Two names of one server are two direct pools.
	d := newExport(t)
	d.cfg = direct.cfg
	s := d.process(t, maintaining)
	s.Initialise(context.Background())
	_, err = s.Named(name)
	must(t, err)
	d.cfg.Name, err = volume.DirectPool("10.0.0.1", "/tank")
	must(t, err)
	_, err = d.process(t, maintaining).Named(d.cfg.Name)
	must(t, err)
	d.cfg.Name = "nas"
	d.wantRefused(t, maintaining, volume.ErrPrecondition, "server", "share")
}
