// Package nfsd provides the kernel's NFS server and its clients for tests. Server and clients run in separate
// namespaces, and the link between them can be cut. The package runs only in the virtual machine of test/vm, whose
// kernel has NFS.
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

// diskVariable names the block device for a server's filesystem. If it is not set, a loop device is used.
const diskVariable = "TRIVET_TEST_DISK"

// exportProgram is the program that changes the table of exports.
const exportProgram = "exportfs" //nolint:misspell // the program's name

var (
	//go:embed state.sh
	stateScript string
	//go:embed server.sh
	serverScript string

	// servers is the number of servers that this process has started.
	servers atomic.Int32
)

// Options are the options of a server. The zero value is valid.
type Options struct {
	// MkfsOptions are options of mkfs.xfs. MountOptions are mount options of the server's filesystem.
	MkfsOptions, MountOptions []string
	// Without lists the NFS versions that the server does not support: 3, 4.0, 4.1, 4.2.
	Without []string
	// NoTracking omits nfsdcld, so that a restarted server has no record of its clients and their locks.
	NoTracking bool
	// Lease is the NFSv4 lease time and the grace period after a restart. The minimum and default is 10 s.
	Lease time.Duration
}

// Server is an NFS server in a separate network namespace, with one XFS filesystem that contains all exports.
type Server struct {
	options Options
	n       int            // index among the servers of this process, from 1
	root    string         // the mount point of its filesystem, which contains the exports
	pid     int            // a process in its namespaces
	links   int            // number of links
	own     *Link          // the link to the test
	fsids   map[string]int // the option fsid of each export (exports(5))
}

// Start creates a filesystem and serves it until the test ends. The server is linked to the network namespace of
// the test. Its grace period is over.
func Start(tb testing.TB, o Options) *Server {
	tb.Helper()
	testenv.RequireRoot(tb)
	requirePropagation(tb)
	testenv.Run(tb, "modprobe", "-a", "nfsd", "nfs", "nfsv3", "nfsv4")
	if o.Lease == 0 {
		o.Lease = 10 * time.Second
	}
	s := &Server{options: o, n: int(servers.Add(1)), root: filesystem(tb, o), fsids: map[string]int{}}
	s.pid = s.startDaemons(tb)
	tb.Cleanup(func() { s.Stop(tb) })
	s.Serve(tb)
	s.EndGrace(tb)
	s.own = s.link(tb, os.Getpid())
	return s
}

// requirePropagation fails a test if its mounts would not propagate to the nodes.
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

// filesystem creates the server's xfs and returns its mount point.
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

// awaitFree waits until a disk is not in use. The kernel removes the namespaces of an earlier server and their
// mounts after a delay.
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

// startDaemons starts the server's namespaces and daemons, and returns a process in the namespaces.
func (s *Server) startDaemons(tb testing.TB) (pid int) {
	tb.Helper()
	conf := filepath.Join(tb.TempDir(), "nfs.conf")
	// NFSv4 also exports the root directory. rootdir sets it to s.root, because the root filesystem of the
	// machine may not be exportable, for example if it is an overlay.
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
	return startNamespaces(tb, start, stateScript+serverScript, conf, lease, tracking)
}

// Serve starts the kernel's NFS threads after Stop. Unless NoTracking is set, clients reclaim their locks in the
// grace period. The grace period ends when all clients have reclaimed their locks, or when EndGrace is called.
func (s *Server) Serve(tb testing.TB) {
	tb.Helper()
	args := []string{"--no-udp"}
	for _, v := range s.options.Without {
		args = append(args, "-N", v)
	}
	s.run(tb, "rpc.nfsd", append(args, "4")...)
}

// Stop ends the kernel's NFS threads. The server's addresses then refuse connections.
func (s *Server) Stop(tb testing.TB) {
	tb.Helper()
	s.run(tb, "rpc.nfsd", "0")
}

// Restart stops and starts the kernel's NFS threads.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	s.Stop(tb)
	s.Serve(tb)
}

// EndGrace ends the grace periods of NFSv4 and of NFSv3's locks. Clients that have not reclaimed their locks
// lose them. Without EndGrace, NFSv3 delays all new locks for the time of a lease.
func (s *Server) EndGrace(tb testing.TB) {
	tb.Helper()
	s.run(tb, "bash", "-c", "echo Y >/proc/fs/nfsd/v4_end_grace; echo Y >/proc/fs/lockd/nlm_end_grace")
}

// Expire makes the server remove the NFSv4 clients of a node and their locks, as if their leases had expired.
func (s *Server) Expire(tb testing.TB, l *Link) {
	tb.Helper()
	clients, err := filepath.Glob(s.path("/proc/fs/nfsd/clients/*"))
	if err != nil {
		tb.Fatal(err)
	}
	for _, c := range clients {
		// A client that ended after the glob has no file.
		info, _ := os.ReadFile(filepath.Join(c, "info"))
		if !l.isClient(string(info)) {
			continue
		}
		if err := os.WriteFile(filepath.Join(c, "ctl"), []byte("expire\n"), 0); err != nil {
			tb.Fatal(err)
		}
	}
}

// Export exports a directory to all clients, and returns its path, which is the same for all NFS versions. It
// creates a missing directory. Options of exports(5) follow rw,no_root_squash,insecure,no_subtree_check and
// take precedence.
func (s *Server) Export(tb testing.TB, name string, options ...string) string {
	tb.Helper()
	export := "/" + name
	if err := os.MkdirAll(s.Dir(export), 0o755); err != nil {
		tb.Fatal(err)
	}
	if s.fsids[export] == 0 { // fsid=0 would be the NFSv4 root
		s.fsids[export] = len(s.fsids) + 1
	}
	options = append([]string{"rw", "no_root_squash", "insecure", "no_subtree_check", fmt.Sprintf("fsid=%d", s.fsids[export])}, options...)
	s.run(tb, exportProgram, "-o", strings.Join(options, ","), "*:"+export)
	return export
}

// Unexport removes an export: existing mounts get ESTALE, new mounts ENOENT or EACCES. Export restores it with the
// same file handles.
func (s *Server) Unexport(tb testing.TB, export string) {
	tb.Helper()
	s.run(tb, exportProgram, "-u", "*:"+export)
	s.run(tb, exportProgram, "-f")
}

// Dir returns the directory of an export on the server, for access by the test.
func (s *Server) Dir(export string) string { return filepath.Join(s.root, export) }

// Address returns the server's IPv4 address, which is the same for the test and all nodes.
func (s *Server) Address() string { return fmt.Sprintf("10.90.%d.1", s.n) }

// Address6 returns the server's IPv6 address.
func (s *Server) Address6() string { return fmt.Sprintf("fd90:0:0:%x::1", s.n) }

// Link returns the link to the network namespace of the test.
func (s *Server) Link() *Link { return s.own }

// run runs a program in the server's namespaces.
func (s *Server) run(tb testing.TB, name string, args ...string) {
	tb.Helper()
	command := slices.Concat(enter(s.pid, "net", "uts", "mount"), []string{name}, args)
	testenv.Run(tb, command[0], command[1:]...)
}

// path converts a path in the server's mount namespace to a path for the test.
func (s *Server) path(path string) string {
	return fmt.Sprintf("/proc/%d/root%s", s.pid, path)
}
