// Package nfsd gives tests the kernel's NFS server and clients of it: each in
// namespaces of its own, with a link between them that can be cut. It is for the
// virtual machine of test/vm, whose kernel has NFS.
package nfsd

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// diskVariable names the block device that a server's filesystem is made on. It
// is a loop device where the variable is not set.
const diskVariable = "TRIVET_TEST_DISK"

const exportProgram = "exportfs" //nolint:misspell // the program's name

var (
	//go:embed state.sh
	stateScript string
	//go:embed server.sh
	serverScript string

	servers atomic.Int32
)

// Options of a server. The zero value is good.
type Options struct {
	// MkfsOptions are for mkfs.xfs, MountOptions for mounting what it made.
	MkfsOptions, MountOptions []string
	// Without lists versions that the server does not speak: 3, 4.0, 4.1, 4.2.
	Without []string
	// NoTracking leaves out nfsdcld: the server forgets its clients, and so their
	// locks, when it is restarted.
	NoTracking bool
	// Lease is how long the server keeps the state of a silent NFSv4 client, and
	// how long it waits for clients after a restart: at least 10 s, the default.
	Lease time.Duration
}

// Server is an NFS server in a network namespace of its own, with one xfs that
// holds all exports.
type Server struct {
	options Options
	n       int    // among this process's servers
	root    string // of its filesystem; clients see what is below it
	pid     int    // of a process in its namespaces
	links   int
	own     *Link
	fsids   map[string]int
}

// Start makes a filesystem and serves it until the test ends. A new server has
// no grace period. It is linked to the test's own network namespace.
func Start(tb testing.TB, o Options) *Server {
	tb.Helper()
	testenv.RequireRoot(tb)
	requirePropagation(tb)
	testenv.Run(tb, "modprobe", "-a", "nfsd", "nfs", "nfsv3", "nfsv4")
	if o.Lease == 0 {
		o.Lease = 10 * time.Second
	}
	s := &Server{options: o, n: int(servers.Add(1)), root: filesystem(tb, o), fsids: map[string]int{}}
	s.pid = s.hold(tb)
	tb.Cleanup(func() { s.Stop(tb) })
	s.Serve(tb)
	s.EndGrace(tb)
	s.own = s.link(tb, os.Getpid())
	return s
}

// requirePropagation fails a test whose mounts the nodes would not see.
func requirePropagation(tb testing.TB) {
	tb.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == "/" && !strings.HasPrefix(f[6], "shared:") {
			tb.Fatal("the mounts of this machine are private: run mount --make-rshared / first, as systemd does")
		}
	}
}

// filesystem makes the server's xfs and returns where it is mounted.
func filesystem(tb testing.TB, o Options) string {
	tb.Helper()
	base := tb.TempDir()
	dir := filepath.Join(base, "served")
	if err := os.Mkdir(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	disk, options := os.Getenv(diskVariable), slices.Clone(o.MountOptions)
	if disk == "" {
		disk = filepath.Join(base, "disk")
		testenv.Run(tb, "truncate", "-s", "2G", disk)
		options = append(options, "loop")
	}
	awaitFree(tb, disk)
	testenv.Run(tb, "mkfs.xfs", append(slices.Clone(o.MkfsOptions), "-q", "-f", disk)...)
	testenv.Run(tb, "mount", "-t", "xfs", "-o", strings.Join(append(options, "rw"), ","), disk, dir)
	tb.Cleanup(func() { testenv.Run(tb, "umount", dir) })
	return dir
}

// awaitFree waits until nobody has a disk: the kernel ends the namespaces of an
// earlier server, and what is mounted in them, when it finds the time.
func awaitFree(tb testing.TB, disk string) {
	tb.Helper()
	err := retry.For(tb.Context(), patience, func() (bool, error) {
		f, err := os.OpenFile(disk, os.O_RDWR|syscall.O_EXCL, 0)
		if err == nil {
			f.Close()
		}
		return err != nil, err
	})
	if err != nil {
		tb.Fatal(err)
	}
}

// hold starts the server's namespaces and daemons.
func (s *Server) hold(tb testing.TB) (pid int) {
	tb.Helper()
	conf := filepath.Join(tb.TempDir(), "nfs.conf")
	// The root of the machine may be something that cannot be exported, an overlay
	// say, and NFSv4 needs it for the way down to the exports: they get their own.
	text := "[general]\npipefs-directory=/run/rpc_pipefs\n[exports]\nrootdir=" + s.root + "\n"
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		tb.Fatal(err)
	}
	tracking := "tracking"
	if s.options.NoTracking {
		tracking = ""
	}
	start := []string{"unshare", "--net", "--uts", "--mount", "--propagation", "slave"}
	lease := strconv.Itoa(int(s.options.Lease.Seconds()))
	return hold(tb, start, stateScript+serverScript, conf, lease, tracking)
}

// Serve starts the kernel's threads after Stop. With tracking, clients get their
// locks back in the grace period, which ends when all have: see EndGrace.
func (s *Server) Serve(tb testing.TB) {
	tb.Helper()
	args := []string{"--no-udp"}
	for _, v := range s.options.Without {
		args = append(args, "-N", v)
	}
	s.run(tb, "rpc.nfsd", append(args, "4")...)
}

// Stop ends the kernel's threads: the server's machine is there, but refuses
// connections.
func (s *Server) Stop(tb testing.TB) {
	tb.Helper()
	s.run(tb, "rpc.nfsd", "0")
}

// Restart is Stop and Serve.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	s.Stop(tb)
	s.Serve(tb)
}

// EndGrace ends the grace period at once, of NFSv4 and of NFSv3's locks: who
// would still have asked for a lock of before the restart has lost it. NFSv3's
// would hold up everybody's new locks for as long as a lease.
func (s *Server) EndGrace(tb testing.TB) {
	tb.Helper()
	s.run(tb, "bash", "-c", "echo Y >/proc/fs/nfsd/v4_end_grace; echo Y >/proc/fs/lockd/nlm_end_grace")
}

// Expire makes the server forget the NFSv4 clients of a node, and give up their
// locks, as if their lease were over.
func (s *Server) Expire(tb testing.TB, l *Link) {
	tb.Helper()
	clients, err := filepath.Glob(s.path("/proc/fs/nfsd/clients/*"))
	if err != nil {
		tb.Fatal(err)
	}
	for _, c := range clients {
		// A client that ends between the two looks is not there.
		info, _ := os.ReadFile(filepath.Join(c, "info"))
		if !l.has(string(info)) {
			continue
		}
		if err := os.WriteFile(filepath.Join(c, "ctl"), []byte("expire\n"), 0); err != nil {
			tb.Fatal(err)
		}
	}
}

// Export exports a folder of the server's filesystem, which is made if it is not
// there, to everybody, and returns its path for clients of all versions. Options
// of exports(5) are added to rw,no_root_squash,insecure,no_subtree_check and win.
func (s *Server) Export(tb testing.TB, name string, options ...string) string {
	tb.Helper()
	export := "/" + name
	if err := os.MkdirAll(s.Dir(export), 0o755); err != nil {
		tb.Fatal(err)
	}
	if s.fsids[export] == 0 { // 0 would be the root
		s.fsids[export] = len(s.fsids) + 1
	}
	options = append([]string{"rw", "no_root_squash", "insecure", "no_subtree_check", fmt.Sprintf("fsid=%d", s.fsids[export])}, options...)
	s.run(tb, exportProgram, "-o", strings.Join(options, ","), "*:"+export)
	return export
}

// Unexport takes back an export: its clients get ESTALE, new ones ENOENT or
// EACCES. Export gives it back under the same file handles.
func (s *Server) Unexport(tb testing.TB, export string) {
	tb.Helper()
	s.run(tb, exportProgram, "-u", "*:"+export)
	s.run(tb, exportProgram, "-f")
}

// Dir is where the content of an export is on the server, for looking at it from
// the test.
func (s *Server) Dir(export string) string { return filepath.Join(s.root, export) }

// Address is the server's IPv4 address, the same for the test and all nodes.
func (s *Server) Address() string { return fmt.Sprintf("10.90.%d.1", s.n) }

// Address6 is the server's IPv6 address.
func (s *Server) Address6() string { return fmt.Sprintf("fd90:0:0:%x::1", s.n) }

// Link is the link to the test's own network namespace.
func (s *Server) Link() *Link { return s.own }

// run runs a program in the server's namespaces.
func (s *Server) run(tb testing.TB, name string, args ...string) {
	tb.Helper()
	command := slices.Concat(enter(s.pid, "net", "uts", "mount"), []string{name}, args)
	testenv.Run(tb, command[0], command[1:]...)
}

// path is where a path in the server's mount namespace is in the test's.
func (s *Server) path(path string) string {
	return fmt.Sprintf("/proc/%d/root%s", s.pid, path)
}
