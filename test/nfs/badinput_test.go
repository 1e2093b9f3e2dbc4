//go:build vm

package nfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// TestBadInput makes mistakes of administrators. The driver reports each; no data is lost and
// no mount is left.
func TestBadInput(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	t.Run("classes", func(t *testing.T) { testClasses(t, server) })
	t.Run("mount flags", func(t *testing.T) { testMountFlags(t, server) })
	t.Run("configuration", func(t *testing.T) { testConfiguration(t, server) })
	t.Run("another server", func(t *testing.T) { testAnotherServer(t, server) })
	t.Run("two pools", func(t *testing.T) { testTwoPools(t, server) })
	t.Run("clocks", func(t *testing.T) { testClocks(t, server) })
}

// createOnceOpen is tryCreate, repeated while the pool is being opened.
func (m *machine) createOnceOpen(t *testing.T, name string, size int64, c *csi.VolumeCapability, parameters map[string]string) (v *vol, err error) {
	err = retry.For(t.Context(), patience, func() (again bool, err error) {
		v, err = m.tryCreate(t, name, size, c, parameters)
		return err != nil && strings.Contains(err.Error(), "being opened"), err
	})
	return v, err
}

// testClasses tests the parameters server and share of a StorageClass.
func testClasses(t *testing.T, server *nfsd.Server) {
	share := server.Export(t, "classes")
	server.Export(t, "kerberos", "sec=krb5")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, server.Export(t, "classes-nas")))
	for _, tc := range []struct {
		name, server, share string
		code                codes.Code
		says                []string
	}{
		{"no such host", "no-such-host.invalid", share, codes.Unavailable, []string{"no-such-host.invalid", "does not resolve"}},
		{"no such export", server.Address(), "/missing", codes.Unavailable, []string{"/missing", "no such directory"}},
		{"no right to it", server.Address(), "/kerberos", codes.Unavailable, []string{"/kerberos"}},
		{"no server there", "127.0.0.1", share, codes.Unavailable, []string{"127.0.0.1", "does not answer"}},
		{"no slash", server.Address(), strings.TrimPrefix(share, "/"), codes.InvalidArgument, []string{"share", share}},
		{"upwards", server.Address(), share + "/..", codes.InvalidArgument, []string{"share", ".."}},
		{"a port", server.Address() + ":2049", share, codes.InvalidArgument, []string{"server", "port"}},
		{"an open bracket", "[" + server.Address6(), share, codes.InvalidArgument, []string{"server", "bracket"}},
		{"a path", server.Address() + ":/x", share, codes.InvalidArgument, []string{"server"}},
		{"no share", server.Address(), "", codes.InvalidArgument, []string{"share"}},
		{"no server", "", share, codes.InvalidArgument, []string{"server"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := m.createOnceOpen(t, "bad", mib, filesystem("", manyNodes), map[string]string{"server": tc.server, "share": tc.share})
			wantCode(t, err, tc.code, tc.says...)
		})
	}
	var ids []string
	for _, address := range []string{server.Address6(), "[" + server.Address6() + "]"} {
		t.Run(address, func(t *testing.T) {
			parameters := map[string]string{"server": address, "share": share}
			directory, err := m.createOnceOpen(t, "directory", mib, filesystem("", manyNodes), parameters)
			must(t, err)
			parameters["backend"] = "loop"
			image, err := m.createOnceOpen(t, "image", 32*mib, filesystem("ext4", oneNode), parameters)
			must(t, err)
			for _, v := range []*vol{directory, image} {
				m.up(t, v)
				write(t, m.file(v, "data"), address)
				wantText(t, m.file(v, "data"), address)
				m.remove(t, v)
			}
			ids = append(ids, directory.id+" "+image.id)
		})
	}
	if len(ids) != 2 || ids[0] != ids[1] {
		t.Errorf("two addresses of one server resulted in volumes %q, want the same IDs", ids)
	}
}

// testMountFlags tests mountOptions of a StorageClass.
func testMountFlags(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "flags")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	directory, image := m.directory(t, "nas", "directory"), m.image(t, "nas", "image", "ext4", 32*mib)
	must(t, m.attach(t, directory))
	must(t, m.attach(t, image))
	for _, tc := range []struct {
		v     *vol
		flags []string
		code  codes.Code
	}{
		{directory, []string{"addr=10.0.0.1"}, codes.InvalidArgument},
		{directory, []string{"hard,addr=10.0.0.1"}, codes.InvalidArgument},
		{directory, []string{"clientaddr=10.0.0.1"}, codes.InvalidArgument},
		{directory, []string{"source=10.0.0.1:/x"}, codes.InvalidArgument},
		{directory, []string{"mounthost=10.0.0.1"}, codes.InvalidArgument},
		{directory, []string{"sharecache"}, codes.InvalidArgument},
		{directory, []string{"bg", "retry=100000"}, codes.InvalidArgument},
		{directory, []string{"remount"}, codes.InvalidArgument},
		{directory, []string{"bind"}, codes.InvalidArgument},
		{directory, []string{"nfsvers=2"}, codes.InvalidArgument},
		{directory, []string{"nfsvers=4.2", "nfsvers=3"}, codes.InvalidArgument},
		{directory, []string{"no-such-flag"}, codes.InvalidArgument},
		{directory, []string{"timeo=never"}, codes.InvalidArgument},
		{directory, []string{"hard\naddr=10.0.0.1"}, codes.InvalidArgument},
		{directory, []string{"port=9"}, codes.Unavailable},
		{directory, []string{"soft", "timeo=50", "retrans=1"}, codes.OK},
		{directory, []string{"noexec", "nosuid", "nodev", "noatime"}, codes.OK},
		{directory, []string{"actimeo=3600", "lookupcache=all"}, codes.OK},
		{directory, []string{"nfsvers=4.1", "ro"}, codes.OK},
		{image, []string{"nolock"}, codes.InvalidArgument},
		{image, []string{"nfsvers=3"}, codes.InvalidArgument},
		{image, []string{"sb=4711"}, codes.InvalidArgument},
		{image, []string{"noatime", "nosuid"}, codes.OK},
	} {
		t.Run(tc.v.name+" "+strings.Join(tc.flags, " "), func(t *testing.T) {
			asked := *tc.v
			asked.capability = filesystem(tc.v.capability.GetMount().GetFsType(), tc.v.capability.GetAccessMode().GetMode())
			asked.capability.GetMount().MountFlags = tc.flags
			err := m.stage(t, &asked)
			wantCode(t, err, tc.code)
			t.Log(err)
			if at := mountsAt(t, m.staging(tc.v)); (at == "") != (err != nil) {
				t.Errorf("NodeStageVolume returned %v, and the mount table has %q", err, at)
			}
			must(t, m.unstage(t, tc.v))
			if left := m.left(); slices.ContainsFunc(left, func(s string) bool { return strings.HasPrefix(s, "folder") }) {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	for _, v := range []*vol{directory, image} {
		must(t, m.detach(t, v, m.name))
		must(t, m.delete(t, v))
	}
}

// testConfiguration: a driver with an invalid configuration does not start.
func testConfiguration(t *testing.T, server *nfsd.Server) {
	node := server.Node(t, "node-1")
	dir := t.TempDir()
	for _, tc := range []struct {
		name, text string
		says       []string
	}{
		{"no slash", "- {name: nas, nfs: {server: nas, export: tank}}", []string{"line 2", "nfs.export", "/tank"}},
		{"a port", "- {name: nas, nfs: {server: 'nas:2049', export: /tank}}", []string{"line 2", "nfs.server"}},
		{"another address", "- {name: nas, nfs: {server: nas, export: /tank, mountOptions: [hard, addr=10.0.0.1]}}", []string{"line 2", "mountOptions[1]", "addr"}},
		{"flags of mount.nfs", "- {name: nas, nfs: {server: nas, export: /tank, mountOptions: ['hard,bg']}}", []string{"mountOptions", "bg"}},
		{"one export twice", "- {name: a, nfs: {server: 'fd00::1', export: /tank}}\n- {name: b, nfs: {server: '[fd00::1]', export: /tank/}}", []string{"line 3", "nfs.export", `"a"`}},
		{"a mount point", "- {name: nas, requireMount: true, nfs: {server: nas, export: /tank}}", []string{"requireMount"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			config := filepath.Join(dir, "config.yaml")
			must(t, os.WriteFile(config, []byte("pools:\n"+tc.text+"\n"), 0o644))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := node.Command(os.Getenv(driverVariable), "driver", "--endpoint", "unix://"+dir+"/csi.sock", "--config", config, "--state-dir", dir, "--node-id", "n")
			context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Error("the driver accepted the configuration")
			}
			for _, text := range tc.says {
				if !strings.Contains(string(out), text) {
					t.Errorf("got %q, want %q in it", out, text)
				}
			}
		})
	}
}

// configure writes another configuration for a stopped driver, and starts it.
func (m *machine) configure(t *testing.T, pools string) {
	t.Helper()
	must(t, os.WriteFile(m.path("config.yaml"), []byte("pools:\n"+pools), 0o644))
	m.run(t)
}

// testAnotherServer changes the server and the export of a pool that has volumes. The driver
// reports the volumes neither as deleted nor creates a new pool.
func testAnotherServer(t *testing.T, server *nfsd.Server) {
	export, empty := server.Export(t, "was"), server.Export(t, "empty")
	right := nfsPool("nas", server, export)
	m := start(t, server.Node(t, "node-1"), "node-1", right)
	v, image := m.directory(t, "nas", "v"), m.image(t, "nas", "image", "ext4", 32*mib)
	idle := m.directory(t, "nas", "idle")
	for _, v := range []*vol{v, image} {
		m.up(t, v)
		write(t, m.file(v, "data"), "old")
	}
	m.stop(t)
	six := "- name: nas\n  nfs: {server: '" + server.Address6() + "', export: " + empty + ", init: true}\n"
	m.configure(t, six)
	missing := []string{"nas", "expected is pool"}
	wantCode(t, m.getVolume(t, idle), codes.Unavailable, missing...)
	wantCode(t, m.delete(t, idle), codes.Unavailable, missing...)
	_, err := m.createOnceOpen(t, "new", mib, filesystem("", manyNodes), directoryIn("nas"))
	wantCode(t, err, codes.Unavailable, missing...)
	wantCode(t, m.stage(t, idle), codes.Unavailable, missing...)
	for _, v := range []*vol{v, image} {
		wantText(t, m.file(v, "data"), "old") // pods continue
	}
	must(t, m.unpublish(t, image)) // identified by its device
	must(t, m.unstage(t, image))
	// The driver cannot identify a mount from another server as a volume.
	left := []string{server.Address() + ":" + export, "stays mounted", "configure"}
	wantCode(t, m.unpublish(t, v), codes.FailedPrecondition, left...)
	wantCode(t, m.unstage(t, v), codes.FailedPrecondition, left...)
	if got, err := os.ReadDir(server.Dir(empty)); err != nil || len(got) != 0 {
		t.Errorf("the other export contains %v, %v, want nothing", got, err)
	}
	m.stop(t)
	m.configure(t, right)
	eventually(t, func() error { return m.unpublish(t, v) })
	must(t, m.unstage(t, v))
	for _, v := range []*vol{v, image} {
		must(t, m.detach(t, v, m.name))
		m.up(t, v)
		wantText(t, m.file(v, "data"), "old")
		m.down(t, v)
	}
	for _, v := range []*vol{v, image, idle} {
		must(t, m.delete(t, v))
	}
}

// testTwoPools uses one export under two names of its server, in two drivers and in one.
func testTwoPools(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "twice")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("first", server, export))
	v := m.directory(t, "first", "v")
	other := start(t, server.Node(t, "node-2"), "node-2", "- name: second\n  nfs: {server: '"+server.Address6()+"', export: "+export+", init: true}\n")
	_, err := other.createOnceOpen(t, "w", mib, filesystem("", manyNodes), directoryIn("second"))
	wantCode(t, err, codes.Unavailable, `"first"`, "use that name")
	_, err = other.createOnceOpen(t, "w", mib, filesystem("", manyNodes), map[string]string{"server": server.Address(), "share": export})
	wantCode(t, err, codes.Unavailable, "pool: first")
	must(t, m.delete(t, v))
}

// testClocks: files on the export have times in the past and in the future, and the node's
// clock jumps.
func testClocks(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "clocks")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	for _, to := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		t.Run(fmt.Sprint(to), func(t *testing.T) {
			for _, v := range []*vol{m.directory(t, "nas", "directory"), m.image(t, "nas", "image", "ext4", 32*mib)} {
				must(t, m.attach(t, v))
				touchAll(t, server.Dir(export), time.Now().Add(-30*to))
				restore := setClock(t, to)
				must(t, m.stage(t, v))
				must(t, m.publish(t, v))
				write(t, m.file(v, "data"), v.name)
				touchAll(t, server.Dir(export), time.Now().Add(30*to))
				restore()
				wantText(t, m.file(v, "data"), v.name)
				if found := m.health(t, v); len(found) > 0 {
					t.Errorf("health: got %q", found)
				}
				m.remove(t, v)
			}
			awaitEmpty(t, filepath.Join(server.Dir(export), ".trivet/trash"))
		})
	}
}

// touchAll changes the modification time of all files in a folder.
func touchAll(t *testing.T, dir string, to time.Time) {
	t.Helper()
	// The driver removes files meanwhile.
	run(t, "find", dir, "-ignore_readdir_race", "-exec", "touch", "-h", "-c", "-d", to.Format(time.RFC3339), "{}", "+")
}

// setClock moves the machine's clock until the function is called.
func setClock(t *testing.T, by time.Duration) (restore func()) {
	t.Helper()
	move := func(by time.Duration) error {
		now := syscall.NsecToTimeval(time.Now().Add(by).UnixNano())
		return syscall.Settimeofday(&now)
	}
	must(t, move(by))
	return func() { t.Helper(); must(t, move(-by)) }
}

// TestFull fills the server's disk, and a directory that has a quota.
func TestFull(t *testing.T) {
	t.Setenv("TRIVET_TEST_DISK", "") // the server creates a small disk
	server := nfsd.Start(t, nfsd.Options{MkfsOptions: []string{"-d", "size=400m"}, MountOptions: []string{"prjquota"}})
	export := server.Export(t, "small")
	t.Cleanup(func() { wantEmpty(t, server, export) })
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	t.Run("quota", func(t *testing.T) { testQuota(t, m, server, export) })
	t.Run("full", func(t *testing.T) { testFull(t, m, server, export) })
	awaitEmpty(t, filepath.Join(server.Dir(export), ".trivet/trash"))
}

func testQuota(t *testing.T, m *machine, server *nfsd.Server, export string) {
	v := m.directory(t, "nas", "limited")
	data := filepath.Join(server.Dir(export), "volumes/limited/data")
	run(t, "xfs_quota", "-x", "-c", "project -s -p "+data+" 42", "-c", "limit -p bhard=8m 42", server.Dir("/"))
	m.up(t, v)
	if err := fill(m.file(v, "much"), 32*mib); !errors.Is(err, syscall.EDQUOT) && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing beyond the quota: %v", err)
	}
	stats, err := m.node.NodeGetVolumeStats(deadline(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: m.target(v)})
	must(t, err)
	if u := stats.GetUsage()[0]; u.GetTotal() != 8*mib || u.GetAvailable() > mib {
		t.Errorf("got usage %v, want that of the quota", u)
	}
	// Not synced: the error occurs when the volume is unpublished, which must succeed.
	_ = os.WriteFile(m.file(v, "more"), make([]byte, 4*mib), 0o644)
	must(t, m.unpublish(t, v))
	eventually(t, func() error { return m.unstage(t, v) })
	must(t, m.detach(t, v, m.name))
	must(t, m.delete(t, v))
}

func testFull(t *testing.T, m *machine, server *nfsd.Server, export string) {
	v, image := m.directory(t, "nas", "full"), m.image(t, "nas", "full-image", "ext4", 64*mib)
	m.up(t, v)
	m.up(t, image)
	write(t, m.file(v, "data"), "kept")
	write(t, m.file(image, "data"), "kept")
	thick := map[string]string{"backend": "loop", "pool": "nas", "allocation": "thick"}
	_, err := m.createOnceOpen(t, "thick", 2<<30, filesystem("ext4", oneNode), thick)
	wantCode(t, err, codes.ResourceExhausted, "nas")
	filler := filepath.Join(server.Dir(export), "filler")
	must(t, os.Mkdir(filler, 0o755))
	if err := fill(filepath.Join(filler, "big"), 1<<30); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	for i := range 10000 { // the space of inodes
		if err := os.WriteFile(filepath.Join(filler, fmt.Sprint(i)), []byte("x"), 0o600); err != nil {
			break
		}
	}
	_, err = m.createOnceOpen(t, "thick", 64*mib, filesystem("ext4", oneNode), thick)
	wantCode(t, err, codes.ResourceExhausted)
	t.Log(err)
	_, err = m.createOnceOpen(t, "one-more", mib, filesystem("", manyNodes), directoryIn("nas"))
	wantCode(t, err, codes.ResourceExhausted)
	t.Log(err)
	if err := fill(m.file(v, "more"), 4*mib); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing to the full server: %v", err)
	}
	if err := fill(m.file(image, "more"), 32*mib); err == nil {
		t.Error("all writes to a thin image on the full server succeeded")
	}
	if found := m.health(t, v); !slices.Contains(found, "PoolAlmostFull") {
		t.Errorf("health: got %q", found)
	}
	wantText(t, m.file(v, "data"), "kept")
	must(t, m.unpublish(t, v))
	eventually(t, func() error { return m.unstage(t, v) })
	must(t, os.RemoveAll(filler))
	must(t, m.unpublish(t, image))
	eventually(t, func() error { return m.unstage(t, image) })
	for _, v := range []*vol{v, image} {
		must(t, m.detach(t, v, m.name))
		m.up(t, v)
		wantText(t, m.file(v, "data"), "kept")
		m.remove(t, v)
	}
	for _, name := range []string{"thick", "one-more"} {
		if left, _ := filepath.Glob(filepath.Join(server.Dir(export), "volumes", name)); len(left) > 0 {
			t.Errorf("a rejected volume left %q", left)
		}
	}
}

// fill writes a number of bytes to a file durably.
func fill(path string, n int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	block := make([]byte, mib)
	for i := range block {
		block[i] = byte(i)
	}
	for ; n > 0 && err == nil; n -= mib {
		_, err = f.Write(block)
	}
	return errors.Join(err, f.Sync(), f.Close())
}
