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
	"github.com/trivet-csi/trivet/internal/sunrpc"
	"github.com/trivet-csi/trivet/linux/fsprobe"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Export is a server's export that is looked at.
type Export struct {
	Config pool.Config
	// NoPool: no configuration names it, it is looked at as it is.
	NoPool bool
	// StateDir and Node are this node's, for what a pool knows of it; either may be
	// empty.
	StateDir, Node string
	// Serving: a driver is at work on the pool.
	Serving bool
}

func (e Export) name() string {
	if e.NoPool {
		return "export " + e.source()
	}
	return "pool " + e.Config.Name
}

// source is the export as people write it.
func (e Export) source() string {
	return mount.NFS{Server: e.server(), Path: e.Config.NFS.Export}.String()
}

// server is the server's name, or its address without brackets.
func (e Export) server() string { return strings.Trim(e.Config.NFS.Server, "[]") }

// examination tells the checks of one export.
type examination struct {
	Export
	forms volume.Forms
	tell  func(Check)
}

// say tells whether one may go on.
func (x examination) say(c Check) bool {
	x.tell(c)
	return c.Result != Failure
}

// ExamineExport looks at an export and tells each check as it is made. Whatever
// comes next may hang in the kernel until the process is killed: it is for a child
// with a deadline. It writes to the export, into a directory at its top that it
// makes and removes.
func ExamineExport(ctx context.Context, kinds backend.Kinds, e Export, tell func(Check)) {
	x := examination{Export: e, forms: kinds.Forms(), tell: tell}
	if !x.lookAtServer(ctx) {
		return
	}
	if top := x.mount(ctx); top != nil {
		defer top.Close()
		x.tryExport(ctx, top)
		x.lookAtPool(ctx, top)
	}
	if !slices.ContainsFunc(x.Config.NFS.MountOptions, namesVersion) {
		x.tell(judgeVersions(x.name()+", versions", x.tryVersions(ctx)))
	}
	x.tell(judgeLostLocks(x.name()+", lost locks", read("/sys/module/nfs/parameters/recover_lost_locks")))
	x.tell(clientTracking(x.name() + ", client tracking"))
}

// mount is nil where the export cannot be mounted. The directory keeps the mount.
func (x examination) mount(ctx context.Context) *os.File {
	top, version, err := export.Mount(ctx, x.Config)
	x.tell(judgeMounted(x.name()+", export", x.source(), version, err))
	return top
}

func openRoot(dir *os.File) (*os.Root, error) {
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

const serverLog = "look at the server's log, and at dmesg here"

// lookAtPool looks at what a pool of the configuration has on the export.
func (x examination) lookAtPool(ctx context.Context, root *os.File) {
	if x.NoPool {
		return
	}
	p, err := pool.OpenExportReadOnly(ctx, x.forms, root, x.Config, x.StateDir)
	if err != nil {
		x.tell(judgeClosedExport(x.name(), err))
		return
	}
	defer p.Close()
	facts, err := readContents(p)
	if err != nil {
		x.tell(failure(x.name(), err.Error(), serverLog))
		return
	}
	x.tell(judgePool(x.name(), facts.uuid+" at "+x.source(), x.Config.NFS.Init && x.Config.UUID == ""))
	x.tell(judgeSpace(x.name()+", space", facts.usage))
	x.tell(judgeVolumes(x.name()+", volumes", facts))
	x.tell(judgeLeftovers(x.name()+", leftovers", facts, x.Serving))
	if some := facts.directories[:min(len(facts.directories), quotaSamples)]; len(some) > 0 {
		limited, err := countLimited(p, root, some)
		x.tell(judgeQuota(x.name()+", quota", limited, len(some), err))
	}
	if x.Node != "" && x.Config.NFS.Fencing != pool.FencingNone {
		identity, registered, err := lookAtIdentity(p)
		x.tell(judgeIdentity(x.name()+", client identity", x.Node, identity, registered, err))
	}
}

// quotaSamples is how many directories are looked at for a quota.
const quotaSamples = 10

// countLimited counts the directories whose size is not that of the export: the
// server has a quota on them.
func countLimited(p *pool.Pool, root *os.File, directories []volume.Volume) (limited int, err error) {
	var whole, one syscall.Statfs_t
	if err := syscall.Fstatfs(int(root.Fd()), &whole); err != nil {
		return 0, err
	}
	for _, v := range directories {
		dir, err := p.OpenDirectory(v)
		if err != nil {
			return limited, err
		}
		err = syscall.Fstatfs(int(dir.Fd()), &one)
		dir.Close()
		if err != nil {
			return limited, err
		}
		if one.Blocks != whole.Blocks {
			limited++
		}
	}
	return limited, nil
}

// lookAtIdentity tells what the server knows this node by, and which node of the pool
// has registered that.
func lookAtIdentity(p *pool.Pool) (identity, registered string, err error) {
	if identity, err = mount.ClientIdentity(); err != nil {
		return "", "", err
	}
	registered, err = p.Export().Registered(identity)
	return identity, registered, err
}

// lookAtServer needs no kernel: nothing in it can hang.
func (x examination) lookAtServer(ctx context.Context) bool {
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", x.server())
	if !x.say(judgeName(x.name()+", name", x.server(), addresses, err)) {
		return false
	}
	port, answers := portOf(x.Config.NFS.MountOptions), map[netip.Addr]error{}
	for _, a := range addresses {
		answers[a] = ping(ctx, net.JoinHostPort(a.Unmap().String(), port))
	}
	return x.say(judgeServer(x.name()+", server", port, answers))
}

// portOf is where NFS listens: as the options say, or as everywhere.
func portOf(words []string) string {
	for _, w := range slices.Backward(words) {
		if port, ok := strings.CutPrefix(w, "port="); ok && port != "0" {
			return port
		}
	}
	return "2049"
}

const pingPatience = 3 * time.Second

func ping(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, pingPatience)
	defer cancel()
	return sunrpc.Ping(ctx, address, sunrpc.NFSProgram, 4)
}

// protocols are the versions of NFS that the driver knows, the best first.
var protocols = []string{"4.2", "4.1", "4.0", "3"}

// served is a version of NFS, and why it cannot be mounted.
type served struct {
	version string
	err     error
}

// versionPatience is what one version may take: the kernel asks a server that lacks
// version 3 for a long time.
const versionPatience = 4 * time.Second

// tryVersions mounts with each version.
func (x examination) tryVersions(ctx context.Context) []served {
	var all []served
	for _, v := range protocols {
		all = append(all, served{v, x.tryVersion(ctx, v)})
	}
	return all
}

func (x examination) tryVersion(ctx context.Context, version string) error {
	ctx, cancel := context.WithTimeout(ctx, versionPatience)
	defer cancel()
	c, n := x.Config, *x.Config.NFS
	n.MountOptions = append(slices.Clone(n.MountOptions), "nfsvers="+version)
	c.NFS = &n
	top, _, err := export.Mount(ctx, c)
	if err == nil {
		top.Close()
	}
	return err
}

func namesVersion(word string) bool {
	key, _, _ := strings.Cut(word, "=")
	return key == "vers" || key == "nfsvers" || key == "minorversion" || word == "v3" || strings.HasPrefix(word, "v4")
}

// scratchPrefix begins the name of the directory that is made on the export.
const scratchPrefix = ".trivet-doctor."

// tryExport does what drivers do, in a directory of its own.
func (x examination) tryExport(ctx context.Context, top *os.File) {
	root, err := openRoot(top)
	if err != nil {
		x.tell(failure(x.name()+", writing", err.Error(), serverLog))
		return
	}
	defer root.Close()
	scratch := scratchPrefix + rand.Text()
	if err = root.Mkdir(scratch, 0o700); err == nil {
		removeStale(root, scratch)
	}
	if !x.say(judgeWriting(x.name()+", writing", err)) {
		return
	}
	defer func() {
		if err := root.RemoveAll(scratch); err != nil {
			x.tell(warning(x.name()+", writing", err.Error(), "remove "+scratch+" from the export"))
		}
	}()
	dir, err := root.OpenRoot(scratch)
	if err != nil {
		x.tell(failure(x.name()+", writing", err.Error(), serverLog))
		return
	}
	defer dir.Close()
	x.tell(judgeOwners(x.name()+", owners", tryOwners(dir)))
	x.tell(judgeRename(x.name()+", rename", tryRename(dir)))
	x.tell(judgeClock(x.name()+", clock", tryClock(dir)))
	x.tell(judgeFeatures(x.name()+", features", tryFeatures(dir)))
	x.tell(judgeLocks(x.name()+", locks", x.tryLocks(ctx, dir, scratch)))
}

// staleAfter is the age of a directory whose doctor was killed.
const staleAfter = 10 * time.Minute

// removeStale removes what doctors left that were killed, by the server's clock. What
// cannot be removed is another's to mend.
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

// stranger is a user that no server has a reason to take for another.
const stranger = 54321

// owners is what a server makes of users.
type owners struct {
	// root and other own what root and another user make.
	root, other uint32
	// given is the error of giving a file of root's away.
	given error
	err   error
}

func tryOwners(dir *os.Root) (o owners) {
	if o.err = dir.Chmod(".", 0o777); o.err != nil {
		return o
	}
	if o.root, o.err = fsprobe.OwnerOf(dir, 0); o.err != nil {
		return o
	}
	o.other, o.err = fsprobe.OwnerOf(dir, stranger)
	if errors.Is(o.err, fsprobe.ErrNotPermitted) {
		o.other, o.err = stranger, nil // as far as can be told
	}
	if o.err != nil {
		return o
	}
	if o.err = dir.WriteFile("owned", nil, 0o600); o.err == nil {
		o.given = dir.Chown("owned", stranger, stranger)
	}
	return o
}

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

// skew is how far the server's clock is ahead of this node's.
type skew struct {
	ahead time.Duration
	err   error
}

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

// feature is something that a filesystem may have or lack.
type feature struct {
	what string
	have bool
	err  error
}

func tryFeatures(dir *os.Root) []feature {
	var all []feature
	for _, f := range []struct {
		what string
		look func(*os.Root) (bool, error)
	}{
		{"clones of files", fsprobe.Clones},
		{"holes", fsprobe.ShowsHoles},
		{"fallocate", fsprobe.Allocates},
	} {
		have, err := f.look(dir)
		all = append(all, feature{f.what, have, err})
	}
	return all
}

// lockPatience: while a server is in its grace period it gives no new locks, and
// the kernel asks again and again.
const lockPatience = 5 * time.Second

// tryLocks takes a lock through one mount and looks for it through another.
func (x examination) tryLocks(ctx context.Context, dir *os.Root, scratch string) feature {
	other, err := x.mountedAgain(ctx, scratch)
	if err != nil {
		return feature{err: err}
	}
	defer other.Close()
	reach, err := Within(lockPatience, func() (bool, error) { return fsprobe.LocksReach(dir, other) })
	return feature{have: reach, err: err}
}

func (x examination) mountedAgain(ctx context.Context, scratch string) (*os.Root, error) {
	top, _, err := export.Mount(ctx, x.Config)
	if err != nil {
		return nil, err
	}
	defer top.Close()
	root, err := openRoot(top)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return root.OpenRoot(scratch)
}
