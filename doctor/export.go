package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/internal/sunrpc"
	"github.com/trivet-csi/trivet/linux/fsprobe"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Export is an export to check.
type Export struct {
	Config pool.Config
	// NoPool is true if the export is not a pool of the configuration. Then only the export is checked.
	NoPool bool
	// StateDir and Node are the state directory and the name of this node; either may be empty.
	StateDir, Node string
	// Serving is true if a running driver serves the pool.
	Serving bool
}

// name returns the prefix of the names of the export's checks.
func (e Export) name() string {
	if e.NoPool {
		return "export " + e.source()
	}
	return "pool " + e.Config.Name
}

// source returns the export as server:path.
func (e Export) source() string {
	return mount.NFS{Server: e.server(), Path: e.Config.NFS.Export}.String()
}

// server returns the name of the server, or its address without brackets.
func (e Export) server() string { return strings.Trim(e.Config.NFS.Server, "[]") }

// examination checks one export and reports the results.
type examination struct {
	Export
	forms  volume.Forms
	report func(Check)
}

// proceed reports a check, and returns whether the examination can proceed because the check has not failed.
func (x examination) proceed(c Check) bool {
	x.report(c)
	return c.Result != Failure
}

// ExamineExport checks an export, and calls report after each check. It may hang in the kernel until
// its process is killed, so it must run in a child process with a deadline. It creates a directory
// at the top of the export, and removes it.
func ExamineExport(ctx context.Context, kinds backend.Kinds, e Export, report func(Check)) {
	x := examination{Export: e, forms: kinds.Forms(), report: report}
	if !x.checkServer(ctx) {
		return
	}
	if x.usesKerberos() {
		x.report(judgeKerberos(x.name()+", Kerberos", findKerberos()))
	}
	top, version, err := x.mount(ctx)
	if err == nil {
		defer top.Close()
		x.tryExport(ctx, top, version)
		x.checkPool(ctx, top)
	}
	if !errors.Is(err, mount.ErrExportMissing) && !slices.ContainsFunc(mountflags.Split(x.Config.NFS.MountOptions), mount.IsNFSVersion) {
		x.report(judgeVersions(x.name()+", versions", x.tryVersions(ctx)))
	}
	x.report(judgeLostLocks(x.name()+", lost locks", read("/sys/module/nfs/parameters/recover_lost_locks")))
	x.report(clientTracking(x.name() + ", client tracking"))
}

// mount mounts the export until the returned directory is closed. It also returns the version of NFS.
func (x examination) mount(ctx context.Context) (*os.File, string, error) {
	top, version, err := export.Mount(ctx, x.Config)
	x.report(judgeMounted(x.name()+", export", x.source(), version, err))
	return top, version, err
}

func (x examination) usesKerberos() bool { return mount.UsesKerberos(x.Config.NFS.MountOptions) }

// kerberos describes the programs and files of this node that Kerberos needs.
type kerberos struct {
	gssd bool // rpc.gssd runs in this network namespace
	sure bool // all processes and files of the node are visible
	// keytab is the error of reading the keytab.
	keytab error
}

// keytab is the default path of the keytab (rpc.gssd(8)).
const keytab = "/etc/krb5.keytab"

func findKerberos() (k kerberos) {
	k.gssd, k.sure = mount.GSSDRuns()
	_, k.keytab = os.Stat(keytab)
	return k
}

// openRoot opens a directory as an os.Root.
func openRoot(dir *os.File) (*os.Root, error) {
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

// serverLog is the remedy for an unexpected error of an export.
const serverLog = "read the log of the server, and dmesg on this node"

// checkPool checks the pool on the export, whose root directory is open.
func (x examination) checkPool(ctx context.Context, root *os.File) {
	if x.NoPool {
		return
	}
	p, err := pool.OpenExportReadOnly(ctx, x.forms, root, x.Config, x.StateDir)
	if err != nil {
		x.report(judgeClosedExport(x.name(), err))
		return
	}
	defer p.Close()
	facts, err := readContents(p)
	if err != nil {
		x.report(failure(x.name(), err.Error(), serverLog))
		return
	}
	x.report(judgePool(x.name(), facts.uuid+" at "+x.source(), x.Config.NFS.Init && x.Config.UUID == ""))
	x.report(judgeSpace(x.name()+", space", facts.usage))
	x.report(judgeVolumes(x.name()+", volumes", facts))
	x.report(judgeLeftovers(x.name()+", leftovers", facts, x.Serving))
	if sample := facts.directories[:min(len(facts.directories), quotaSamples)]; len(sample) > 0 {
		limited, err := countLimited(p, root, sample)
		x.report(judgeQuota(x.name()+", quota", limited, len(sample), err))
	}
	if x.Node != "" && x.Config.NFS.Fencing != pool.FencingNone {
		identity, registered, err := readIdentity(p)
		x.report(judgeIdentity(x.name()+", client identity", x.Node, identity, registered, err))
	}
}

// quotaSamples is the number of directories that are checked for a quota.
const quotaSamples = 10

// countLimited counts the directories with a quota on the server: those whose size in statfs(2) differs
// from the size of the export.
func countLimited(p *pool.Pool, root *os.File, directories []volume.Volume) (limited int, err error) {
	var ofExport, ofDirectory syscall.Statfs_t
	if err := syscall.Fstatfs(int(root.Fd()), &ofExport); err != nil {
		return 0, err
	}
	for _, v := range directories {
		dir, err := p.OpenDirectory(v)
		if err != nil {
			return limited, err
		}
		err = syscall.Fstatfs(int(dir.Fd()), &ofDirectory)
		dir.Close()
		if err != nil {
			return limited, err
		}
		if ofDirectory.Blocks != ofExport.Blocks {
			limited++
		}
	}
	return limited, nil
}

// readIdentity returns the NFS client identity of this node, and the node that registered it in the
// pool.
func readIdentity(p *pool.Pool) (identity, registered string, err error) {
	if identity, err = mount.ClientIdentity(); err != nil {
		return "", "", err
	}
	registered, err = p.Export().Registered(identity)
	return identity, registered, err
}

// checkServer reports whether the server's name resolves and the server answers. It makes no file system
// calls, so it cannot hang in the kernel.
func (x examination) checkServer(ctx context.Context) bool {
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", x.server())
	if !x.proceed(judgeName(x.name()+", name", x.server(), addresses, err)) {
		return false
	}
	port, answers := portOf(x.Config.NFS.MountOptions), map[netip.Addr]error{}
	for _, a := range addresses {
		answers[a] = ping(ctx, net.JoinHostPort(a.Unmap().String(), port))
	}
	return x.proceed(judgeServer(x.name()+", server", port, answers))
}

// portOf returns the NFS port from the mount options, by default 2049.
func portOf(options []string) string {
	for _, o := range slices.Backward(options) {
		if port, ok := strings.CutPrefix(o, "port="); ok && port != "0" {
			return port
		}
	}
	return "2049"
}

const pingPatience = 3 * time.Second

// ping returns nil if an NFS server answers at an address (host:port), whichever versions it supports.
func ping(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, pingPatience)
	defer cancel()
	return sunrpc.Ping(ctx, address, sunrpc.NFSProgram, 4)
}

// protocols are the versions of NFS that the driver supports, the best first.
var protocols = []string{"4.2", "4.1", "4.0", "3"}

// versionResult is a version of NFS, and the error of mounting the export with this version.
type versionResult struct {
	version string
	err     error
}

// versionPatience limits the attempt with one version, because the kernel retries for a long time if a
// server lacks version 3.
const versionPatience = 4 * time.Second

// tryVersions mounts the export once with each version.
func (x examination) tryVersions(ctx context.Context) []versionResult {
	var all []versionResult
	for _, v := range protocols {
		all = append(all, versionResult{v, x.tryVersion(ctx, v)})
	}
	return all
}

// tryVersion mounts the export with one version, and unmounts it.
func (x examination) tryVersion(ctx context.Context, version string) error {
	top, err := x.mountVersion(ctx, version)
	if err == nil {
		top.Close()
	}
	return err
}

// mountVersion mounts the export with one version until the returned directory is closed.
func (x examination) mountVersion(ctx context.Context, version string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, versionPatience)
	defer cancel()
	c, n := x.Config, *x.Config.NFS
	n.MountOptions = mount.NFS{Options: n.MountOptions}.With([]string{"nfsvers=" + version}).Options
	c.NFS = &n
	top, _, err := export.Mount(ctx, c)
	return top, err
}

// scratchPrefix is the prefix of the name of the directory that is created on the export.
const scratchPrefix = ".trivet-doctor."

// tryExport tests the operations that drivers need, in a scratch directory of a mount with a version of NFS.
func (x examination) tryExport(ctx context.Context, top *os.File, version string) {
	root, err := openRoot(top)
	if err != nil {
		x.report(failure(x.name()+", writing", err.Error(), serverLog))
		return
	}
	defer root.Close()
	scratch := scratchPrefix + rand.Text()
	if err = root.Mkdir(scratch, 0o700); err == nil {
		removeStale(root, scratch)
	}
	if !x.proceed(judgeWriting(x.name()+", writing", err)) {
		return
	}
	defer func() {
		if err := root.RemoveAll(scratch); err != nil {
			x.report(warning(x.name()+", writing", err.Error(), "remove "+scratch+" from the export"))
		}
	}()
	dir, err := root.OpenRoot(scratch)
	if err != nil {
		x.report(failure(x.name()+", writing", err.Error(), serverLog))
		return
	}
	defer dir.Close()
	x.report(judgeOwners(x.name()+", owners", tryOwners(dir), x.usesKerberos()))
	x.report(judgeRename(x.name()+", rename", tryRename(dir)))
	x.report(judgeClock(x.name()+", clock", tryClock(dir)))
	x.report(judgeFeatures(x.name()+", features", tryFeatures(dir)))
	x.report(judgeLocks(x.name()+", locks", x.tryLocks(ctx, dir, scratch, version)))
}

// staleAfter is the age after which a scratch directory is orphaned.
const staleAfter = 10 * time.Minute

// removeStale removes the scratch directories of killed processes. It compares their times with that of the
// directory own, because all are times of the server's clock. It ignores errors.
func removeStale(root *os.Root, own string) {
	now, err := root.Stat(own)
	if err != nil {
		return
	}
	entries, _ := fs.ReadDir(root.FS(), ".")
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && e.IsDir() && strings.HasPrefix(e.Name(), scratchPrefix) && now.ModTime().Sub(info.ModTime()) > staleAfter {
			_ = root.RemoveAll(e.Name())
		}
	}
}

// unmappedUser is a user ID that no server has a reason to map.
const unmappedUser = 54321

// owners is the result of a test of how a server maps users.
type owners struct {
	// root and other own the files that root and another user create.
	root, other uint32
	// denied is true if the other user may not create files.
	denied bool
	// chown is the error of changing the owner of root's file.
	chown error
	err   error
}

// tryOwners tests how the server maps users.
func tryOwners(dir *os.Root) (o owners) {
	if o.err = dir.Chmod(".", 0o777); o.err != nil {
		return o
	}
	if o.root, o.err = fsprobe.OwnerOf(dir, 0); o.err != nil {
		return o
	}
	o.other, o.err = fsprobe.OwnerOf(dir, unmappedUser)
	switch {
	case errors.Is(o.err, fsprobe.ErrNotPermitted):
		o.other, o.err = unmappedUser, nil // this process may not test how other users are mapped
	case errors.Is(o.err, syscall.EACCES):
		o.denied, o.err = true, nil
		return o
	case o.err != nil:
		return o
	}
	if o.err = dir.WriteFile("owned", nil, 0o600); o.err == nil {
		o.chown = dir.Chown("owned", unmappedUser, unmappedUser)
	}
	return o
}

// tryRename tests renames and hard links.
func tryRename(dir *os.Root) error {
	if err := dir.Mkdir("one", 0o700); err != nil {
		return err
	}
	if err := dir.WriteFile("one/file", nil, 0o600); err != nil {
		return err
	}
	if err := dir.Rename("one", "two"); err != nil {
		return err
	}
	_, err := dir.Stat("two/file")
	return errors.Join(err, dir.Link("two/file", "two/link"))
}

// skew is the time by which the server's clock is ahead of this node's.
type skew struct {
	ahead time.Duration
	err   error
}

// tryClock compares the modification time of a new file with this node's clock.
func tryClock(dir *os.Root) skew {
	before := time.Now()
	if err := dir.WriteFile("clock", []byte("x"), 0o600); err != nil {
		return skew{err: err}
	}
	info, err := dir.Stat("clock")
	if err != nil {
		return skew{err: err}
	}
	middle := before.Add(time.Since(before) / 2)
	return skew{ahead: info.ModTime().Sub(middle)}
}

// feature is an optional feature of a filesystem.
type feature struct {
	what string // the feature
	have bool   // the filesystem has the feature
	err  error  // the test of the feature failed
}

// tryFeatures tests optional features of the export's filesystem.
func tryFeatures(dir *os.Root) []feature {
	test := func(what string, probe func(*os.Root) (bool, error)) feature {
		have, err := probe(dir)
		return feature{what, have, err}
	}
	return []feature{
		test("clones of files", fsprobe.Clones), test("holes", fsprobe.ShowsHoles), test("fallocate", fsprobe.Allocates),
	}
}

// lockPatience limits the wait for a lock, because the kernel retries during the server's grace period.
const lockPatience = 5 * time.Second

// otherClient contains, for a version of NFS, the version of a second mount that the server regards as that of another client: the
// identity of a client of NFS 4 contains the minor version (nfs4_init_uniform_client_string of Linux). A server may give a client a write
// delegation (RFC 8881, section 10.4), with which the client does not show its locks to the server until another client opens the file.
var otherClient = map[string]string{"4.2": "4.1", "4.1": "4.2", "4.0": "4.1", "3": "3"}

// lockTest is the result of locking one file through two mounts.
type lockTest struct {
	// visible means that the lock through one mount was visible through the other.
	visible bool
	// sameClient is the error because of which the server regards both mounts as those of one client.
	sameClient error
	err        error
}

// tryLocks tests whether a lock through the mount of dir, with a version of NFS, is visible through a second mount.
func (x examination) tryLocks(ctx context.Context, dir *os.Root, scratch, version string) (t lockTest) {
	top, err := x.mountVersion(ctx, otherClient[version])
	if err != nil {
		if version != "3" { // which has no delegations
			t.sameClient = err
		}
		top, _, err = export.Mount(ctx, x.Config)
	}
	if err != nil {
		return lockTest{err: err}
	}
	defer top.Close()
	other, err := openScratch(top, scratch)
	if err != nil {
		return lockTest{err: err}
	}
	defer other.Close()
	t.visible, t.err = Within(lockPatience, func() (bool, error) { return fsprobe.LocksReach(dir, other) })
	return t
}

// openScratch opens the scratch directory in another mount of the export.
func openScratch(top *os.File, scratch string) (*os.Root, error) {
	root, err := openRoot(top)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return root.OpenRoot(scratch)
}
