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

// writeOK is W_OK of access(2), which for root fails on a read-only filesystem.
const writeOK = 2

// stateDirectory is the name of the check of the state directory.
const stateDirectory = "state directory"

func stateCheck(dir string) Check {
	const name = stateDirectory
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return warning(name, dir+" does not exist", "the driver creates it when it starts; if it has started, set --state-dir to its directory")
	case err != nil:
		return failure(name, err.Error(), "give the driver a directory that it can write")
	case !info.IsDir():
		return failure(name, dir+" is not a directory", "give the driver a directory that it can write")
	}
	if err := syscall.Access(dir, writeOK); err != nil {
		return failure(name, dir+": "+err.Error(), "mount its filesystem writable, or give the driver another --state-dir")
	}
	known, err := pool.Remembered(dir)
	if err != nil {
		return failure(name, err.Error(), "check its disk")
	}
	var pools []string
	for _, name := range slices.Sorted(maps.Keys(known)) {
		pools = append(pools, name+" "+known[name])
	}
	if len(pools) == 0 {
		return ok(name, "%s, without a recorded pool", dir)
	}
	return ok(name, "%s, with the recorded pools %s", dir, strings.Join(pools, ", "))
}

// poolFacts holds what the checks of a pool have read.
type poolFacts struct {
	uuid     string
	fsType   string
	readOnly bool
	reflinks bool
	// mode is the mode of the pool's directory; mounted is the mount that contains it.
	mode        fs.FileMode
	mounted     *mount.Entry
	usage       pool.Usage
	damaged     []error // the errors of volumes that could not be read
	directories []volume.Volume
	// creating and removing are the numbers of volumes and snapshots that are being created or are in the trash.
	creating, removing int
	// limits is the quota that limits directories; noLimits is the reason why none limits them.
	limits   quota.Kind
	noLimits error
}

// nestingChecks reports pools inside other pools.
func nestingChecks(configs []pool.Config, stateDir string) []Check {
	var checks []Check
	for _, err := range pool.Nested(configs, stateDir) {
		checks = append(checks, failure("pools", err.Error(), "the driver serves only the first of them in the configuration: move the data of the volumes of the other pool, and give that pool its own directory"))
	}
	return checks
}

// openedPool is a pool that is open for reading, or the error of opening it.
type openedPool struct {
	pool *pool.Pool
	err  error
}

// openedPools holds the directory pools by name. All are opened before one is checked, because the room in
// a pool depends on the other pools of its filesystem.
type openedPools map[string]openedPool

// openPools opens the directory pools for reading. It waits for each at most o.Patience.
func openPools(ctx context.Context, configs []pool.Config, o Options) openedPools {
	var filesystems ledger.Filesystems
	all := openedPools{}
	for _, c := range configs {
		if c.Directory.Path != "" {
			p, err := Within(o.Patience, func() (*pool.Pool, error) {
				return pool.OpenReadOnlyOn(ctx, &filesystems, o.Kinds.Forms(), c, o.StateDir)
			})
			all[c.Name] = openedPool{p, err}
		}
	}
	return all
}

func (o openedPools) close() {
	for _, p := range o {
		if p.err == nil {
			p.pool.Close()
		}
	}
}

// poolChecks checks a directory pool. serving is true if a running driver serves the pool.
func poolChecks(c pool.Config, stateDir string, opened openedPool, serving bool) []Check {
	name, path := "pool "+c.Name, c.Directory.Path
	parent := filepath.Dir(path)
	if errors.Is(opened.err, errTimeout) {
		return []Check{hangFailure(name, opened.err)}
	}
	if opened.err != nil {
		return []Check{judgeClosedPool(name, path, opened.err, isDir(parent) || parent == filepath.Join(stateDir, "pools"))}
	}
	facts, err := readPool(opened.pool, path)
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

// judgeClosedPool judges the error of opening a pool. parent is true if the pool's parent directory exists.
func judgeClosedPool(name, path string, err error, parent bool) Check {
	switch {
	case errors.Is(err, volume.ErrUnavailable):
		return warning(name, err.Error(), "start the driver, which creates or completes the pool; the directory of a new pool must be empty")
	case errors.Is(err, fs.ErrNotExist) && !parent:
		return failure(name, path+" and its parent directory do not exist", "mount the pool's disk on this node, or create the directory; in a container, mount it from the host")
	case errors.Is(err, syscall.ENOTDIR):
		return failure(name, path+" is not a directory", "correct directory.path in the configuration")
	case errors.Is(err, volume.ErrPrecondition), errors.Is(err, volume.ErrDamaged):
		return failure(name, err.Error(), "follow the message; the driver serves no volume of "+path+" until then")
	case errors.Is(err, fs.ErrNotExist):
		return warning(name, path+" does not exist", "the driver creates it when it starts, on the filesystem of the parent directory; if the pool belongs on another disk, mount that disk first")
	}
	return failure(name, err.Error(), "check the disk that "+path+" is on (dmesg)")
}

// readPool reads the facts of an open directory pool.
func readPool(p *pool.Pool, path string) (poolFacts, error) {
	at, err := mount.At(path)
	if err != nil {
		return poolFacts{}, err
	}
	hasReflinks, err := reflinks(path, at.FSType)
	if err != nil {
		return poolFacts{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return poolFacts{}, err
	}
	f, err := readContents(p)
	f.fsType, f.readOnly, f.reflinks, f.mounted = at.FSType, isReadOnly(at), hasReflinks, at
	f.mode = info.Mode().Perm()
	f.limits, f.noLimits = p.Quotas.Enforces()
	return f, err
}

// readContents reads the facts that every kind of pool has.
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
		if e.Err == nil && e.Volume.Directory != nil {
			f.directories = append(f.directories, e.Volume)
		}
	}
	f.creating, f.removing, err = p.Leftovers()
	return f, err
}

// isReadOnly reports whether the mount or its filesystem is read-only.
func isReadOnly(e *mount.Entry) bool {
	return slices.Contains(strings.Split(e.Options+","+e.VFSOptions, ","), "ro")
}

// reflinks reports whether the filesystem at a path supports reflinks.
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
		return warning(name, seen, "only ext4, xfs and btrfs are known to support the direct I/O of images: put the pool on one of them")
	}
	return ok(name, "%s", seen)
}

// judgeAccess judges whether users of the node can reach the directories of tenants, and whether a pool with
// directory volumes on a filesystem other than the node's root filesystem is mounted with nosuid and nodev.
func judgeAccess(name, path string, f poolFacts) Check {
	if f.mode&0o077 != 0 {
		return warning(name, fmt.Sprintf("%s has mode %04o: users of this node may reach the directories of tenants, and run what is set-user-ID there", path, f.mode),
			"chmod 0700 "+path+"; the driver does that when it starts")
	}
	const closed = "only root can enter the pool's directory"
	own := f.mounted.Root == "/" && f.mounted.Mountpoint != "/" // a whole filesystem, other than the root filesystem
	var missing []string
	for _, flag := range []string{"nosuid", "nodev"} {
		if !slices.Contains(strings.Split(f.mounted.Options, ","), flag) {
			missing = append(missing, flag)
		}
	}
	if len(missing) > 0 && own && len(f.directories) > 0 {
		return warning(name, fmt.Sprintf("%s; %s, which has directory volumes, is mounted without %s", closed, f.mounted.Mountpoint, strings.Join(missing, " and ")),
			"mount it with nosuid and nodev, and set both in /etc/fstab: they disable set-user-ID files and device nodes of tenants, on the node and in pods")
	}
	return ok(name, closed)
}

// limitTexts describes what each kind of limit enforces.
var limitTexts = map[quota.Kind]string{
	quota.XFS:   "project quota of XFS limits each to its capacity and its number of files; the owner of a file can evade the limit by changing the file's project",
	quota.Ext4:  "project quota of ext4 limits each to its capacity and its number of files, except processes with CAP_SYS_RESOURCE; the owner of a file can evade the limit by changing the file's project",
	quota.Btrfs: "simple quotas of btrfs limit each to its capacity; a user can evade the limit by creating subvolumes with other qgroups; df in a pod shows the whole disk",
}

// judgeLimits judges what limits directory volumes to their capacity. setting is the key quota of the pool.
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
	case f.noLimits == nil:
		return ok(name, "%s%s", limitTexts[f.limits], more)
	case setting == pool.QuotaRequired:
		return failure(name, f.noLimits.Error()+more, "follow the message; until then no directory volume is created here, since the pool has quota: required")
	case unlimited < len(f.directories):
		return warning(name, f.noLimits.Error()+more, "the other volumes were created with a limit, which is not in force: follow the message")
	}
	if len(f.directories) == 0 {
		return ok(name, "directory volumes would have no limit: %v", f.noLimits)
	}
	return ok(name, "nothing limits directory volumes to their capacity: %v%s", f.noLimits, more)
}

func judgeSpace(name string, u pool.Usage) Check {
	seen := fmt.Sprintf("%s of %s free, %s promised, room for %s, reserve %s",
		volume.FormatSize(min(u.Free, u.Total)), volume.FormatSize(u.Total), volume.FormatSize(u.Promised), volume.FormatSize(u.Room), volume.FormatSize(u.Reserve))
	if u.OtherPools > 0 {
		seen += fmt.Sprintf(", %s for other pools on the same filesystem", volume.FormatSize(u.OtherPools))
	}
	switch {
	case u.Low():
		return warning(name, seen, "less space is free than the reserve, so thin volumes may soon fail to write: delete volumes or other files, or grow the filesystem")
	case u.Full:
		return warning(name, seen+"; the pool has reached its maxVolumes", "delete volumes or raise maxVolumes; until then no volume can be created")
	case u.Room == 0:
		return warning(name, seen, "no volume can be created: delete volumes, grow the filesystem, lower reserve, or raise overcommit, which risks a full disk")
	}
	return ok(name, "%s", seen)
}

// judgeVolumes judges whether the records and the data of all volumes could be read.
func judgeVolumes(name string, f poolFacts) Check {
	if len(f.damaged) == 0 {
		return ok(name, "%d", f.usage.Volumes-f.removing)
	}
	const shown = 3
	var texts []string
	for _, err := range f.damaged[:min(shown, len(f.damaged))] {
		texts = append(texts, err.Error())
	}
	if more := len(f.damaged) - shown; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more (trivet volumes)", more))
	}
	return failure(name, strings.Join(texts, "; "), "restore missing files from a backup, or remove by hand what no volume needs")
}

// judgeLeftovers judges volumes and snapshots whose creation or removal was interrupted.
// serving is true if a running driver serves the pool.
func judgeLeftovers(name string, f poolFacts, serving bool) Check {
	seen := fmt.Sprintf("%d being created, %d in the trash", f.creating, f.removing)
	if !serving && f.creating+f.removing > 0 {
		return warning(name, seen, "no driver is running: the driver removes them when it starts")
	}
	return ok(name, "%s", seen)
}

// storageChecks checks a pool that is neither a directory nor an export, such as a pool of disks, and each
// device of the pool.
func storageChecks(ctx context.Context, forms volume.Forms, c pool.Config, stateDir string, serving bool) []Check {
	name := "pool " + c.Name
	records := c.Within(stateDir).Directory.Path
	p, err := pool.OpenReadOnly(ctx, forms, c, stateDir)
	if err != nil {
		return []Check{judgeClosedPool(name, records, err, true)}
	}
	defer p.Close()
	facts, err := readContents(p)
	if err != nil {
		return []Check{failure(name, err.Error(), "check the disk that "+records+" is on (dmesg)")}
	}
	found, advice := p.Storage().Summary(facts.usage.Usage)
	checks := []Check{
		ok(name, "%s, a pool of %s; its records are at %s", facts.uuid, c.Kind(), records),
		advised(name+", space", found, advice),
		judgeVolumes(name+", volumes", facts),
		judgeLeftovers(name+", leftovers", facts, serving),
	}
	for _, d := range p.Storage().Devices() {
		checks = append(checks, judgeDevice(name+", "+d.Path, d))
	}
	return checks
}

func judgeDevice(name string, d pool.Device) Check {
	seen := volume.FormatSize(d.Size) + ", " + d.State
	if d.Detail != "" {
		seen += ": " + d.Detail
	}
	return advised(name, seen, d.Advice)
}
