package backendtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// Kind is a kind of volume that a backend makes: a filesystem, a raw device, or a
// directory of an export or of a node's filesystem.
type Kind struct {
	FSType string // empty: a raw device; nfs, dir: a directory
	// Pool is the pool that its volumes are made in; empty: the driver's first.
	Pool string
}

// Name is how tests and subtests call the kind.
func (k Kind) Name() string {
	if k.FSType == "" {
		return "block"
	}
	return k.FSType
}

// Block tells whether the kind is a raw device.
func (k Kind) Block() bool { return k.FSType == "" }

// Directory tells whether the kind is a directory.
func (k Kind) Directory() bool { return k.FSType == "nfs" || k.local() }

// local tells whether it is a directory of a node's filesystem.
func (k Kind) local() bool { return k.FSType == "dir" }

// many is the access mode in which most can have a directory.
func (k Kind) many() csi.VolumeCapability_AccessMode_Mode {
	if k.local() {
		return multiWriter
	}
	return manyWriters
}

// parameters are those of a StorageClass for the kind, and more.
func (k Kind) parameters(more ...string) map[string]string {
	p := map[string]string{}
	switch {
	case k.local():
		p["backend"] = "local"
	case k.Directory():
		p["backend"] = "nfs"
	}
	if k.Disk() {
		p["backend"] = "local"
	}
	if k.Pool != "" {
		p["pool"] = k.Pool
	}
	for i := 0; i < len(more); i += 2 {
		p[more[i]] = more[i+1]
	}
	return p
}

// Target is a backend under test.
type Target struct {
	New   func(*pool.Set) backend.Backend
	Kinds []Kind
	// Filesystem mounts a new filesystem of a size for a pool of this node, and returns
	// where; nil: an xfs.
	Filesystem func(tb testing.TB, size string) string
	// Thorough: all kinds have all tests of snapshots, not only the first.
	Thorough bool
	// Limits of that filesystem; nil: it has none.
	Limits *Limits
	// Export makes a new, empty export for a pool that all nodes reach; nil: pools are
	// directories of this node.
	Export func(testing.TB) Export
	// Disks makes blank disks for a pool of disks, and Plug one of an image; nil: pools
	// are no disks, or disks are not of this machine's making.
	Disks func(testing.TB) []string
	Plug  func(tb testing.TB, image string, options ...string) string
	// Growing makes a blank disk of a size in bytes that enlarge gives another; nil: that
	// cannot be done.
	Growing func(tb testing.TB, size int64) (device string, enlarge func(size int64))
	// Pull takes a disk away, by the kernel's name, though it is in use, and back brings
	// it back; nil: that cannot be done.
	Pull func(tb testing.TB, disk string) (back func())
	// Options changes those of every driver; nil: nothing.
	Options func(*driver.Options)
}

// Export is a directory of an NFS server.
type Export struct {
	Server, Path string
	// Dir is where the server has it.
	Dir string
}

// SharedPool is what the pool of all nodes is called.
const SharedPool = "nas"

// place makes a new pool, of a filesystem of a size if it is this node's, and returns
// where what it has can be seen.
func (target Target) place(tb testing.TB, size string) (pool.Config, string) {
	tb.Helper()
	if target.Export != nil {
		e := target.Export(tb)
		return pool.Config{Name: SharedPool, NFS: &pool.NFS{Server: e.Server, Export: e.Path, Init: true}}, e.Dir
	}
	filesystem := target.Filesystem
	if filesystem == nil {
		filesystem = func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "xfs", size) }
	}
	dir := filepath.Join(filesystem(tb, size), "pool")
	return pool.Config{Name: "default", Directory: pool.Directory{Path: dir}}, dir
}

// start starts a driver with a new pool.
func (target Target) start(tb testing.TB, size string, change func(*driver.Options)) *Driver {
	tb.Helper()
	c, dir := target.place(tb, size)
	return target.startOn(tb, c, dir, change)
}

// startOn starts a driver with a pool.
func (target Target) startOn(tb testing.TB, c pool.Config, dir string, change func(*driver.Options)) *Driver {
	tb.Helper()
	o := memberOptions(tb, "controller", []func(*pool.Set) backend.Backend{target.New})
	o.NodeID, o.Services = Node, []string{"controller", "node"}
	o.Config.Pools = []pool.Config{c}
	if target.Options != nil {
		target.Options(&o)
	}
	change(&o)
	d := StartWith(tb, o)
	d.poolDir = dir
	target.awaitPool(tb, d)
	return d
}

// awaitPool waits for a pool that all nodes reach: no driver does before it is ready.
func (target Target) awaitPool(tb testing.TB, d *Driver) {
	tb.Helper()
	if target.Export == nil {
		return
	}
	await(tb, "the shared pool", func() bool {
		_, err := d.Control.GetCapacity(tb.Context(), &csi.GetCapacityRequest{Parameters: target.Kinds[0].parameters()})
		return err == nil
	})
}

// without names what a run leaves out, because this machine cannot do it and
// another run does: a comma-separated list in TRIVET_TEST_WITHOUT. The one thing
// known is ext4-growth, which needs CAP_SYS_RESOURCE.
func without(tb testing.TB, what string) {
	tb.Helper()
	if isWithout(what) {
		tb.Skipf("left out by TRIVET_TEST_WITHOUT=%s", what)
	}
}

func isWithout(what string) bool {
	return slices.Contains(strings.Split(os.Getenv("TRIVET_TEST_WITHOUT"), ","), what)
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	switch {
	case target.Disks != nil:
		runDisks(t, target)
		return
	case target.Kinds[0].local():
		runLocal(t, target)
		return
	case target.Kinds[0].Directory():
		runDirectories(t, target)
		return
	}
	if target.Export != nil {
		runImages(t, target)
		return
	}
	d := target.start(t, "64G", func(*driver.Options) {})
	for _, kind := range target.Kinds {
		t.Run(kind.Name(), func(t *testing.T) { runKind(t, d, kind) })
	}
	first := target.Kinds[0]
	runEach(t, d, first, map[string]func(*testing.T, *Driver, Kind){
		"Secrets":      testSecrets,
		"Arguments":    testArguments,
		"Idempotent":   testIdempotentCreate,
		"Sizes":        testSizes,
		"Topology":     testTopology,
		"Publication":  testPublication,
		"Capabilities": testCapabilities,
	})
	// These count, and so want a pool to themselves.
	t.Run("Expansion", func(t *testing.T) { testExpansionRefused(t, target) })
	t.Run("Paging", func(t *testing.T) { testPaging(t, target) })
	t.Run("Promise", func(t *testing.T) { testPromise(t, target) })
	t.Run("SplitServices", func(t *testing.T) { testSplitServices(t, target) })
	t.Run("NodeLimit", func(t *testing.T) { testNodeLimit(t, target) })
}

// runImages runs what is different for volumes whose images are on an export.
func runImages(t *testing.T, target Target) {
	d := target.start(t, "", func(*driver.Options) {})
	first, others := target.Kinds[0], target.Kinds[1:]
	t.Run(first.Name(), func(t *testing.T) { runKind(t, d, first) })
	for _, kind := range others {
		t.Run(kind.Name(), func(t *testing.T) { runEach(t, d, kind, contentTests) })
	}
	runEach(t, d, first, map[string]func(*testing.T, *Driver, Kind){
		"Secrets":     testSecrets,
		"Topology":    testNoTopology,
		"Publication": testPublication,
	})
	t.Run("Expansion", func(t *testing.T) { testExpansionRefused(t, target) })
	t.Run("Promise", func(t *testing.T) { testPromise(t, target) })
	t.Run("Snapshots", func(t *testing.T) { RunSnapshots(t, target) })
}

// contentTests are about what is in volumes, and so about how they are made and shown.
var contentTests = map[string]func(*testing.T, *Driver, Kind){
	"Contents":      testContents,
	"Reboot":        testReboot,
	"OnlineGrowth":  testOnlineGrowth,
	"OfflineGrowth": testOfflineGrowth,
	"ReadOnly":      testReadOnly,
	"Duplicates":    testDuplicates,
	"InUse":         testInUse,
	"Health":        testHealth,
}

func runKind(t *testing.T, d *Driver, kind Kind) {
	runEach(t, d, kind, contentTests)
	runEach(t, d, kind, map[string]func(*testing.T, *Driver, Kind){
		"AccessModes":  testAccessModes,
		"StageAgain":   testStageAgain,
		"PublishAgain": testPublishAgain,
	})
	if !kind.Block() {
		t.Run("MountFlags", func(t *testing.T) { testMountFlags(t, d, kind) })
	}
}

func runEach(t *testing.T, d *Driver, kind Kind, tests map[string]func(*testing.T, *Driver, Kind)) {
	for _, name := range sortedKeys(tests) {
		t.Run(name, func(t *testing.T) { tests[name](t, d, kind) })
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
