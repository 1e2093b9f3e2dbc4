//go:build vm

package mount_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/mount"
)

// serve starts a server with one export.
func serve(t *testing.T, o nfsd.Options) (*nfsd.Server, mount.NFS) {
	t.Helper()
	s := nfsd.Start(t, o)
	return s, mount.NFS{Server: s.Address(), Path: s.Export(t, "tank"), Options: []string{"nosharecache", "hard"}}
}

// mountError mounts an export, and returns the error. A mount that succeeds is removed at once.
func mountError(t *testing.T, n mount.NFS) error {
	t.Helper()
	d, _, err := mount.MountNFS(t.Context(), n, 0)
	if err == nil {
		must(t, d.Close())
	}
	return err
}

// mountNFS mounts an export at a new directory. The mount is removed at the end of the test.
func mountNFS(t *testing.T, n mount.NFS) (at, version string) {
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

// TestNFSVersions: every version can be requested over IPv4 and IPv6, and the mount table shows the endpoint.
func TestNFSVersions(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	for _, export.Server = range []string{s.Address(), s.Address6()} {
		for want, words := range map[string]string{"4.2": "nfsvers=4.2", "4.1": "v4.1", "4.0": "vers=4,minorversion=0", "3": "nfsvers=3,nolock"} {
			t.Run(export.Server+" "+want, func(t *testing.T) {
				at, version := mountNFS(t, export.With([]string{words}))
				if version != want {
					t.Errorf("got version %s, want %s", version, want)
				}
				e, err := mount.OnPath(at)
				must(t, err)
				if e == nil || !mount.IsNFS(e) || e.Source != export.String() || !strings.Contains(e.VFSOptions, "vers="+want) {
					t.Fatalf("mount table: got %+v, want %s with version %s", e, export.String(), want)
				}
				endpoint := mount.NFSEndpoint(e)
				if (endpoint != mount.Endpoint{Address: export.Server, Portmapped: want == "3"}) || !mount.Answers(t.Context(), e) {
					t.Errorf("options %s: got endpoint %+v, which answers: %t, want %s, which answers", e.VFSOptions, endpoint, mount.Answers(t.Context(), e), export.Server)
				}
				if beside, err := mount.Beside(e); err != nil || len(beside) != 0 {
					t.Errorf("Beside: got %q, %v, want no other mounts", beside, err)
				}
				must(t, os.WriteFile(filepath.Join(at, "file"), []byte(want), 0o600))
				must(t, mount.Unmount(at))
				if e, err := mount.OnPath(at); e != nil || err != nil {
					t.Errorf("mount table after Unmount: got %+v, %v, want nothing", e, err)
				}
			})
		}
	}
}

// TestNFSNegotiation: without a version in the options the highest version of the server is used.
func TestNFSNegotiation(t *testing.T) {
	for want, without := range map[string][]string{
		"4.2": nil, "4.1": {"4.2"}, "4.0": {"4.2", "4.1"}, "3": {"4.2", "4.1", "4.0"},
	} {
		t.Run(want, func(t *testing.T) {
			_, export := serve(t, nfsd.Options{Without: without})
			export = export.With([]string{"nolock"})
			if _, version := mountNFS(t, export); version != want {
				t.Errorf("got version %s, want %s", version, want)
			}
			for _, missing := range without {
				if err := mountError(t, export.With([]string{"nfsvers=" + missing})); !errors.Is(err, mount.ErrNFSVersion) {
					t.Errorf("nfsvers=%s: got %v, want %v", missing, err, mount.ErrNFSVersion)
				}
			}
		})
	}
}

// TestNFSAttributes: a mount has the requested attributes.
func TestNFSAttributes(t *testing.T) {
	_, export := serve(t, nfsd.Options{})
	d, _, err := mount.MountNFS(t.Context(), export, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOEXEC)
	must(t, err)
	defer func() { must(t, d.Close()) }()
	root, err := d.OpenRoot()
	must(t, err)
	defer root.Close()
	var st unix.Statfs_t
	must(t, unix.Fstatfs(int(root.Fd()), &st))
	if st.Flags&unix.ST_RDONLY == 0 || st.Flags&unix.ST_NOEXEC == 0 || st.Type != unix.NFS_SUPER_MAGIC {
		t.Errorf("got type %x with flags %x, want a read-only, noexec NFS", st.Type, st.Flags)
	}
}

// TestNFSErrors: the error of a mount tells the reason.
func TestNFSErrors(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	missing, denied, unknown, closed := export, export, export, export
	missing.Path += "-missing"
	denied.Path += "-denied"
	must(t, os.Mkdir(s.Dir(denied.Path), 0o755))
	unknown.Server = "no-such-name.invalid"
	closed.Options = []string{"port=9"}
	for _, tc := range []struct {
		name string
		n    mount.NFS
		want []error
	}{
		{"missing directory, version 4", missing.With([]string{"nfsvers=4"}), []error{mount.ErrExportMissing}},
		{"missing directory, version 3", missing.With([]string{"nfsvers=3,nolock"}), []error{mount.ErrExportMissing, mount.ErrExportDenied}},
		// With version 4 a client cannot see exports to other clients.
		{"denied directory, version 4", denied.With([]string{"nfsvers=4"}), []error{mount.ErrExportDenied, mount.ErrExportMissing}},
		{"denied directory, version 3", denied.With([]string{"nfsvers=3,nolock"}), []error{mount.ErrExportDenied}},
		{"unknown server name", unknown, []error{mount.ErrServerName}},
		{"no server at the port", closed, []error{mount.ErrServerSilent}},
		{"unknown option", export.With([]string{"no-such-option"}), []error{mount.ErrBadOption}},
		{"invalid value of an option", export.With([]string{"timeo=never"}), []error{mount.ErrBadOption}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			begin := time.Now()
			err := mountError(t, tc.n)
			var e *mount.Error
			if !slices.ContainsFunc(tc.want, func(want error) bool { return errors.Is(err, want) }) || !errors.As(err, &e) {
				t.Errorf("got %v, want one of %v", err, tc.want)
			}
			t.Logf("after %s: %v", time.Since(begin).Round(time.Millisecond), err)
		})
	}
}

// TestNFSStatd: a mount with locks of version 3 fails without rpc.statd.
func TestNFSStatd(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	export = export.With([]string{"nfsvers=3"})
	if err := mountError(t, export); !errors.Is(err, mount.ErrNoStatd) {
		t.Errorf("without rpc.statd: got %v, want %v", err, mount.ErrNoStatd)
	}
	s.Link().ServeLocks(t)
	mountNFS(t, export)
}

// TestNFSSilentServer: a mount from a server that does not respond fails before the kernel is asked to mount,
// because the kernel would wait for minutes.
func TestNFSSilentServer(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	s.Link().Cut(t)
	err := mountError(t, export)
	failed, ok := errors.AsType[*mount.Error](err)
	if !ok || failed.Op != "call" || !errors.Is(err, mount.ErrServerSilent) {
		t.Errorf("got %v, want a failed call with %v", err, mount.ErrServerSilent)
	}
}

// writer is a process with an open file on a mount. It writes 20 MiB when begin is closed.
type writer struct {
	*exec.Cmd
	begin io.Closer
}

// newWriter starts a writer, and returns when its file is open. words are further arguments of dd(1).
func newWriter(t *testing.T, at string, words ...string) writer {
	t.Helper()
	c := exec.Command("sh", append([]string{"-c", `exec >"$0" && echo open >&2 && read -r go; exec dd if=/dev/zero bs=1M count=20 status=none "$@"`, filepath.Join(at, "written")}, words...)...)
	stdin, err := c.StdinPipe()
	must(t, err)
	stderr, err := c.StderrPipe()
	must(t, err)
	must(t, c.Start())
	if line, err := bufio.NewReader(stderr).ReadString('\n'); line != "open\n" {
		t.Fatalf("setup: the writer printed %q, %v, want open", line, err)
	}
	return writer{c, stdin}
}

// TestForceUnmountNFS: a mount with dirty pages is unmounted while its server does not respond. A process that
// writes to another mount of the server continues.
func TestForceUnmountNFS(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	for _, words := range []string{"nfsvers=4.2", "nfsvers=4.0", "nfsvers=3,nolock"} {
		t.Run(words, func(t *testing.T) { testForceUnmount(t, s.Link(), export.With([]string{words})) })
	}
}

// testForceUnmount unmounts an export by force while its server does not respond. The process killed writes to this
// mount, the process survivor to a mount of a directory of the export.
func testForceUnmount(t *testing.T, link *nfsd.Link, export mount.NFS) {
	neighbour := export
	neighbour.Path += "/neighbour"
	at, _ := mountNFS(t, export)
	must(t, os.MkdirAll(filepath.Join(at, "neighbour"), 0o777))
	beside, _ := mountNFS(t, neighbour)
	survivor, killed := newWriter(t, beside, "conv=fsync"), newWriter(t, at)
	link.Cut(t)
	must(t, survivor.begin.Close())
	must(t, killed.begin.Close())
	for dirtyKiB(t) < 40<<10-100 { // until both writers have written almost everything
		time.Sleep(50 * time.Millisecond)
	}
	must(t, killed.Process.Kill())

	before, begin := dirtyKiB(t), time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := mount.ForceUnmountNFS(ctx, at); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a context that ends: got %v, want %v", err, context.DeadlineExceeded)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := mount.ForceUnmountNFS(ctx, at)
	t.Logf("%d KiB were dirty; unmounted after %s", before, time.Since(begin).Round(time.Millisecond))
	if e, tableErr := mount.OnPath(at); err != nil || e != nil || tableErr != nil {
		t.Errorf("ForceUnmountNFS: got %v, and then the mount %+v, %v, want no error and no mount", err, e, tableErr)
	}
	must(t, mount.ForceUnmountNFS(t.Context(), at))
	_ = killed.Wait()

	link.Restore(t)
	if err := survivor.Wait(); err != nil {
		t.Errorf("the process that writes to the other mount failed: %v", err)
	}
	if st, err := os.Stat(filepath.Join(beside, "written")); err != nil || st.Size() != 20<<20 {
		t.Errorf("the file on the other mount: got %+v, %v, want 20 MiB", st, err)
	}
}

// TestForceUnmountLast: unmounting the last mount of a server does not wait until the server has ended the
// session.
func TestForceUnmountLast(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	for _, words := range []string{"nfsvers=4.2", "nfsvers=4.0", "nfsvers=3,nolock"} {
		t.Run(words, func(t *testing.T) {
			at, _ := mountNFS(t, export.With([]string{words}))
			must(t, os.WriteFile(filepath.Join(at, "file"), nil, 0o600))
			s.Link().Cut(t)
			// The kernel waits for minutes for the end of the session.
			const hang = 100 * time.Second
			limited, cancel := context.WithTimeout(t.Context(), hang)
			defer cancel()
			if err := mount.ForceUnmountNFS(limited, at); err != nil {
				t.Errorf("without the server, within %s: %v", hang, err)
			}
			s.Link().Restore(t)
		})
	}
}

// dirtyKiB returns the size of the dirty pages of this machine.
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

// TestAbortNFS: AbortNFS makes waiting calls fail, and does not unmount.
func TestAbortNFS(t *testing.T) {
	s, export := serve(t, nfsd.Options{})
	at, _ := mountNFS(t, export)
	s.Link().Cut(t)
	if e, err := mount.OnPath(at); err != nil || mount.Answers(t.Context(), e) {
		t.Errorf("Answers of a server without network: got true or %v, want false", err)
	}
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
		t.Error("the aborted call: got no error, want one")
	}
	s.Link().Restore(t)
	if e, err := mount.OnPath(at); e == nil || err != nil {
		t.Errorf("mount table after AbortNFS: got %+v, %v, want the mount", e, err)
	}
	must(t, mount.AbortNFS(t.Context(), filepath.Dir(at), func() bool { t.Error("AbortNFS called done although nothing is mounted"); return true }))
}
