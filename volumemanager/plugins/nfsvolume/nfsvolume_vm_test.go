//go:build vm

package nfsvolume_test

import (
	"context"
	"errors"
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
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// machine is the plugin and an NFS server with one export.
type machine struct {
	*nfsvolume.Plugin
	nfsUnmounter *mount.NFSUnmounter
	server       *nfsd.Server
	export       string
	// path is the path of the volume after a call of the method up.
	path string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{nfsUnmounter: mount.NewNFSUnmounter(), server: nfsd.Start(t, nfsd.Options{})}
	m.Plugin = nfsvolume.New(plugintest.NewHost(t.TempDir()), m.nfsUnmounter)
	m.nfsUnmounter.Patience = 0
	m.export = m.server.Export(t, "tank")
	t.Cleanup(func() { m.down(t) })
	return m
}

// up sets a volume up.
func (m *machine) up(t *testing.T, spec *plugins.Spec) error {
	t.Helper()
	mounter := plugintest.Value(m.NewMounter(spec, pod()))(t)
	m.path = mounter.Path()
	return mounter.SetUp(t.Context(), plugins.MounterArgs{})
}

// down unmounts the volume, with retries.
func (m *machine) down(t *testing.T) {
	t.Helper()
	u := plugintest.Value(m.NewUnmounter("data", "one"))(t)
	must(t, retry.For(context.Background(), time.Minute, func() (bool, error) {
		err := u.TearDown(context.Background())
		return err != nil, err
	}))
	plugintest.WantMissing(t, m.path)
}

// TestNFS: a volume shows the server's directory, over IPv4 and IPv6, with the mount options. A failed SetUp
// leaves nothing.
func TestNFS(t *testing.T) {
	m := newMachine(t)
	for name, spec := range map[string]*plugins.Spec{
		"inline":     inline(m.server.Address(), m.export),
		"IPv6":       inline(m.server.Address6(), m.export+"/"),
		"persistent": persistent(m.server.Address(), m.export, "nfsvers=4.1", "noatime"),
	} {
		t.Run(name, func(t *testing.T) {
			must(t, m.up(t, spec))
			before := plugintest.MountAt(t, m.path)
			must(t, os.WriteFile(m.path+"/"+name, []byte("text"), 0o600))
			must(t, m.up(t, spec))
			if after := plugintest.MountAt(t, m.path); after.ID != before.ID {
				t.Errorf("the volume was mounted again: got %+v, want %+v", after, before)
			}
			if name == "persistent" && (!strings.Contains(before.VFSOptions, "vers=4.1") || !strings.Contains(before.Options, "noatime")) {
				t.Errorf("got mount %+v, want one with the mount options", before)
			}
			m.down(t)
			plugintest.WantText(t, m.server.Dir(m.export)+"/"+name, "text")
		})
	}
	t.Run("read-only", func(t *testing.T) {
		spec := inline(m.server.Address(), m.export)
		spec.Volume.NFS.ReadOnly = true
		must(t, m.up(t, spec))
		if err := os.WriteFile(m.path+"/file", nil, 0o600); !errors.Is(err, syscall.EROFS) {
			t.Errorf("write to a read-only volume: got %v, want EROFS", err)
		}
		m.down(t)
	})
	t.Run("errors", func(t *testing.T) {
		err := m.up(t, inline(m.server.Address(), "/missing"))
		if !errors.Is(err, mount.ErrExportMissing) {
			t.Errorf("a directory that the server lacks: got %v, want ErrExportMissing", err)
		}
		plugintest.WantInvalid(t, m.up(t, persistent(m.server.Address(), m.export, "no-such-option")), "no-such-option")
		plugintest.WantMissing(t, m.path)
	})
}

// TestNFSSilent: a volume of an unreachable server can be set up again and unmounted, and no call
// hangs.
func TestNFSSilent(t *testing.T) {
	m := newMachine(t)
	spec := inline(m.server.Address(), m.export)
	must(t, m.up(t, spec))
	must(t, os.WriteFile(m.path+"/file", []byte("flushed"), 0o600))
	f := plugintest.Value(os.Create(m.path + "/dirty"))(t)
	plugintest.Value(f.Write(make([]byte, 1<<20)))(t)
	m.server.Link().Cut(t)
	go f.Close() // waits until the mount is aborted
	must(t, m.up(t, spec))

	m.nfsUnmounter.Patience = time.Hour
	u := plugintest.Value(m.NewUnmounter("data", "one"))(t)
	plugintest.WantError(t, u.TearDown(t.Context()), "does not answer")
	if plugintest.MountAt(t, m.path) == nil {
		t.Error("the volume was unmounted before NFSUnmounter.Patience had passed")
	}
	m.nfsUnmounter.Patience = 0
	m.down(t)
	m.server.Link().Restore(t)
	plugintest.WantText(t, filepath.Join(m.server.Dir(m.export), "file"), "flushed")
	must(t, m.up(t, spec))
	plugintest.WantText(t, m.path+"/file", "flushed")
}

// TestNFSRecycle: Recycle empties the server's directory, and does not follow links. A call during which the
// server becomes unreachable ends with its context, and a later call removes the rest.
func TestNFSRecycle(t *testing.T) {
	m := newMachine(t)
	dir := m.server.Dir(m.export)
	must(t, os.MkdirAll(dir+"/a/b/c", 0o755))
	must(t, os.WriteFile(dir+"/a/b/file", nil, 0o600))
	must(t, os.Symlink("/etc", dir+"/link"))
	must(t, syscall.Mkfifo(dir+"/pipe", 0o600))
	pv := persistent(m.server.Address(), m.export).PersistentVolume
	must(t, m.Recycle(t.Context(), pv))
	plugintest.WantEntries(t, dir, 0)

	// The server becomes unreachable during the next call.
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
		t.Error("got no error from Recycle while the server was unreachable")
	}
	m.server.Link().Restore(t)
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) {
		err := m.Recycle(t.Context(), pv)
		return err != nil, err
	}))
	plugintest.WantEntries(t, dir, 0)
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Error(err)
	}
}

// TestNFSSwept: Run unmounts the mount of an interrupted call of Recycle without another call, and
// removes no content.
func TestNFSSwept(t *testing.T) {
	root := t.TempDir()
	m := newMachine(t)
	m.Plugin = nfsvolume.New(plugintest.NewHost(root), m.nfsUnmounter)
	must(t, m.up(t, inline(m.server.Address(), m.export)))
	must(t, os.WriteFile(m.path+"/file", []byte("text"), 0o600))
	at := filepath.Join(plugins.Paths{Root: root}.Plugin(nfsvolume.Name), "recycling/interrupted")
	must(t, os.MkdirAll(at, 0o750))
	must(t, mount.Bind(m.path, at, mount.Options{}))
	must(t, m.Run(t.Context()))
	plugintest.WantMissing(t, at)
	plugintest.WantText(t, m.path+"/file", "text")
}
