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
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Feature is a set of features of a kind of volume. A kind states its features, and a row of the table
// runs for the kinds that have all features that the row needs.
type Feature uint32

// The features of volumes and of the media that hold them.
const (
	// A volume is exactly one of these on a node.

	Filesystem Feature = 1 << iota // a filesystem on a device of its own
	Block                          // a raw device
	Directory                      // a directory

	Image     // the device shows a file in the volume's folder of the pool
	WholeDisk // the device is a partition of a disk, which contains no other volume
	Logical   // the device is a logical volume
	Thin      // the device is a thin volume, whose blocks are allocated when they are written
	Divisible // volumes share the space of the medium, and can have any size

	// A medium has exactly one of these.

	NodeLocal // only one node can use the medium
	Shared    // every node can use the medium

	Expand        // volumes can be expanded
	Clones        // volumes can be created from volumes
	Snapshots     // volumes can have snapshots
	LiveCopies    // volumes can be copied while they are in use
	FullCopies    // a copy writes all bytes, because the medium cannot share blocks
	ChangedBlocks // the changed blocks between snapshots can be listed
	Static        // static volumes (backend.StaticProvider)
	Inline        // inline volumes (backend.InlineProvider)
	Placed        // the class sets path, owner, mode and onDelete of the directory
	Subvolumes    // the directories are subvolumes of btrfs
	Encrypted     // the device shows a LUKS2 container

	// These are derived from the other features and from the target; no target states them.

	Thick      // a logical volume with extents of its own
	Mounted    // a filesystem or a directory, not a raw device
	Device     // a filesystem on a device of its own, or a raw device
	RestCopies // volumes can have snapshots, but only while they are not in use
	Limited    // quotas of the medium's filesystem limit directories
	Unlimited  // the medium's filesystem limits no directory
	Growable   // a disk can be enlarged (Target.Growing)
	Pullable   // a disk can be removed while it is in use (Target.Pull)
	Pluggable  // a disk can be attached again (Target.Plug)
)

// featureNames are the names of the features, in the order of the constants.
var featureNames = []string{
	"Filesystem", "Block", "Directory", "Image", "WholeDisk", "Logical", "Thin", "Divisible", "NodeLocal", "Shared", "Expand", "Clones", "Snapshots",
	"LiveCopies", "FullCopies", "ChangedBlocks", "Static", "Inline", "Placed", "Subvolumes", "Encrypted",
	"Thick", "Mounted", "Device", "RestCopies", "Limited", "Unlimited", "Growable", "Pullable", "Pluggable",
}

func (f Feature) String() string {
	var names []string
	for i, name := range featureNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, "|")
}

// Has reports whether f contains all features of needs.
func (f Feature) Has(needs Feature) bool { return f&needs == needs }

// Kind is a kind of volume that a claim can request from a target. The zero value is a raw device.
type Kind struct {
	FSType   string // empty for a raw device and for a directory
	Features Feature

	target *Target // set by Target.Volumes
}

// Devices returns the kinds of volume of a backend with block devices: each filesystem, and raw devices.
func Devices(fsTypes ...string) []Kind {
	var kinds []Kind
	for _, fsType := range fsTypes {
		kinds = append(kinds, Kind{FSType: fsType, Features: Filesystem})
	}
	return append(kinds, Kind{Features: Block})
}

// Directories returns the kind of volume of a backend with directories.
func Directories() []Kind { return []Kind{{Features: Directory}} }

// Name returns the name of the kind's subtests.
func (k Kind) Name() string {
	switch {
	case k.Has(Directory):
		return "dir"
	case k.FSType == "":
		return "block"
	}
	return k.FSType
}

// Backend returns the name of the kind's backend.
func (k Kind) Backend() string { return k.target.Backend.Name }

// Target returns the target of the kind.
func (k Kind) Target() *Target { return k.target }

// Has reports whether the kind has all these features.
func (k Kind) Has(needs Feature) bool { return k.Features.Has(needs) }

// Block reports whether volumes are raw devices.
func (k Kind) Block() bool { return k.FSType == "" && !k.Has(Directory) }

// Size returns the size of a small volume in bytes.
func (k Kind) Size() int64 {
	switch {
	case k.Block():
		return 16 * mib
	case k.FSType == "xfs", k.FSType == "btrfs":
		return 320 * mib // their minimum is 300 MiB and 256 MiB
	}
	return 64 * mib
}

// Overhead returns the size in bytes that a volume needs in its pool in addition to its capacity.
func (k Kind) Overhead() int64 {
	if k.Has(Encrypted) {
		return luks.DataOffset
	}
	return 0
}

// otherFilesystem returns a kind with another filesystem.
func (k Kind) otherFilesystem() Kind {
	if k.FSType == "xfs" {
		return Kind{FSType: "ext4"}
	}
	return Kind{FSType: "xfs"}
}

// otherMode returns a kind with another volume mode.
func (k Kind) otherMode() Kind {
	if k.Block() {
		return Kind{FSType: "ext4"}
	}
	return Kind{}
}

// start starts a driver with a new pool for the kind; see Target.start.
func (k Kind) start(tb testing.TB, size string, change func(*driver.Options)) *Driver {
	tb.Helper()
	return k.target.start(tb, size, change)
}

// widestMode returns the access mode that allows the kind's volumes the most users.
func (k Kind) widestMode() csi.VolumeCapability_AccessMode_Mode {
	if k.Has(Shared | Directory) {
		return manyWriters
	}
	return multiWriter
}

// Parameters returns the parameters of a StorageClass for the kind, with more parameters, given as keys and
// values.
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

// in returns the same kind with a class for another pool.
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

// Capability returns a capability for the kind, with mount flags.
func (k Kind) Capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if k.Block() {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: k.FSType, MountFlags: flags}}
	}
	return c
}

// Target is a backend on a medium, and the kinds of volume that the backend can create on the medium.
type Target struct {
	// Name is the name of the target's subtests.
	Name    string
	Backend backend.Kind
	// Pool is the name of the pool; Class has the parameters that select backend and pool.
	Pool  string
	Class map[string]string
	// Features are the features of all kinds, in addition to those that each kind states.
	Features Feature
	Kinds    []Kind
	// Variant means that other targets test all kinds with the same backend. With -short, Run tests only the first kind.
	Variant bool
	// Guest means that the target needs the kernel of a virtual machine of test/vm.
	Guest bool
	// Prepare starts a server that all media of the target need, and sets Medium. It may be nil.
	Prepare func(tb testing.TB, target *Target)
	// Medium creates a new, empty medium.
	Medium func(tb testing.TB, room Room) Medium
	// Limits describes the limits of directories; nil if there are none.
	Limits *Limits
	// Growing creates a blank disk with a size in bytes, and a function that enlarges the disk to a size.
	Growing func(tb testing.TB, size int64) (device string, enlarge func(size int64))
	// Pull removes the disk with a kernel name, even if the disk is in use; back attaches the disk again.
	Pull func(tb testing.TB, disk string) (back func())
	// Plug attaches a disk with the content of an image, and returns its device.
	Plug func(tb testing.TB, image string, options ...string) string
	// Options changes the options of every driver. It may be nil.
	Options func(*driver.Options)

	// Advertised are features that the backend implements and no kind of the target has.
	Advertised Feature
	// Except contains the rows that do not apply to the target, with the reasons.
	Except map[string]string
}

// Room is the minimum size of a medium.
type Room struct {
	Total   string // size of the medium's filesystem, as truncate(1) reads it
	Volumes int    // number of disks, if the medium has disks
	Each    int64  // size of a volume on each disk in bytes
}

// Medium is the storage for a pool.
type Medium struct {
	// Config is the pool's configuration without its name.
	Config pool.Config
	// Dir is the directory with the content of the pool; empty if it is in the state directory.
	Dir string
}

// Limits describes how the filesystem of a node limits directories to their size.
type Limits struct {
	// RootExempt means that a process with CAP_SYS_RESOURCE is not limited.
	RootExempt bool
	// Off switches the limits of the filesystem at a path off, and On switches them on.
	Off, On func(tb testing.TB, path string)
	// Remounts means that Off and On remount the filesystem, and that the sizes of the limits are kept.
	Remounts bool
}

const (
	// SharedPool is the name of the pools on exports.
	SharedPool = "nas"
	// DiskPool is the name of the pools of whole disks.
	DiskPool = "disks"
	// GroupPool is the name of the pools of volume groups.
	GroupPool = "group"
	// DefaultPool is the name of all other pools.
	DefaultPool = "default"
)

// OnFilesystem returns a function that creates media for directory pools, on filesystems that mount creates.
func OnFilesystem(mount func(tb testing.TB, size string) string) func(testing.TB, Room) Medium {
	return func(tb testing.TB, room Room) Medium {
		tb.Helper()
		dir := filepath.Join(mount(tb, room.Total), "pool")
		return Medium{Config: pool.Config{Directory: pool.Directory{Path: dir}}, Dir: dir}
	}
}

// Formatted returns a function for OnFilesystem that creates a filesystem of a type.
func Formatted(fsType string, options ...string) func(testing.TB, string) string {
	return func(tb testing.TB, size string) string {
		tb.Helper()
		return testenv.Filesystem(tb, fsType, size, options...)
	}
}

// OnDisks returns a function that creates media for pools of the disks whose globs match returns.
func OnDisks(match func(tb testing.TB, room Room) []string) func(testing.TB, Room) Medium {
	return func(tb testing.TB, room Room) Medium {
		tb.Helper()
		return Medium{Config: pool.Config{Section: &disk.Disks{Match: match(tb, room)}}}
	}
}

// LoopDisks creates disks from files.
func LoopDisks(tb testing.TB, room Room) []string {
	tb.Helper()
	var devices []string
	for range room.Volumes {
		device, _, _ := testenv.Disk(tb, room.Each+diskOverhead)
		devices = append(devices, device)
	}
	return devices
}

// features returns all features of a kind of the target, including the derived ones.
func (target *Target) features(kind Kind) Feature {
	p := target.Features | kind.Features
	for feature, has := range map[Feature]bool{
		Thick:      p.Has(Logical) && !p.Has(Thin),
		Mounted:    p&(Filesystem|Directory) != 0,
		Device:     p&(Filesystem|Block) != 0,
		RestCopies: p.Has(Snapshots) && !p.Has(LiveCopies),
		Limited:    target.Limits != nil,
		Unlimited:  target.Limits == nil && p.Has(Placed|NodeLocal),
		Growable:   target.Growing != nil,
		Pullable:   target.Pull != nil,
		Pluggable:  target.Plug != nil,
	} {
		if has {
			p |= feature
		}
	}
	return p
}

// Volumes returns the target's kinds with all their features.
func (target Target) Volumes() []Kind {
	var all []Kind
	for _, k := range target.Kinds {
		all = append(all, Kind{FSType: k.FSType, Features: target.features(k), target: &target})
	}
	return all
}

// Start starts a driver with a pool on a new medium.
func (target *Target) Start(tb testing.TB, room Room, change func(*driver.Options)) *Driver {
	tb.Helper()
	return target.startOn(tb, target.Medium(tb, room), change)
}

// start starts a driver with a pool on a new medium with the given size, or with five disks.
func (target *Target) start(tb testing.TB, size string, change func(*driver.Options)) *Driver {
	tb.Helper()
	return target.Start(tb, Room{Total: size, Volumes: 5, Each: gib}, change)
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
		d.poolDir = m.Config.Within(o.StateDir).Directory.Path
	}
	target.awaitPool(tb, d)
	return d
}

// awaitPool waits until the driver has opened a shared pool, because a driver is ready before that.
func (target *Target) awaitPool(tb testing.TB, d *Driver) {
	tb.Helper()
	if !target.Features.Has(Shared) {
		return
	}
	await(tb, "the shared pool to be opened", func() bool {
		_, err := d.Control.GetCapacity(tb.Context(), &csi.GetCapacityRequest{Parameters: target.Class})
		return err == nil
	})
}

// advertised maps a feature to a test whether a backend implements the interface of the feature.
var advertised = map[Feature]func(backend.Backend) bool{
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

// check returns the errors in the description of the target.
func (target *Target) check() (wrong []string) {
	var stated Feature
	for _, k := range target.Volumes() {
		stated |= k.Features
		for _, one := range [][]Feature{{Filesystem, Block, Directory}, {NodeLocal, Shared}} {
			if n := len(slices.DeleteFunc(one, func(p Feature) bool { return !k.Has(p) })); n != 1 {
				wrong = append(wrong, fmt.Sprintf("kind %s has the features %s: want exactly one of Filesystem, Block and Directory, and one of NodeLocal and Shared", k.Name(), k.Features))
			}
		}
	}
	b := target.Backend.New(&pool.Set{})
	for feature, has := range advertised {
		switch {
		case stated.Has(feature) && !has(b):
			wrong = append(wrong, fmt.Sprintf("feature %s is stated, but backend %s does not implement its interface", feature, b.Name()))
		case !stated.Has(feature) && has(b) && !target.Advertised.Has(feature):
			wrong = append(wrong, fmt.Sprintf("backend %s implements the interface of feature %s, but no kind states the feature", b.Name(), feature))
		case target.Advertised.Has(feature) && (stated.Has(feature) || !has(b)):
			wrong = append(wrong, fmt.Sprintf("feature %s is in Advertised, but a kind states it, or the backend does not implement its interface", feature))
		}
	}
	for name := range target.Except {
		i := slices.IndexFunc(table, func(r row) bool { return r.name == name })
		if i < 0 || !slices.ContainsFunc(target.Volumes(), func(k Kind) bool { return k.Has(table[i].needs) }) {
			wrong = append(wrong, fmt.Sprintf("Except contains %s, which is not a row that runs for a kind of the target", name))
		}
	}
	return wrong
}
