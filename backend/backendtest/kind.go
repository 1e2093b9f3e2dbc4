package backendtest

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Power is a set of properties of a kind of volume. Rows of the table need powers; a kind
// states those that it has.
type Power uint32

// The powers of volumes and of the media that hold them.
const (
	// A volume is exactly one of these on a node.

	Filesystem Power = 1 << iota // a filesystem on a device of its own
	Block                        // a raw device
	Directory                    // a directory

	Image     // the device shows a file in the volume's folder of the pool
	WholeDisk // the device is the partition of a disk that contains no other volume
	Divisible // volumes of any size share the room of the medium

	// A medium has exactly one of these.

	NodeLocal // one node reaches the medium
	Shared    // every node reaches the medium

	Expand        // volumes grow
	Clones        // volumes are created from volumes
	Snapshots     // volumes have snapshots
	LiveCopies    // volumes are copied while they are in use
	FullCopies    // a copy writes all bytes: the medium shares no blocks
	ChangedBlocks // the differences between snapshots are listed
	Static        // administrators describe volumes that the driver did not create
	Inline        // pods describe volumes
	Placed        // the class sets place, owner, mode and onDelete of the directory
	Subvolumes    // directories are subvolumes of btrfs

	// Derived from the others and from the target; no target states these.

	Mounted    // not a raw device: a filesystem or a directory
	RestCopies // volumes have snapshots, but only while they are not in use
	Limited    // the filesystem of the medium limits directories
	Unlimited  // the filesystem of the medium limits no directory
	Growable   // the disk of the medium can be enlarged
	Pullable   // the disk of the medium can be removed by its bus
	Pluggable  // the disk of the medium can be removed and attached again
)

// powerNames are in the order of the constants.
var powerNames = []string{
	"Filesystem", "Block", "Directory", "Image", "WholeDisk", "Divisible", "NodeLocal", "Shared", "Expand", "Clones", "Snapshots",
	"LiveCopies", "FullCopies", "ChangedBlocks", "Static", "Inline", "Placed", "Subvolumes",
	"Mounted", "RestCopies", "Limited", "Unlimited", "Growable", "Pullable", "Pluggable",
}

func (p Power) String() string {
	var names []string
	for i, name := range powerNames {
		if p&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, "|")
}

// Has reports whether p contains all powers of needs.
func (p Power) Has(needs Power) bool { return p&needs == needs }

// Kind is a kind of volume as a claim asks for it. The zero value is a raw device.
type Kind struct {
	FSType string // of a filesystem on a device
	Powers Power

	target *Target // nil outside of a suite
}

// Devices returns the kinds of volume of a target whose volumes are block devices.
func Devices(fsTypes ...string) []Kind {
	kinds := []Kind{{Powers: Block}}
	for _, fsType := range slices.Backward(fsTypes) {
		kinds = slices.Insert(kinds, 0, Kind{FSType: fsType, Powers: Filesystem})
	}
	return kinds
}

// Directories returns the kind of volume of a target whose volumes are directories.
func Directories() []Kind { return []Kind{{Powers: Directory}} }

// Name is the name of the kind's subtests.
func (k Kind) Name() string {
	switch {
	case k.Has(Directory):
		return "dir"
	case k.FSType == "":
		return "block"
	}
	return k.FSType
}

// Backend is the name of the kind's backend.
func (k Kind) Backend() string { return k.target.Backend.Name }

// Target is the target that the kind is of.
func (k Kind) Target() *Target { return k.target }

// Has reports whether the kind has all these powers.
func (k Kind) Has(needs Power) bool { return k.Powers.Has(needs) }

// Block reports whether volumes are raw devices.
func (k Kind) Block() bool { return k.FSType == "" && !k.Has(Directory) }

// Size is the size of a small volume in bytes.
func (k Kind) Size() int64 {
	switch {
	case k.Block():
		return 16 * mib
	case k.FSType == "xfs", k.FSType == "btrfs":
		return 320 * mib // their minimum is 300 MiB and 256 MiB
	}
	return 64 * mib
}

// otherFilesystem is a kind with another filesystem.
func (k Kind) otherFilesystem() Kind {
	if k.FSType == "xfs" {
		return Kind{FSType: "ext4"}
	}
	return Kind{FSType: "xfs"}
}

// otherMode is a kind with another volume mode.
func (k Kind) otherMode() Kind {
	if k.Block() {
		return Kind{FSType: "ext4"}
	}
	return Kind{}
}

// start starts a driver with a pool of its own.
func (k Kind) start(tb testing.TB, size string, change func(*driver.Options)) *Driver {
	tb.Helper()
	return k.target.start(tb, size, change)
}

// many is the access mode with the most users that the kind supports.
func (k Kind) many() csi.VolumeCapability_AccessMode_Mode {
	if k.Has(Shared | Directory) {
		return manyWriters
	}
	return multiWriter
}

// Parameters returns the parameters of a StorageClass for the kind, and more.
func (k Kind) Parameters(more ...string) map[string]string {
	p := map[string]string{}
	if k.target != nil {
		maps.Copy(p, k.target.Class)
	}
	for i := 0; i < len(more); i += 2 {
		p[more[i]] = more[i+1]
	}
	return p
}

// in returns the kind for another pool of its driver.
func (k Kind) in(pool string) Kind {
	other := *k.target
	other.Class = maps.Clone(k.target.Class)
	if other.Class == nil {
		other.Class = map[string]string{}
	}
	other.Class[volume.ParamPool] = pool
	k.target = &other
	return k
}

// Capability returns a capability for the kind.
func (k Kind) Capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if k.Block() {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: k.FSType, MountFlags: flags}}
	}
	return c
}

// Target is a backend on a medium, and the kinds of volume that it makes there.
type Target struct {
	// Name is the name of the target's subtests.
	Name    string
	Backend backend.Kind
	// Pool is the name of the pool; Class has the parameters that select backend and pool.
	Pool  string
	Class map[string]string
	// Powers are those of all kinds, beside what each kind states.
	Powers Power
	Kinds  []Kind
	// Guest: the target needs the kernel of a virtual machine of test/vm.
	Guest bool
	// Prepare starts what all media need, and sets Medium; nil: nothing.
	Prepare func(tb testing.TB, target *Target)
	// Medium makes a new, empty medium.
	Medium func(tb testing.TB, room Room) Medium
	// Limits tells how to switch the limits of directories; nil: there are none.
	Limits *Limits
	// Growing makes a blank disk of a size in bytes that enlarge gives another size.
	Growing func(tb testing.TB, size int64) (device string, enlarge func(size int64))
	// Pull removes a disk, by the kernel's name, while it is in use; back attaches it again.
	Pull func(tb testing.TB, disk string) (back func())
	// Plug attaches a disk whose content is an image.
	Plug func(tb testing.TB, image string, options ...string) string
	// Options changes the options of every driver; nil: nothing.
	Options func(*driver.Options)

	// Advertised are powers that the backend implements and no kind of the target has.
	Advertised Power
	// Except gives the reason for each row that does not hold for the target.
	Except map[string]string
}

// Room is the minimum size of a medium.
type Room struct {
	Total   string // the size of a filesystem, as truncate(1) reads it
	Volumes int    // or this many disks
	Each    int64  // for a volume of this size in bytes
}

// Medium is what a pool is made on.
type Medium struct {
	// Config is the pool's configuration without its name.
	Config pool.Config
	// Dir is where the content of the pool can be seen; empty: below the state directory.
	Dir string
}

// Limits tells how the filesystem of a node limits directories to their size.
type Limits struct {
	// RootExempt: a process with CAP_SYS_RESOURCE is not limited.
	RootExempt bool
	// Off switches limits off in the filesystem at a path, and On on again.
	Off, On func(tb testing.TB, path string)
	// Remounts: Off and On mount the filesystem again, and the limits survive.
	Remounts bool
}

const (
	// SharedPool is the name of the pools that every node reaches.
	SharedPool = "nas"
	// DiskPool is the name of the pools of whole disks.
	DiskPool = "disks"
	// DefaultPool is the name of all other pools.
	DefaultPool = "default"
)

// OnFilesystem is the medium of a directory pool, on the filesystem that mount makes.
func OnFilesystem(mount func(tb testing.TB, size string) string) func(testing.TB, Room) Medium {
	return func(tb testing.TB, room Room) Medium {
		tb.Helper()
		dir := filepath.Join(mount(tb, room.Total), "pool")
		return Medium{Config: pool.Config{Directory: pool.Directory{Path: dir}}, Dir: dir}
	}
}

// Formatted returns a function for OnFilesystem.
func Formatted(fsType string, options ...string) func(testing.TB, string) string {
	return func(tb testing.TB, size string) string {
		tb.Helper()
		return testenv.Filesystem(tb, fsType, size, options...)
	}
}

// OnDisks is the medium of a pool of disks, which match gives.
func OnDisks(match func(tb testing.TB, room Room) []string) func(testing.TB, Room) Medium {
	return func(tb testing.TB, room Room) Medium {
		tb.Helper()
		return Medium{Config: pool.Config{Section: &disk.Disks{Match: match(tb, room)}}}
	}
}

// LoopDisks makes disks of files.
func LoopDisks(tb testing.TB, room Room) []string {
	tb.Helper()
	var devices []string
	for range room.Volumes {
		device, _, _ := testenv.Disk(tb, room.Each+diskOverhead)
		devices = append(devices, device)
	}
	return devices
}

// powers returns all powers of a kind of the target.
func (target *Target) powers(kind Kind) Power {
	p := target.Powers | kind.Powers
	for power, has := range map[Power]bool{
		Mounted:    p&(Filesystem|Directory) != 0,
		RestCopies: p.Has(Snapshots) && !p.Has(LiveCopies),
		Limited:    target.Limits != nil,
		Unlimited:  target.Limits == nil && p.Has(Placed|NodeLocal),
		Growable:   target.Growing != nil,
		Pullable:   target.Pull != nil,
		Pluggable:  target.Plug != nil,
	} {
		if has {
			p |= power
		}
	}
	return p
}

// Volumes returns the target's kinds with all their powers.
func (target Target) Volumes() []Kind {
	var all []Kind
	for _, k := range target.Kinds {
		all = append(all, Kind{FSType: k.FSType, Powers: target.powers(k), target: &target})
	}
	return all
}

// Start starts a driver with a pool on a new medium.
func (target *Target) Start(tb testing.TB, room Room, change func(*driver.Options)) *Driver {
	tb.Helper()
	return target.startOn(tb, target.Medium(tb, room), change)
}

func (target *Target) start(tb testing.TB, size string, change func(*driver.Options)) *Driver {
	tb.Helper()
	return target.Start(tb, Room{Total: size, Volumes: 4, Each: gib}, change)
}

// startOn starts a driver with a pool on a medium.
func (target *Target) startOn(tb testing.TB, m Medium, change func(*driver.Options)) *Driver {
	tb.Helper()
	o := memberOptions(tb, "controller", backend.Kinds{target.Backend})
	o.NodeID, o.Services = Node, []string{"controller", "node"}
	m.Config.Name = target.Pool
	o.Config.Pools = []pool.Config{m.Config}
	if target.Options != nil {
		target.Options(&o)
	}
	change(&o)
	d := StartWith(tb, o)
	d.poolDir = m.Dir
	if d.poolDir == "" {
		d.poolDir = filepath.Join(o.StateDir, "disks", target.Pool)
	}
	target.awaitPool(tb, d)
	return d
}

// awaitPool waits for a shared pool: a driver is ready before it has opened one.
func (target *Target) awaitPool(tb testing.TB, d *Driver) {
	tb.Helper()
	if !target.Powers.Has(Shared) {
		return
	}
	await(tb, "the shared pool", func() bool {
		_, err := d.Control.GetCapacity(tb.Context(), &csi.GetCapacityRequest{Parameters: target.Class})
		return err == nil
	})
}

// advertised maps a power to the interface by which a backend advertises it.
var advertised = map[Power]func(backend.Backend) bool{
	Expand:        implements[backend.Expander],
	Snapshots:     implements[backend.Snapshotter],
	ChangedBlocks: implements[backend.ChangeTracker],
	Static:        implements[backend.StaticProvider],
	Inline:        implements[backend.InlineProvider],
	Block:         implements[backend.BlockProvider],
	Directory:     implements[backend.Limiter],
}

func implements[T any](b backend.Backend) bool {
	_, ok := b.(T)
	return ok
}

// check returns the errors of the description.
func (target *Target) check() (wrong []string) {
	var stated Power
	for _, k := range target.Volumes() {
		stated |= k.Powers
		for _, one := range [][]Power{{Filesystem, Block, Directory}, {NodeLocal, Shared}} {
			if n := len(slices.DeleteFunc(one, func(p Power) bool { return !k.Has(p) })); n != 1 {
				wrong = append(wrong, fmt.Sprintf("kind %s has %s: want exactly one of each group", k.Name(), k.Powers))
			}
		}
	}
	b := target.Backend.New(&pool.Set{})
	for power, has := range advertised {
		switch {
		case stated.Has(power) && !has(b):
			wrong = append(wrong, fmt.Sprintf("%s is stated, and backend %s does not implement it", power, b.Name()))
		case !stated.Has(power) && has(b) && !target.Advertised.Has(power):
			wrong = append(wrong, fmt.Sprintf("backend %s implements %s, and no kind states it", b.Name(), power))
		case target.Advertised.Has(power) && (stated.Has(power) || !has(b)):
			wrong = append(wrong, fmt.Sprintf("%s is advertised and not used: say so only of such", power))
		}
	}
	for name := range target.Except {
		i := slices.IndexFunc(table, func(r row) bool { return r.name == name })
		if i < 0 || !slices.ContainsFunc(target.Volumes(), func(k Kind) bool { return k.Has(table[i].needs) }) {
			wrong = append(wrong, fmt.Sprintf("the exception %s is of no row that applies", name))
		}
	}
	return wrong
}
