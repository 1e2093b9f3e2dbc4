// Package sanity runs csi-sanity, the CSI project's own suite, over real sockets
// against whole drivers: once for each kind of volume, with one driver for all, and
// with a controller's driver that forwards to a node's; in the virtual machine of
// test/vm also with pools on exports. What that suite does not check is in
// backend/backendtest.
package sanity

import (
	"cmp"
	"flag"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	poolName = "default"
	// xfs wants 300 MiB, and the attach limit's spec has maxVolumes+1 volumes in
	// the pool at a time.
	poolSize   = "8G"
	size       = 320 * volume.MiB
	largerSize = 640 * volume.MiB
	maxVolumes = 3

	idempotentCount = 3
)

// kind is a kind of volume that the whole suite runs with.
type kind struct {
	name       string
	accessType string
	parameters map[string]string
	// ground is what has its pool; empty: one driver that serves all.
	ground string
}

// forwarded is the ground where controller and node are served by two drivers.
const forwarded = "forwarded"

// onExport begins the grounds of pools on exports.
const onExport = "nfs"

var kinds = []kind{
	filesystem("ext4"),
	filesystem("xfs"),
	filesystem("btrfs"),
	{name: "block", accessType: "block"},
	filesystem("ext4").on(forwarded),
	filesystem("xfs").on(forwarded),
	filesystem("btrfs").on(forwarded),
	kind{name: "block", accessType: "block"}.on(forwarded),
	kind{name: "dir", accessType: "mount", parameters: map[string]string{volume.ParamBackend: local.Name}}.on(forwarded),
	localDirectory(simpleQuotas),
	localDirectory(unlimited),
	imageOn(simpleQuotas, filesystem("xfs")),
	imageOn(unlimited, filesystem("ext4")),
	imageOn(unlimited, kind{name: "block", accessType: "block"}),
	filesystem("ext4").onDisk(wholeDisks),
	filesystem("xfs").onDisk(wholeDisks),
	filesystem("btrfs").onDisk(wholeDisks),
	kind{name: "block", accessType: "block"}.onDisk(wholeDisks),
}

func (k kind) on(ground string) kind {
	k.name, k.ground = ground+" "+k.name, ground
	return k
}

func filesystem(fsType string) kind {
	return kind{name: fsType, accessType: "mount", parameters: map[string]string{volume.ParamFSType: fsType}}
}

// The grounds of directories on filesystems of the node, by what limits those.
const (
	simpleQuotas = "btrfs"
	unlimited    = "unlimited"
)

// localFilesystems make what they are on.
var localFilesystems = map[string]func(testing.TB, string) string{
	simpleQuotas: testenv.SimpleQuotas,
	unlimited:    func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "ext4", size) },
}

func localDirectory(ground string) kind {
	return kind{name: "dir", accessType: "mount", parameters: map[string]string{volume.ParamBackend: local.Name, volume.ParamPool: ground}}.on(ground)
}

// imageOn is a kind of volume that is an image in the pool of a ground, which shares
// blocks or does not.
func imageOn(ground string, k kind) kind {
	p := map[string]string{volume.ParamPool: ground}
	for key, value := range k.parameters {
		p[key] = value
	}
	k.parameters = p
	return k.on(ground)
}

var only = flag.String("kinds", "", "kinds of volume to run the suite with, such as ext4 or forwarded ext4; default all")

func TestMain(m *testing.M) { backendtest.Main(m, loop.New, nfs.New, local.New) }

func TestSanity(t *testing.T) {
	selected := chosen(t, kinds)
	suites := directories(t, selected, localFilesystems)
	suites[""], suites[forwarded] = alone(t), inCluster(t)
	maps.Copy(suites, disks(t, map[string][]string{wholeDisks: loopDisks(t)}))
	runKinds(t, selected, suites)
}

// runKinds runs the suite with all kinds: it can do so once in a process.
func runKinds(t *testing.T, selected []kind, suites map[string]suite) {
	t.Helper()
	for _, k := range selected {
		suites[k.ground].describe(t, k)
	}
	var report ginkgo.Report
	ginkgo.ReportAfterSuite("report", func(r ginkgo.Report) { report = r })
	gomega.RegisterFailHandler(ginkgo.Fail)
	suiteConfig, reporterConfig := ginkgo.GinkgoConfiguration()
	suiteConfig.SkipStrings = keptOut()
	reporterConfig.NoColor = true
	ginkgo.RunSpecs(t, "csi-sanity", suiteConfig, reporterConfig)
	checkSkips(t, report, selected)
	for _, s := range suites {
		awaitEmpty(t, s.pool)
	}
}

// chosen are those of the kinds that -kinds names.
func chosen(t *testing.T, kinds []kind) []kind {
	t.Helper()
	if *only == "" {
		return kinds
	}
	var found []kind
	for name := range strings.SplitSeq(*only, ",") {
		i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
		if i < 0 {
			t.Fatalf("-kinds: there is no kind %q", name)
		}
		found = append(found, kinds[i])
	}
	return found
}

// suite is what kinds share: the drivers, and one pool.
type suite struct {
	pool             string
	id               volume.ID // of a volume in the pool, but for its name
	controller, node string    // endpoints
}

// alone starts one driver that serves all.
func alone(t *testing.T) suite {
	t.Helper()
	poolDir := filepath.Join(testenv.Filesystem(t, "xfs", poolSize), "pool")
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"),
		NodeID:   backendtest.Node,
		StateDir: state,
		Name:     "csi.trivet.dev",
		Version:  "test",
		Services: []string{"controller", "node"},
		Config: driver.Config{
			Pools:             []pool.Config{{Name: poolName, Directory: pool.Directory{Path: poolDir}}},
			MaxVolumesPerNode: maxVolumes,
		},
		Backends: []func(*pool.Set) backend.Backend{loop.New},
	})
	return suite{poolDir, localID(t, poolDir), d.Options.Endpoint, d.Options.Endpoint}
}

// directories starts one driver with a pool for each ground of the kinds that a
// filesystem is made for.
func directories(t *testing.T, selected []kind, filesystems map[string]func(testing.TB, string) string) map[string]suite {
	t.Helper()
	var pools []pool.Config
	state := t.TempDir()
	for _, k := range selected {
		there := slices.ContainsFunc(pools, func(p pool.Config) bool { return p.Name == k.ground })
		if filesystem, ok := filesystems[k.ground]; ok && !there {
			pools = append(pools, pool.Config{Name: k.ground, Directory: pool.Directory{Path: filepath.Join(filesystem(t, poolSize), "pool")}})
		}
	}
	suites := map[string]suite{}
	if len(pools) == 0 {
		return suites
	}
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"), NodeID: backendtest.Node, StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"},
		Config:   driver.Config{Pools: pools, MaxVolumesPerNode: maxVolumes},
		Backends: []func(*pool.Set) backend.Backend{loop.New, local.New},
	})
	for _, p := range pools {
		id := localID(t, p.Directory.Path)
		id.Pool = p.Name
		suites[p.Name] = suite{p.Directory.Path, id, d.Options.Endpoint, d.Options.Endpoint}
	}
	return suites
}

// inCluster starts the drivers of one node and of the controller.
func inCluster(t *testing.T) suite {
	t.Helper()
	poolDir := filepath.Join(testenv.Filesystem(t, "xfs", poolSize), "pool")
	c := backendtest.StartCluster(t, []string{poolDir}, loop.New, local.New)
	return suite{poolDir, localID(t, poolDir), c.Router.Options.Endpoint, c.Nodes[0].Options.Endpoint}
}

// describe registers the suite for one kind of volume.
func (s suite) describe(t *testing.T, k kind) {
	t.Helper()
	config := s.config(t, k)
	ginkgo.Describe(k.name, func() {
		var before testenv.State
		var logged int
		ginkgo.BeforeEach(func() {
			before = snapshot()
			logged = len(backendtest.Log())
		})
		ginkgo.AfterEach(func() {
			if ginkgo.CurrentSpecReport().Failed() {
				ginkgo.AddReportEntry("driver's log", backendtest.Log()[logged:])
			}
			// What was deleted is being removed; wiping a disk takes some seconds in the VM.
			gomega.Eventually(func() error { return snapshot().Leaked(before) }).WithTimeout(time.Minute).Should(gomega.Succeed())
		})
		sc := csisanity.GinkgoTest(&config)
		t.Cleanup(sc.Finalize)
	})
}

// snapshot is what there is now that a spec may leave behind.
func snapshot() testenv.State {
	state, err := testenv.Snapshot()
	gomega.Expect(err).NotTo(gomega.HaveOccurred())
	return state
}

func (s suite) config(t *testing.T, k kind) csisanity.TestConfig {
	t.Helper()
	paths := t.TempDir()
	c := csisanity.NewTestConfig()
	c.Address, c.ControllerAddress = s.node, s.controller
	c.TargetPath = filepath.Join(paths, "target")
	c.StagingPath = filepath.Join(paths, "staging")
	c.TestVolumeAccessType = k.accessType
	c.TestVolumeParameters = k.parameters
	c.TestVolumeSize = size
	c.TestVolumeExpandSize = largerSize
	if strings.HasPrefix(k.ground, wholeDisks) { // which stay as they are
		c.TestVolumeExpandSize = size
	}
	c.TestNodeVolumeAttachLimit = k.ground != forwarded && !strings.HasPrefix(k.ground, onExport)
	c.IdempotentCount = idempotentCount
	like := s.id
	like.Backend = cmp.Or(k.parameters[volume.ParamBackend], loop.Name)
	c.IDGen = &ids{like: like}
	return c
}

// awaitEmpty waits until nothing of any volume is left in the pool: volumes are
// removed behind DeleteVolume's back.
func awaitEmpty(t *testing.T, poolDir string) {
	t.Helper()
	left := func() []string {
		var all []string
		for _, folder := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
			found, err := filepath.Glob(filepath.Join(poolDir, folder, "*"))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, found...)
		}
		return all
	}
	gomega.NewWithT(t).Eventually(left, 30*time.Second).Should(gomega.BeEmpty(), "left in the pool")
}
