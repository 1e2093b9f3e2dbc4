// Package sanity runs csi-sanity, the test suite of the CSI project, over real sockets: against one
// driver, and against a controller's driver that forwards calls to a node's driver, each time for
// each kind of volume. In the virtual machine of test/vm it also runs on NFS exports, on directories
// with project quotas, on disks other than loop devices, on logical volumes and on encrypted volumes.
// Package backend/backendtest tests what csi-sanity does not.
package sanity

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// size and largerSize are the sizes of volumes in bytes. An xfs must have at least 300 MiB.
	size       = 320 * volume.MiB
	largerSize = 640 * volume.MiB
	// maxVolumes is the number of volumes that a node accepts.
	maxVolumes = 3
	// idempotentCount is how often the suite makes each call that it repeats.
	idempotentCount = 3
)

var only = flag.String("kinds", "", "comma-separated kinds of volume for which the suite runs, such as \"images-xfs ext4\" or \"forwarded local dir\"; default all")

func TestMain(m *testing.M) { backendtest.Main(m, targets.Backends...) }

// TestSanity runs the suite for every kind of volume that does not need a virtual machine.
func TestSanity(t *testing.T) {
	var suites []suite
	for _, target := range targets.All {
		if !target.Guest && !(target.Variant && testing.Short()) {
			suites = append(suites, singleDriver(t, target))
		}
	}
	runSuites(t, append(suites, inCluster(t))...)
}

// suite contains the drivers and the pool with which the suite runs for some kinds.
type suite struct {
	name             string
	kinds            []kind
	pool             string    // the directory of the pool; empty if no driver was started
	id               volume.ID // of a volume in the pool, without backend and name
	controller, node string    // endpoints of the drivers
}

// kind is a kind of volume for which the suite runs.
type kind struct {
	backendtest.Kind

	name      string
	forwarded bool // the controller's driver forwards calls to the node's driver
}

// runSuites runs the suite for all kinds. Ginkgo allows only one call per process.
func runSuites(t *testing.T, suites ...suite) {
	t.Helper()
	var selected []kind
	for _, s := range suites {
		for _, k := range s.kinds {
			s.describe(t, k)
			selected = append(selected, k)
		}
	}
	for name := range strings.SplitSeq(*only, ",") {
		if name != "" && !slices.ContainsFunc(selected, func(k kind) bool { return k.name == name }) {
			t.Fatalf("-kinds: the test has no kind %q", name)
		}
	}
	var report ginkgo.Report
	ginkgo.ReportAfterSuite("report", func(r ginkgo.Report) { report = r })
	gomega.RegisterFailHandler(ginkgo.Fail)
	suiteConfig, reporterConfig := ginkgo.GinkgoConfiguration()
	suiteConfig.SkipStrings = excludedSpecs(selected)
	reporterConfig.NoColor = true
	ginkgo.RunSpecs(t, "csi-sanity", suiteConfig, reporterConfig)
	checkSkips(t, report, selected)
	for _, s := range suites {
		if s.pool != "" {
			awaitEmpty(t, s.pool)
		}
	}
}

// chosen returns the kinds that -kinds selects.
func (s suite) chosen(kinds []backendtest.Kind, forwarded bool) (found []kind) {
	for _, k := range kinds {
		name := s.name + " " + k.Name()
		if forwarded {
			name = s.name + " " + k.Backend() + " " + k.Name()
		}
		if *only == "" || slices.Contains(strings.Split(*only, ","), name) {
			found = append(found, kind{k, name, forwarded})
		}
	}
	return found
}

// room is the space that one spec needs. The spec of the attach limit creates one volume more than
// the node accepts.
var room = backendtest.Room{Total: "8G", Volumes: maxVolumes + 2, Each: size}

// singleDriver starts one driver for a target. It serves both the controller and the node.
func singleDriver(t *testing.T, target backendtest.Target) suite {
	t.Helper()
	s := suite{name: target.Name}
	s.kinds = s.chosen(target.Volumes(), false)
	if len(s.kinds) == 0 {
		return s
	}
	if target.Prepare != nil {
		target.Prepare(t, &target)
	}
	d := target.Start(t, room, func(o *driver.Options) { o.Config.MaxVolumesPerNode = maxVolumes })
	s.pool, s.controller, s.node = d.Pool(), d.Options.Endpoint, d.Options.Endpoint
	s.id = volume.ID{Pool: target.Pool}
	if !target.Features.Has(backendtest.Shared) {
		s.id.PoolUUID = uuidOf(t, s.pool)
	}
	return s
}

// inCluster starts the drivers of one node and of the controller, with one pool for both
// images and directories.
func inCluster(t *testing.T) suite {
	t.Helper()
	s := suite{name: "forwarded"}
	s.kinds = s.chosen(targets.On(pool.KindDirectory, 0), true)
	if len(s.kinds) == 0 {
		return s
	}
	s.pool = filepath.Join(testenv.Filesystem(t, "xfs", room.Total), "pool")
	c := backendtest.StartCluster(t, []string{s.pool}, targets.Backends...)
	s.controller, s.node = c.Router.Options.Endpoint, c.Nodes[0].Options.Endpoint
	s.id = volume.ID{Pool: backendtest.DefaultPool, PoolUUID: uuidOf(t, s.pool)}
	return s
}

// describe registers the specs of the suite for one kind of volume.
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
			// Deleted volumes are removed in the background. Wiping a disk takes some seconds
			// in the VM.
			gomega.Eventually(func() error { return snapshot().Leaked(before) }).WithTimeout(time.Minute).Should(gomega.Succeed())
		})
		sc := csisanity.GinkgoTest(&config)
		t.Cleanup(sc.Finalize)
	})
}

// snapshot returns the state of mounts, devices and files.
func snapshot() testenv.State {
	state, err := testenv.Snapshot()
	gomega.Expect(err).NotTo(gomega.HaveOccurred())
	return state
}

// config returns the configuration of csi-sanity for one kind of volume.
func (s suite) config(t *testing.T, k kind) csisanity.TestConfig {
	t.Helper()
	paths := t.TempDir()
	c := csisanity.NewTestConfig()
	c.Address, c.ControllerAddress = s.node, s.controller
	c.TargetPath = filepath.Join(paths, "target")
	c.StagingPath = filepath.Join(paths, "staging")
	c.TestVolumeAccessType = "mount"
	if k.Block() {
		c.TestVolumeAccessType = "block"
	}
	c.TestVolumeParameters = k.Parameters()
	if k.FSType != "" {
		c.TestVolumeParameters[volume.ParamFSType] = k.FSType
	}
	// A machine with cgroup v1 also accepts this value.
	c.TestVolumeMutableParameters = map[string]string{volume.IOLimitParameters[0].Key: volume.NoIOLimit}
	c.TestVolumeSize = size
	c.TestVolumeExpandSize = largerSize
	if !k.Has(backendtest.Divisible) { // a disk cannot grow to a requested size
		c.TestVolumeExpandSize = size
	}
	if k.Has(backendtest.Encrypted) {
		c.SecretsFile = filepath.Join(paths, "secrets.yaml")
		if err := os.WriteFile(c.SecretsFile, []byte("NodeStageVolumeSecret: {passphrase: the passphrase of csi-sanity}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.TestNodeVolumeAttachLimit = !k.forwarded && k.Has(backendtest.NodeLocal)
	c.IdempotentCount = idempotentCount
	like := s.id
	like.Backend = k.Backend()
	c.IDGen = &ids{like: like}
	return c
}

// awaitEmpty waits until the pool has no volumes and snapshots, including temporary and deleted
// ones.
func awaitEmpty(t *testing.T, poolDir string) {
	t.Helper()
	left := func() ([]string, error) { return testenv.PoolEntries(poolDir) }
	gomega.NewWithT(t).Eventually(left, 30*time.Second).Should(gomega.BeEmpty(), "the suite left files in the pool")
}
