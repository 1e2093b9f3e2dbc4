//go:build vm

package nfsvolume_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/nfsvolume"
)

// machine has the plugin, and one volume of a server.
type machine struct {
	*nfsvolume.Plugin
	servers *mount.NFSUnmounter
	server  *nfsd.Server
	export  string
	path    string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{servers: mount.NewNFSUnmounter(), server: nfsd.Start(t, nfsd.Options{})}
	m.Plugin = nfsvolume.New(host{root: t.TempDir()}, m.servers)
	m.servers.Patience = 0
	m.export = m.server.Export(t, "tank")
	t.Cleanup(func() { m.down(t) })
	return m
}

func (m *machine) up(t *testing.T, spec *plugins.Spec) error {
	t.Helper()
	mounter, err := m.NewMounter(spec, pod())
	must(t, err)
	m.path = mounter.Path()
	return mounter.SetUp(t.Context(), plugins.MounterArgs{})
}

// down takes the volume down, as often as that takes.
func (m *machine) down(t *testing.T) {
	t.Helper()
	u, err := m.NewUnmounter("data", "one")
	must(t, err)
	must(t, retry.For(context.Background(), time.Minute, func() (bool, error) {
		err := u.TearDown(context.Background())
		return err != nil, err
	}))
	if _, err := os.Lstat(m.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
}

func wantText(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s has %q, %v; want %q", path, b, err, want)
	}
}

func TestNFS(t *testing.T) {
	m := newMachine(t)
	for name, spec := range map[string]*plugins.Spec{
		"inline":     inline(m.server.Address(), m.export),
		"IPv6":       inline(m.server.Address6(), m.export+"/"),
		"persistent": persistent(m.server.Address(), m.export, "nfsvers=4.1", "noatime"),
	} {
		t.Run(name, func(t *testing.T) {
			must(t, m.up(t, spec))
			before, err := mount.OnPath(m.path)
			must(t, err)
			must(t, os.WriteFile(m.path+"/"+name, []byte("text"), 0o600))
			must(t, m.up(t, spec))
			if after, err := mount.OnPath(m.path); err != nil || after.ID != before.ID {
				t.Errorf("it was mounted anew: %+v, %v", after, err)
			}
			if name == "persistent" && (!strings.Contains(before.VFSOptions, "vers=4.1") || !strings.Contains(before.Options, "noatime")) {
				t.Errorf("the mount is %+v", before)
			}
			m.down(t)
			wantText(t, m.server.Dir(m.export)+"/"+name, "text")
		})
	}
	t.Run("read-only", func(t *testing.T) {
		spec := inline(m.server.Address(), m.export)
		spec.Volume.NFS.ReadOnly = true
		must(t, m.up(t, spec))
		if err := os.WriteFile(m.path+"/file", nil, 0o600); !errors.Is(err, syscall.EROFS) {
			t.Errorf("writing says %v", err)
		}
		m.down(t)
	})
	t.Run("bad", func(t *testing.T) {
		err := m.up(t, inline(m.server.Address(), "/missing"))
		if !errors.Is(err, mount.ErrExportMissing) {
			t.Errorf("a missing directory: %v", err)
		}
		var invalid *plugins.InvalidError
		if err := m.up(t, persistent(m.server.Address(), m.export, "no-such-option")); !errors.As(err, &invalid) {
			t.Errorf("an option that there is not: %v", err)
		}
		if _, err := os.Lstat(m.path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory is still there: %v", err)
		}
	})
}

// TestNFSSilent: with its server gone a volume can be set up again and be taken down, and
// nothing hangs.
func TestNFSSilent(t *testing.T) {
	m := newMachine(t)
	spec := inline(m.server.Address(), m.export)
	must(t, m.up(t, spec))
	must(t, os.WriteFile(m.path+"/file", []byte("flushed"), 0o600))
	f, err := os.Create(m.path + "/dirty")
	must(t, err)
	_, err = f.Write(make([]byte, 1<<20))
	must(t, err)
	m.server.Link().Cut(t)
	go f.Close() // waits until it is given up
	must(t, m.up(t, spec))

	m.servers.Patience = time.Hour
	u, err := m.NewUnmounter("data", "one")
	must(t, err)
	if err := u.TearDown(t.Context()); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("within the patience: %v", err)
	}
	if e, err := mount.OnPath(m.path); err != nil || e == nil {
		t.Errorf("it was given up: %v", err)
	}
	m.servers.Patience = 0
	m.down(t)
	m.server.Link().Restore(t)
	wantText(t, filepath.Join(m.server.Dir(m.export), "file"), "flushed")
	must(t, m.up(t, spec))
	wantText(t, m.path+"/file", "flushed")
}

func TestNFSRecycle(t *testing.T) {
	m := newMachine(t)
	dir := m.server.Dir(m.export)
	must(t, os.MkdirAll(dir+"/a/b/c", 0o755))
	must(t, os.WriteFile(dir+"/a/b/file", nil, 0o600))
	must(t, os.Symlink("/etc", dir+"/link"))
	must(t, syscall.Mkfifo(dir+"/pipe", 0o600))
	pv := persistent(m.server.Address(), m.export).PersistentVolume
	must(t, m.Recycle(t.Context(), pv))
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("there still is %v, %v", left, err)
	}

	// The server goes away meanwhile, and comes back.
	const files = 2000
	for i := range files {
		must(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600))
	}
	ctx, cancel := context.WithCancel(t.Context())
	recycled := make(chan error, 1)
	go func() { recycled <- m.Recycle(ctx, pv) }()
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		left, err := os.ReadDir(dir)
		if err == nil && len(left) == files {
			err = errors.New("nothing is removed yet")
		}
		return err != nil, err
	}))
	m.server.Link().Cut(t)
	cancel()
	if err := <-recycled; err == nil {
		t.Error("a silent server's volume was recycled")
	}
	m.server.Link().Restore(t)
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		err := m.Recycle(t.Context(), pv)
		return err != nil, err
	}))
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("there still is %v, %v", left, err)
	}
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Error(err)
	}
}

// TestNFSSwept: the mount of a call of Recycle that was cut off goes, though no other call
// comes for it, and nothing is removed through it.
func TestNFSSwept(t *testing.T) {
	root := t.TempDir()
	m := newMachine(t)
	m.Plugin = nfsvolume.New(host{root: root}, m.servers)
	must(t, m.up(t, inline(m.server.Address(), m.export)))
	must(t, os.WriteFile(m.path+"/file", []byte("text"), 0o600))
	at := filepath.Join(plugins.Paths{Root: root}.Plugin(nfsvolume.Name), "recycling/gone")
	must(t, os.MkdirAll(at, 0o750))
	must(t, mount.Bind(m.path, at, mount.Options{}))
	must(t, m.Run(t.Context()))
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	wantText(t, m.path+"/file", "text")
}
