package mount_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/sunrpc"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/mount"
)

// nfsExports are the directories in TRIVET_TEST_NFS, as server:/path and separated
// by spaces: one directory under several addresses. Beside it must be one called
// the same with -denied, exported to others only. The first address is the one
// whose network device can be silenced: tests that need a server run only in a VM.
func nfsExports(t *testing.T) []mount.NFS {
	t.Helper()
	sources := strings.Fields(os.Getenv("TRIVET_TEST_NFS"))
	if len(sources) == 0 {
		t.Skip("TRIVET_TEST_NFS names no export to mount")
	}
	testenv.RequireRoot(t)
	var exports []mount.NFS
	for _, s := range sources {
		server, path, ok := mount.ParseNFSSource(s)
		if !ok {
			t.Fatalf("TRIVET_TEST_NFS has %q, want server:/path", s)
		}
		exports = append(exports, mount.NFS{Server: server, Path: path, Options: []string{"nosharecache", "hard"}})
	}
	return exports
}

// mounted shows an NFS mount at a new directory until the test ends.
func mounted(t *testing.T, n mount.NFS) (at, version string) {
	t.Helper()
	d, version, err := mount.MountNFS(t.Context(), n, 0)
	must(t, err)
	defer func() { must(t, d.Close()) }()
	at = filepath.Join(t.TempDir(), "mnt")
	must(t, os.Mkdir(at, 0o755))
	must(t, d.MoveTo(at))
	t.Cleanup(func() {
		for {
			if e, err := mount.OnPath(at); err != nil || e == nil {
				return
			}
			must(t, mount.Unmount(at))
		}
	})
	return at, version
}

func with(n mount.NFS, words ...string) mount.NFS {
	n.Options = append(append([]string{}, n.Options...), words...)
	return n
}

func TestNFSVersions(t *testing.T) {
	for _, export := range nfsExports(t) {
		for want, words := range map[string]string{"4.2": "nfsvers=4.2", "4.1": "v4.1", "4.0": "vers=4,minorversion=0", "3": "nfsvers=3,nolock"} {
			t.Run(export.Server+" "+want, func(t *testing.T) {
				at, version := mounted(t, with(export, words))
				if version != want {
					t.Errorf("version %s", version)
				}
				e, err := mount.OnPath(at)
				must(t, err)
				if e == nil || !mount.IsNFS(e) || e.Source != export.Source() || !strings.Contains(e.VFSOptions, "vers="+want) {
					t.Fatalf("the mount table has %+v", e)
				}
				if beside, err := mount.Beside(e); err != nil || len(beside) != 0 {
					t.Errorf("the same filesystem is at %q too, %v", beside, err)
				}
				must(t, os.WriteFile(filepath.Join(at, "file"), []byte(want), 0o600))
				must(t, mount.Unmount(at))
				if e, err := mount.OnPath(at); e != nil || err != nil {
					t.Errorf("unmounted: %+v, %v", e, err)
				}
			})
		}
	}
}

// TestNFSNegotiation: without a version it is the highest that the server has,
// which TRIVET_TEST_NFS_SPEAKS names if it is not 4.2.
func TestNFSNegotiation(t *testing.T) {
	export := with(nfsExports(t)[0], "nolock")
	want := "4.2"
	if v := os.Getenv("TRIVET_TEST_NFS_SPEAKS"); v != "" {
		want = v
	}
	if _, version := mounted(t, export); version != want {
		t.Errorf("version %s, want %s", version, want)
	}
	for _, other := range []string{"3", "4.0", "4.1", "4.2"} {
		d, _, err := mount.MountNFS(t.Context(), with(export, "nfsvers="+other), 0)
		if err == nil {
			must(t, d.Close())
		}
		if other > want && !errors.Is(err, mount.ErrNFSVersion) {
			t.Errorf("asked for %s: %v", other, err)
		}
	}
}

func TestNFSAttributes(t *testing.T) {
	d, _, err := mount.MountNFS(t.Context(), nfsExports(t)[0], unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOEXEC)
	must(t, err)
	defer func() { must(t, d.Close()) }()
	root, err := d.OpenRoot()
	must(t, err)
	defer root.Close()
	var st unix.Statfs_t
	must(t, unix.Fstatfs(int(root.Fd()), &st))
	if st.Flags&unix.ST_RDONLY == 0 || st.Flags&unix.ST_NOEXEC == 0 || st.Type != unix.NFS_SUPER_MAGIC {
		t.Errorf("type %x, flags %x", st.Type, st.Flags)
	}
}

func TestNFSErrors(t *testing.T) {
	export := nfsExports(t)[0]
	missing, denied, unknown, closed := export, export, export, export
	missing.Path += "-missing"
	denied.Path += "-denied"
	unknown.Server = "no-such-name.invalid"
	closed.Options = []string{"port=9"}
	for _, tc := range []struct {
		name string
		n    mount.NFS
		want []error
	}{
		{"missing, 4", with(missing, "nfsvers=4"), []error{mount.ErrExportMissing}},
		{"missing, 3", with(missing, "nfsvers=3,nolock"), []error{mount.ErrExportMissing, mount.ErrExportDenied}},
		// Version 4 hides what is exported to others only.
		{"denied, 4", with(denied, "nfsvers=4"), []error{mount.ErrExportDenied, mount.ErrExportMissing}},
		{"denied, 3", with(denied, "nfsvers=3,nolock"), []error{mount.ErrExportDenied}},
		{"no such name", unknown, []error{mount.ErrServerName}},
		{"no server", closed, []error{mount.ErrServerSilent}},
		{"no such option", with(export, "no-such-option"), []error{mount.ErrBadOption}},
		{"no such value", with(export, "timeo=never"), []error{mount.ErrBadOption}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			begin := time.Now()
			d, _, err := mount.MountNFS(t.Context(), tc.n, 0)
			if err == nil {
				must(t, d.Close())
			}
			ok := false
			for _, want := range tc.want {
				ok = ok || errors.Is(err, want)
			}
			var e *mount.Error
			if !ok || !errors.As(err, &e) {
				t.Errorf("%v, want %v", err, tc.want)
			}
			t.Logf("after %s: %v", time.Since(begin).Round(time.Millisecond), err)
		})
	}
}

// TestNFSStatd: locks of version 3 need rpc.statd, and that is told when mounting.
func TestNFSStatd(t *testing.T) {
	export := with(nfsExports(t)[0], "nfsvers=3")
	port, err := sunrpc.Port(t.Context(), "127.0.0.1:111", sunrpc.StatusProgram, 1, sunrpc.UDP)
	must(t, err)
	d, _, err := mount.MountNFS(t.Context(), export, 0)
	if err == nil {
		must(t, d.Close())
	}
	if port > 0 && err != nil || port == 0 && !errors.Is(err, mount.ErrNoStatd) {
		t.Errorf("rpc.statd has port %d: %v", port, err)
	}
}

// silence drops what this node sends to a server, until the returned function is
// called or the test ends.
func silence(t *testing.T, server string) (restore func()) {
	t.Helper()
	_, dev, _ := strings.Cut(testenv.Run(t, "ip", "-o", "route", "get", server), " dev ")
	dev, _, _ = strings.Cut(dev, " ")
	testenv.Run(t, "tc", "qdisc", "add", "dev", dev, "root", "netem", "loss", "100%")
	cut := true
	restore = func() {
		if cut {
			cut = false
			testenv.Run(t, "tc", "qdisc", "del", "dev", dev, "root")
		}
	}
	t.Cleanup(restore)
	return restore
}

func TestNFSSilentServer(t *testing.T) {
	export := nfsExports(t)[0]
	silence(t, export.Server)
	begin := time.Now()
	d, _, err := mount.MountNFS(t.Context(), export, 0)
	if err == nil {
		must(t, d.Close())
	}
	if took := time.Since(begin); !errors.Is(err, mount.ErrServerSilent) || took > 8*time.Second {
		t.Errorf("after %s: %v", took, err)
	}
}

// writer is a process that has a file of a mount open, and writes 20 MiB to it
// when told to.
type writer struct {
	*exec.Cmd
	begin io.Closer
}

func newWriter(t *testing.T, at string, words ...string) writer {
	t.Helper()
	c := exec.Command("sh", append([]string{"-c", `exec >"$0" && echo open >&2 && read -r go; exec dd if=/dev/zero bs=1M count=20 status=none "$@"`, filepath.Join(at, "written")}, words...)...)
	stdin, err := c.StdinPipe()
	must(t, err)
	stderr, err := c.StderrPipe()
	must(t, err)
	must(t, c.Start())
	if line, err := bufio.NewReader(stderr).ReadString('\n'); line != "open\n" {
		t.Fatalf("the writer says %q, %v", line, err)
	}
	return writer{c, stdin}
}

// TestForceUnmountNFS: with the server silent, a mount with dirty pages that
// nobody writes any more is torn down, and a neighbour's writer is not harmed.
func TestForceUnmountNFS(t *testing.T) {
	for _, words := range []string{"nfsvers=4.2", "nfsvers=4.0", "nfsvers=3,nolock"} {
		t.Run(words, func(t *testing.T) { testForceUnmount(t, with(nfsExports(t)[0], words)) })
	}
}

func testForceUnmount(t *testing.T, export mount.NFS) {
	neighbour := export
	neighbour.Path += "/neighbour"
	at, _ := mounted(t, export)
	must(t, os.MkdirAll(filepath.Join(at, "neighbour"), 0o777))
	beside, _ := mounted(t, neighbour)
	survivor, killed := newWriter(t, beside, "conv=fsync"), newWriter(t, at)
	restore := silence(t, export.Server)
	must(t, survivor.begin.Close())
	must(t, killed.begin.Close())
	for dirtyKiB(t) < 40<<10-100 {
		time.Sleep(50 * time.Millisecond)
	}
	must(t, killed.Process.Kill())

	before, begin := dirtyKiB(t), time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := mount.ForceUnmountNFS(ctx, at); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a context that ends: %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := mount.ForceUnmountNFS(ctx, at)
	t.Logf("%d KiB were dirty; unmounted after %s", before, time.Since(begin).Round(time.Millisecond))
	if e, tableErr := mount.OnPath(at); err != nil || e != nil || tableErr != nil {
		t.Errorf("%v; the mount table has %+v, %v", err, e, tableErr)
	}
	must(t, mount.ForceUnmountNFS(t.Context(), at))
	_ = killed.Wait() // killed

	restore()
	if err := survivor.Wait(); err != nil {
		t.Errorf("the neighbour's writer: %v", err)
	}
	if st, err := os.Stat(filepath.Join(beside, "written")); err != nil || st.Size() != 20<<20 {
		t.Errorf("the neighbour's file: %+v, %v", st, err)
	}
}

// TestForceUnmountLast: with its last mount the kernel's client of a server ends,
// which would like to tell the server.
func TestForceUnmountLast(t *testing.T) {
	for _, words := range []string{"nfsvers=4.2", "nfsvers=4.0", "nfsvers=3,nolock"} {
		t.Run(words, func(t *testing.T) {
			export := with(nfsExports(t)[0], words)
			at, _ := mounted(t, export)
			must(t, os.WriteFile(filepath.Join(at, "file"), nil, 0o600))
			restore := silence(t, export.Server)
			begin := time.Now()
			must(t, mount.ForceUnmountNFS(t.Context(), at))
			if took := time.Since(begin); took > 10*time.Second {
				t.Errorf("unmounted after %s", took)
			}
			restore()
		})
	}
}

// dirtyKiB is what the page cache holds that is not written yet.
func dirtyKiB(t *testing.T) int {
	t.Helper()
	info, err := os.ReadFile("/proc/meminfo")
	must(t, err)
	sum := 0
	for line := range strings.Lines(string(info)) {
		if f := strings.Fields(line); f[0] == "Dirty:" || f[0] == "Writeback:" {
			n, err := strconv.Atoi(f[1])
			must(t, err)
			sum += n
		}
	}
	return sum
}

// TestAbortNFS: waiting calls fail and the mount stays.
func TestAbortNFS(t *testing.T) {
	export := nfsExports(t)[0]
	at, _ := mounted(t, export)
	restore := silence(t, export.Server)
	created := make(chan error, 1)
	go func() { created <- os.WriteFile(filepath.Join(at, "aborted"), nil, 0o600) }()
	var err error
	must(t, mount.AbortNFS(t.Context(), at, func() bool {
		select {
		case err = <-created:
			return true
		default:
			return false
		}
	}))
	if err == nil {
		t.Error("the waiting call succeeded")
	}
	restore()
	if e, err := mount.OnPath(at); e == nil || err != nil {
		t.Errorf("the mount table has %+v, %v", e, err)
	}
	must(t, mount.AbortNFS(t.Context(), filepath.Dir(at), func() bool { t.Error("asked without a mount"); return true }))
}

func TestForceUnmountOther(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	if err := mount.ForceUnmountNFS(t.Context(), dir); err == nil {
		t.Error("another filesystem was unmounted by force")
	}
	must(t, mount.ForceUnmountNFS(t.Context(), filepath.Join(dir, "none", "such")))
}
