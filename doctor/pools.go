package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// writeOK is W_OK of access(2), which for root tells a read-only filesystem.
const writeOK = 2

const stateDirectory = "state directory"

func stateCheck(dir string) Check {
	const name = stateDirectory
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return warning(name, dir+" is not there", "the driver makes it when it starts; if it has started, name its own with --state-dir")
	case err != nil:
		return failure(name, err.Error(), "give the driver a directory that it can write")
	case !info.IsDir():
		return failure(name, dir+" is no directory", "give the driver a directory that it can write")
	}
	if err := syscall.Access(dir, writeOK); err != nil {
		return failure(name, dir+": "+err.Error(), "mount its filesystem writable, or give the driver another --state-dir")
	}
	known, err := pool.Remembered(dir)
	if err != nil {
		return failure(name, err.Error(), "check the disk it is on")
	}
	var pools []string
	for _, name := range slices.Sorted(maps.Keys(known)) {
		pools = append(pools, name+" "+known[name])
	}
	if len(pools) == 0 {
		return ok(name, "%s, which remembers no pool yet", dir)
	}
	return ok(name, "%s, which remembers: %s", dir, strings.Join(pools, ", "))
}

// poolFacts is what was read of a pool.
type poolFacts struct {
	uuid     string
	fsType   string
	readOnly bool
	reflinks bool
	// mode is of the pool's directory; mounted is the mount that it is on.
	mode             fs.FileMode
	mounted          *mount.Entry
	usage            pool.Usage
	damaged          []error
	attached         int
	directories      []volume.Volume
	making, removing int
	// limits is what keeps directories to their size, and unlimited why nothing does.
	limits    quota.Kind
	unlimited error
}

// nestingChecks look for pools inside other pools.
func nestingChecks(configs []pool.Config, stateDir string) []Check {
	var checks []Check
	for _, err := range pool.Nested(configs, stateDir) {
		checks = append(checks, failure("pools", err.Error(), "the driver serves only the one that comes first in the configuration: move the data of the other one's volumes away, and give that pool a directory of its own"))
	}
	return checks
}

// look is a pool that is open for reading, or the reason why it is not.
type look struct {
	pool *pool.Pool
	err  error
}

// looks holds the open directory pools by name. They are open at the same time, because the
// room in a pool depends on the other pools of its filesystem.
type looks map[string]look

func lookAtPools(ctx context.Context, configs []pool.Config, o Options) looks {
	var filesystems ledger.Filesystems
	all := looks{}
	for _, c := range configs {
		if c.Directory.Path != "" {
			p, err := Within(o.Patience, func() (*pool.Pool, error) {
				return pool.OpenReadOnlyOn(ctx, &filesystems, o.Kinds.Forms(), c, o.StateDir)
			})
			all[c.Name] = look{p, err}
		}
	}
	return all
}

func (l looks) close() {
	for _, at := range l {
		if at.err == nil {
			at.pool.Close()
		}
	}
}

// poolChecks judge one pool; serving means that a driver is at work on it.
func poolChecks(c pool.Config, stateDir string, at look, serving bool) []Check {
	name, path := "pool "+c.Name, c.Directory.Path
	parent := filepath.Dir(path)
	if errors.Is(at.err, errNoAnswer) {
		return []Check{hangs(name, at.err)}
	}
	if at.err != nil {
		return []Check{judgeClosedPool(name, path, at.err, isDir(parent) || parent == filepath.Join(stateDir, "pools"))}
	}
	facts, err := readPool(at.pool, path)
	if err != nil {
		return []Check{failure(name, err.Error(), "check the disk that "+path+" is on (dmesg)")}
	}
	return []Check{
		judgeFilesystem(name, path, facts),
		judgeAccess(name+", access", path, facts),
		judgeLimits(name+", directories", c.Quota, facts),
		judgeSpace(name+", space", facts.usage),
		judgeVolumes(name+", volumes", facts),
		judgeLeftovers(name+", leftovers", facts, serving),
	}
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// judgeClosedPool says why a pool could not be read. parent: the directory above
// it is there.
func judgeClosedPool(name, path string, err error, parent bool) Check {
	switch {
	case errors.Is(err, volume.ErrUnavailable):
		return warning(name, err.Error(), "a driver that starts does that; a directory that is no pool yet has to be empty")
	case errors.Is(err, fs.ErrNotExist) && !parent:
		return failure(name, path+" is not there, nor the directory above it", "mount the pool's disk on this node, or make the directory; in a container, mount it from the host")
	case errors.Is(err, syscall.ENOTDIR):
		return failure(name, path+" is no directory", "correct directory.path in the configuration")
	case errors.Is(err, volume.ErrPrecondition), errors.Is(err, volume.ErrDamaged):
		return failure(name, err.Error(), "do what the message says; nothing is served from "+path+" until then")
	case errors.Is(err, fs.ErrNotExist):
		return warning(name, path+" is not there", "a driver that starts makes it, on the filesystem of the directory above; if the pool is to be on a disk of its own, mount that first")
	}
	return failure(name, err.Error(), "check the disk that "+path+" is on (dmesg)")
}

func readPool(p *pool.Pool, path string) (poolFacts, error) {
	at, err := mount.At(path)
	if err != nil {
		return poolFacts{}, err
	}
	has, err := reflinks(path, at.FSType)
	if err != nil {
		return poolFacts{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return poolFacts{}, err
	}
	f, err := readContents(p)
	f.fsType, f.readOnly, f.reflinks, f.mounted = at.FSType, isReadOnly(at), has, at
	f.mode = info.Mode().Perm()
	f.limits, f.unlimited = p.Quotas.Enforces()
	return f, err
}

// readContents reads what any pool has, whatever it is on.
func readContents(p *pool.Pool) (poolFacts, error) {
	f := poolFacts{uuid: p.UUID()}
	var err error
	if f.usage, err = p.Usage(); err != nil {
		return f, err
	}
	entries, err := p.Entries()
	if err != nil {
		return f, err
	}
	for _, e := range entries {
		if e.Err != nil {
			f.damaged = append(f.damaged, e.Err)
		}
		if len(e.Nodes) > 0 {
			f.attached++
		}
		if e.Err == nil && e.Volume.Directory != nil {
			f.directories = append(f.directories, e.Volume)
		}
	}
	f.making, f.removing, err = p.Leftovers()
	return f, err
}

// isReadOnly: the mount or its filesystem.
func isReadOnly(e *mount.Entry) bool {
	return slices.Contains(strings.Split(e.Options+","+e.VFSOptions, ","), "ro")
}

func reflinks(path, fsType string) (bool, error) {
	dir, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	return blockdev.Reflinks(dir, fsType)
}

func judgeFilesystem(name, path string, f poolFacts) Check {
	seen := fmt.Sprintf("%s at %s, on %s", f.uuid, path, f.fsType)
	if f.reflinks {
		seen += " with reflink"
	}
	switch {
	case f.readOnly:
		return failure(name, seen+", which is read-only", "mount it writable; if the kernel made it read-only after an error (dmesg), check it first")
	case !volume.ValidFSType(f.fsType):
		return warning(name, seen, "only ext4, xfs and btrfs are known to do the direct I/O that images want: put the pool on one of them")
	}
	return ok(name, "%s", seen)
}

// judgeAccess tells whether users of the node can reach what tenants have in directories. On
// a filesystem of its own a pool can be mounted so that they could do nothing with it.
func judgeAccess(name, path string, f poolFacts) Check {
	if f.mode&0o077 != 0 {
		return warning(name, fmt.Sprintf("%s has mode %04o: users of this node may reach the directories of tenants, and run what is set-user-ID there", path, f.mode),
			"chmod 0700 "+path+"; the driver does that when it starts")
	}
	const closed = "only root can enter the pool's directory"
	own := f.mounted.Root == "/" && f.mounted.Mountpoint != "/"
	var missing []string
	for _, flag := range []string{"nosuid", "nodev"} {
		if !slices.Contains(strings.Split(f.mounted.Options, ","), flag) {
			missing = append(missing, flag)
		}
	}
	if len(missing) > 0 && own && len(f.directories) > 0 {
		return warning(name, fmt.Sprintf("%s; %s, which has directory volumes, is mounted without %s", closed, f.mounted.Mountpoint, strings.Join(missing, " and ")),
			"mount it with nosuid and nodev, in /etc/fstab too: a second barrier against set-user-ID files and device nodes of tenants; it also holds in pods")
	}
	return ok(name, closed)
}

// holds says what each kind of limit holds against.
var holds = map[quota.Kind]string{
	quota.XFS:   "project quota of XFS keeps each to its capacity and its number of files; whoever owns a file may give it another project and write on",
	quota.Ext4:  "project quota of ext4 keeps each to its capacity and its number of files, but not processes with CAP_SYS_RESOURCE, nor whoever owns a file, who may give it another project and write on",
	quota.Btrfs: "simple quotas of btrfs keep each to its capacity, but not who makes subvolumes with qgroups of its own choice, which any user may; df in a pod shows the whole disk",
}

// judgeLimits reports what limits directory volumes to their capacity.
func judgeLimits(name, setting string, f poolFacts) Check {
	unlimited := 0
	for _, v := range f.directories {
		if v.Directory.Quota == nil {
			unlimited++
		}
	}
	more := ""
	if unlimited > 0 {
		more = fmt.Sprintf("; %d of %d volumes here have no limit", unlimited, len(f.directories))
	}
	switch {
	case f.unlimited == nil:
		return ok(name, "%s%s", holds[f.limits], more)
	case setting == pool.QuotaRequired:
		return failure(name, f.unlimited.Error()+more, "do what the message says; until then no directory volume is created here, since the pool has quota: required")
	case unlimited < len(f.directories):
		return warning(name, f.unlimited.Error()+more, "the others were made with a limit, which is not in force: do what the message says")
	}
	return ok(name, "nothing limits directory volumes to their capacity: %v%s", f.unlimited, more)
}

func judgeSpace(name string, u pool.Usage) Check {
	seen := fmt.Sprintf("%s of %s free, %s promised, room for %s, reserve %s",
		volume.FormatSize(u.Free), volume.FormatSize(u.Total), volume.FormatSize(u.Promised), volume.FormatSize(u.Room), volume.FormatSize(u.Reserve))
	if u.OtherPools > 0 {
		seen += fmt.Sprintf(", %s for other pools on the same filesystem", volume.FormatSize(u.OtherPools))
	}
	switch {
	case u.Low():
		return warning(name, seen, "less is free than the reserve, so thin volumes may soon fail to write: delete volumes or other files, or grow the filesystem")
	case u.Full:
		return warning(name, seen+"; it has its maxVolumes", "delete volumes or raise maxVolumes; until then none is made")
	case u.Room == 0:
		return warning(name, seen, "no volume fits any more: delete some, grow the filesystem, lower reserve, or raise overcommit and take the risk")
	}
	return ok(name, "%s", seen)
}

func judgeVolumes(name string, f poolFacts) Check {
	if len(f.damaged) == 0 {
		return ok(name, "%d, with %d attached", f.usage.Volumes-f.removing, f.attached)
	}
	const shown = 3
	var texts []string
	for _, err := range f.damaged[:min(shown, len(f.damaged))] {
		texts = append(texts, err.Error())
	}
	if more := len(f.damaged) - shown; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more (trivet volumes)", more))
	}
	return failure(name, strings.Join(texts, "; "), "restore what is missing from a backup; what no volume needs any more a person has to remove")
}

func judgeLeftovers(name string, f poolFacts, serving bool) Check {
	seen := fmt.Sprintf("%d being made, %d in the trash", f.making, f.removing)
	if !serving && f.making+f.removing > 0 {
		return warning(name, seen, "no driver is at work on them: one that starts clears them")
	}
	return ok(name, "%s", seen)
}
