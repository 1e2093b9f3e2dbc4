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

// TestBadInput checks that the driver reports mistakes of administrators, loses no data and leaves no
// mounts.
func TestBadInput(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	t.Run("classes", func(t *testing.T) { testClasses(t, server) })
	t.Run("mount flags", func(t *testing.T) { testMountFlags(t, server) })
	t.Run("configuration", func(t *testing.T) { testConfiguration(t, server) })
	t.Run("another server", func(t *testing.T) { testAnotherServer(t, server) })
	t.Run("two pools", func(t *testing.T) { testTwoPools(t, server) })
	t.Run("clocks", func(t *testing.T) { testClocks(t, server) })
}

// failsWithin is the time in which a mount without valid credentials fails, on a slow machine.
const failsWithin = 90 * time.Second

// wantClosed fails unless the pool is not open on a node, with an error that contains a text.
func (m *machine) wantClosed(t *testing.T, text string) {
	t.Helper()
	began := time.Now()
	_, err := m.createWhenOpen(t, "closed", mib, filesystem("", manyNodes), directoryIn(pool))
	took := time.Since(began)
	wantCode(t, err, codes.Unavailable, text)
	t.Log(took, err)
	if took > failsWithin {
		t.Errorf("CreateVolume took %v, want less than %v", took, failsWithin)
	}
}

// createWhenOpen calls tryCreate, and retries while the driver reports that it is opening the pool.
func (m *machine) createWhenOpen(t *testing.T, name string, size int64, c *csi.VolumeCapability, parameters map[string]string) (v *vol, err error) {
	err = retry.For(t.Context(), waitTimeout, func() (again bool, err error) {
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
		texts               []string
	}{
		{"no such host", "no-such-host.invalid", share, codes.Unavailable, []string{"no-such-host.invalid", "does not resolve"}},
		{"no such export", server.Address(), "/missing", codes.Unavailable, []string{"/missing", "no such directory"}},
		{"no permission", server.Address(), "/kerberos", codes.Unavailable, []string{"/kerberos"}},
		{"no server", "127.0.0.1", share, codes.Unavailable, []string{"127.0.0.1", "answer", "check that it runs"}},
		{"share without a slash", server.Address(), strings.TrimPrefix(share, "/"), codes.InvalidArgument, []string{"share", share}},
		{"share with ..", server.Address(), share + "/..", codes.InvalidArgument, []string{"share", ".."}},
		{"server with a port", server.Address() + ":2049", share, codes.InvalidArgument, []string{"server", "port"}},
		{"unclosed bracket", "[" + server.Address6(), share, codes.InvalidArgument, []string{"server", "bracket"}},
		{"server with a path", server.Address() + ":/x", share, codes.InvalidArgument, []string{"server"}},
		{"empty share", server.Address(), "", codes.InvalidArgument, []string{"share"}},
		{"empty server", "", share, codes.InvalidArgument, []string{"server"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := m.createWhenOpen(t, "bad", mib, filesystem("", manyNodes), map[string]string{"server": tc.server, "share": tc.share})
			wantCode(t, err, tc.code, tc.texts...)
		})
	}
	var ids []string
	for _, address := range []string{server.Address6(), "[" + server.Address6() + "]"} {
		t.Run(address, func(t *testing.T) {
			parameters := map[string]string{"server": address, "share": share}
			directory, err := m.createWhenOpen(t, "directory", mib, filesystem("", manyNodes), parameters)
			must(t, err)
			parameters["backend"] = "loop"
			image, err := m.createWhenOpen(t, "image", 32*mib, filesystem("ext4", oneNode), parameters)
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
		t.Errorf("got volume IDs %q for two addresses of one server, want equal IDs", ids)
	}
}

// testMountFlags tests the mountOptions of a StorageClass.
func testMountFlags(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "flags")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	directory, image := m.directory(t, "nas", "directory"), m.image(t, "nas", "image", "ext4", 32*mib)
	must(t, m.controllerPublish(t, directory))
	must(t, m.controllerPublish(t, image))
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
			withFlags := *tc.v
			withFlags.capability = filesystem(tc.v.capability.GetMount().GetFsType(), tc.v.capability.GetAccessMode().GetMode())
			withFlags.capability.GetMount().MountFlags = tc.flags
			err := m.stage(t, &withFlags)
			wantCode(t, err, tc.code)
			t.Log(err)
			if at := mountTableAt(t, m.staging(tc.v)); (at == "") != (err != nil) {
				t.Errorf("got mount %q and error %v from NodeStageVolume, want a mount or an error", at, err)
			}
			must(t, m.unstage(t, tc.v))
			if left := m.left(); slices.ContainsFunc(left, func(s string) bool { return strings.HasPrefix(s, "folder") }) {
				t.Errorf("got %v after NodeUnstageVolume, want no mount points", left)
			}
		})
	}
	for _, v := range []*vol{directory, image} {
		must(t, m.controllerUnpublish(t, v, m.name))
		must(t, m.delete(t, v))
	}
}

// testConfiguration checks that a driver with an invalid configuration does not start.
func testConfiguration(t *testing.T, server *nfsd.Server) {
	node := server.Node(t, "node-1")
	dir := t.TempDir()
	for _, tc := range []struct {
		name, text string
		texts      []string
	}{
		{"export without a slash", "- {name: nas, nfs: {server: nas, export: tank}}", []string{"line 2", "nfs.export", "/tank"}},
		{"server with a port", "- {name: nas, nfs: {server: 'nas:2049', export: /tank}}", []string{"line 2", "nfs.server"}},
		{"mount option addr", "- {name: nas, nfs: {server: nas, export: /tank, mountOptions: [hard, addr=10.0.0.1]}}", []string{"line 2", "mountOptions[1]", "addr"}},
		{"option of mount.nfs", "- {name: nas, nfs: {server: nas, export: /tank, mountOptions: ['hard,bg']}}", []string{"mountOptions", "bg"}},
		{"same export twice", "- {name: a, nfs: {server: 'fd00::1', export: /tank}}\n- {name: b, nfs: {server: '[fd00::1]', export: /tank/}}", []string{"line 3", "nfs.export", `"a"`}},
		{"requireMount", "- {name: nas, requireMount: true, nfs: {server: nas, export: /tank}}", []string{"requireMount"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			config := filepath.Join(dir, "config.yaml")
			must(t, os.WriteFile(config, []byte("pools:\n"+tc.text+"\n"), 0o644))
			ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
			defer cancel()
			cmd := node.Command(os.Getenv(driverVariable), "driver", "--endpoint", "unix://"+dir+"/csi.sock", "--config", config, "--state-dir", dir, "--node-id", "n")
			context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Error("the driver accepted the configuration")
			}
			for _, text := range tc.texts {
				if !strings.Contains(string(out), text) {
					t.Errorf("got output %q, want it to contain %q", out, text)
				}
			}
		})
	}
}

// configure changes the pools in the configuration of a stopped driver, and starts the driver.
func (m *machine) configure(t *testing.T, pools string) {
	t.Helper()
	must(t, os.WriteFile(m.path("config.yaml"), []byte("pools:\n"+pools), 0o644))
	m.run(t)
}

// testAnotherServer changes the server and the export of a pool that has volumes. The driver neither
// reports the volumes as deleted nor creates a new pool.
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
	changed := "- name: nas\n  nfs: {server: '" + server.Address6() + "', export: " + empty + ", init: true}\n"
	m.configure(t, changed)
	missing := []string{"nas", "should contain pool"}
	wantCode(t, m.getVolume(t, idle), codes.Unavailable, missing...)
	wantCode(t, m.delete(t, idle), codes.Unavailable, missing...)
	_, err := m.createWhenOpen(t, "new", mib, filesystem("", manyNodes), directoryIn("nas"))
	wantCode(t, err, codes.Unavailable, missing...)
	wantCode(t, m.stage(t, idle), codes.Unavailable, missing...)
	for _, v := range []*vol{v, image} {
		wantText(t, m.file(v, "data"), "old") // pods can still use their volumes
	}
	must(t, m.unpublish(t, image)) // the driver identifies an image by its loop device
	must(t, m.unstage(t, image))
	// The driver cannot tell that a mount of another server is the volume.
	left := []string{server.Address() + ":" + export, "stays mounted", "configure"}
	wantCode(t, m.unpublish(t, v), codes.FailedPrecondition, left...)
	wantCode(t, m.unstage(t, v), codes.FailedPrecondition, left...)
	if got, err := os.ReadDir(server.Dir(empty)); err != nil || len(got) != 0 {
		t.Errorf("got entries %v and error %v in the other export, want none", got, err)
	}
	m.stop(t)
	m.configure(t, right)
	eventually(t, func() error { return m.unpublish(t, v) })
	must(t, m.unstage(t, v))
	for _, v := range []*vol{v, image} {
		must(t, m.controllerUnpublish(t, v, m.name))
		m.up(t, v)
		wantText(t, m.file(v, "data"), "old")
		m.down(t, v)
	}
	for _, v := range []*vol{v, image, idle} {
		must(t, m.delete(t, v))
	}
}

// testTwoPools checks that the driver refuses to use one export as a second pool, with another address
// of its server or by the parameters server and share.
func testTwoPools(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "twice")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("first", server, export))
	v := m.directory(t, "first", "v")
	other := start(t, server.Node(t, "node-2"), "node-2", "- name: second\n  nfs: {server: '"+server.Address6()+"', export: "+export+", init: true}\n")
	_, err := other.createWhenOpen(t, "w", mib, filesystem("", manyNodes), directoryIn("second"))
	wantCode(t, err, codes.Unavailable, `"first"`, "use that name")
	_, err = other.createWhenOpen(t, "w", mib, filesystem("", manyNodes), map[string]string{"server": server.Address(), "share": export})
	wantCode(t, err, codes.Unavailable, "pool: first")
	must(t, m.delete(t, v))
}

// testClocks uses volumes while files on the export have times in the past or in the future, and the
// node's clock jumps.
func testClocks(t *testing.T, server *nfsd.Server) {
	export := server.Export(t, "clocks")
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	for _, to := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		t.Run(fmt.Sprint(to), func(t *testing.T) {
			for _, v := range []*vol{m.directory(t, "nas", "directory"), m.image(t, "nas", "image", "ext4", 32*mib)} {
				must(t, m.controllerPublish(t, v))
				touchAll(t, server.Dir(export), time.Now().Add(-30*to)) // 30 days in the other direction
				restore := setClock(t, to)
				must(t, m.stage(t, v))
				must(t, m.publish(t, v))
				write(t, m.file(v, "data"), v.name)
				touchAll(t, server.Dir(export), time.Now().Add(30*to))
				restore()
				wantText(t, m.file(v, "data"), v.name)
				if found := m.health(t, v); len(found) > 0 {
					t.Errorf("got health reasons %q, want none", found)
				}
				m.remove(t, v)
			}
			awaitEmpty(t, filepath.Join(server.Dir(export), ".trivet/trash"))
		})
	}
}

// touchAll sets the modification time of all files below a directory.
func touchAll(t *testing.T, dir string, to time.Time) {
	t.Helper()
	// The driver may remove files while find and touch run.
	run(t, "find", dir, "-ignore_readdir_race", "-exec", "touch", "-h", "-c", "-d", to.Format(time.RFC3339), "{}", "+")
}

// setClock moves the machine's clock by a duration until restore is called.
func setClock(t *testing.T, by time.Duration) (restore func()) {
	t.Helper()
	move := func(by time.Duration) error {
		now := syscall.NsecToTimeval(time.Now().Add(by).UnixNano())
		return syscall.Settimeofday(&now)
	}
	must(t, move(by))
	return func() { t.Helper(); must(t, move(-by)) }
}

// TestFull fills a directory to which the server applies a quota, and then the server's disk.
func TestFull(t *testing.T) {
	t.Setenv("TRIVET_TEST_DISK", "") // without it, the server creates a small disk
	server := nfsd.Start(t, nfsd.Options{MkfsOptions: []string{"-d", "size=400m"}, MountOptions: []string{"prjquota"}})
	export := server.Export(t, "small")
	t.Cleanup(func() { wantEmpty(t, server, export) })
	m := start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	t.Run("quota", func(t *testing.T) { testQuota(t, m, server, export) })
	t.Run("full", func(t *testing.T) { testFull(t, m, server, export) })
	awaitEmpty(t, filepath.Join(server.Dir(export), ".trivet/trash"))
}

// testQuota checks that a pod cannot write more than the server's quota of a directory, that the quota is
// the size in the statistics, and that the volume can then be unpublished and deleted.
func testQuota(t *testing.T, m *machine, server *nfsd.Server, export string) {
	v := m.directory(t, "nas", "limited")
	data := filepath.Join(server.Dir(export), "volumes/limited/data")
	run(t, "xfs_quota", "-x", "-c", "project -s -p "+data+" 42", "-c", "limit -p bhard=8m 42", server.Dir("/"))
	m.up(t, v)
	if err := fill(m.file(v, "much"), 32*mib); !errors.Is(err, syscall.EDQUOT) && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing beyond the quota: got error %v, want EDQUOT or ENOSPC", err)
	}
	stats, err := m.node.NodeGetVolumeStats(deadline(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: m.target(v)})
	must(t, err)
	if u := stats.GetUsage()[0]; u.GetTotal() != 8*mib || u.GetAvailable() > mib {
		t.Errorf("got usage %v, want a total of %d and at most %d available", u, 8*mib, mib)
	}
	// The file is not synced. So the server reports the exceeded quota only when the volume is
	// unpublished, which must succeed nevertheless.
	_ = os.WriteFile(m.file(v, "more"), make([]byte, 4*mib), 0o644)
	must(t, m.unpublish(t, v))
	eventually(t, func() error { return m.unstage(t, v) })
	must(t, m.controllerUnpublish(t, v, m.name))
	must(t, m.delete(t, v))
}

// testFull checks that calls and writes fail on the full disk of a server, that synced data is kept, and
// that the volumes work again when the disk has room.
func testFull(t *testing.T, m *machine, server *nfsd.Server, export string) {
	v, image := m.directory(t, "nas", "full"), m.image(t, "nas", "full-image", "ext4", 64*mib)
	m.up(t, v)
	m.up(t, image)
	write(t, m.file(v, "data"), "kept")
	write(t, m.file(image, "data"), "kept")
	thick := map[string]string{"backend": "loop", "pool": "nas", "allocation": "thick"}
	_, err := m.createWhenOpen(t, "thick", 2<<30, filesystem("ext4", oneNode), thick)
	wantCode(t, err, codes.ResourceExhausted, "nas")
	filler := filepath.Join(server.Dir(export), "filler")
	must(t, os.Mkdir(filler, 0o755))
	if err := fill(filepath.Join(filler, "big"), 1<<30); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: got error %v, want ENOSPC", err)
	}
	for i := range 10000 { // fill the space for inodes, too
		if err := os.WriteFile(filepath.Join(filler, fmt.Sprint(i)), []byte("x"), 0o600); err != nil {
			break
		}
	}
	_, err = m.createWhenOpen(t, "thick", 64*mib, filesystem("ext4", oneNode), thick)
	wantCode(t, err, codes.ResourceExhausted)
	t.Log(err)
	_, err = m.createWhenOpen(t, "one-more", mib, filesystem("", manyNodes), directoryIn("nas"))
	wantCode(t, err, codes.ResourceExhausted)
	t.Log(err)
	if err := fill(m.file(v, "more"), 4*mib); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing to a directory on the full disk: got error %v, want ENOSPC", err)
	}
	if err := fill(m.file(image, "more"), 32*mib); err == nil {
		t.Error("writing to a thin image on the full disk: got success, want an error")
	}
	if found := m.health(t, v); !slices.Contains(found, "PoolAlmostFull") {
		t.Errorf("got health reasons %q, want PoolAlmostFull", found)
	}
	wantText(t, m.file(v, "data"), "kept")
	must(t, m.unpublish(t, v))
	eventually(t, func() error { return m.unstage(t, v) })
	must(t, os.RemoveAll(filler))
	must(t, m.unpublish(t, image))
	eventually(t, func() error { return m.unstage(t, image) })
	for _, v := range []*vol{v, image} {
		must(t, m.controllerUnpublish(t, v, m.name))
		m.up(t, v)
		wantText(t, m.file(v, "data"), "kept")
		m.remove(t, v)
	}
	for _, name := range []string{"thick", "one-more"} {
		if left, _ := filepath.Glob(filepath.Join(server.Dir(export), "volumes", name)); len(left) > 0 {
			t.Errorf("got files %q of a volume whose creation failed, want none", left)
		}
	}
}

// fill writes n bytes to a file and syncs it.
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
