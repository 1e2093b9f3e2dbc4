package backendtest

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// Kind is a kind of volume that a backend makes: a filesystem, or a raw device.
type Kind struct {
	FSType string // empty: a raw device
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

// Target is a backend under test.
type Target struct {
	New   func(*pool.Set) backend.Backend
	Kinds []Kind
}

// without names what a run leaves out, because this machine cannot do it and
// another run does: a comma-separated list in TRIVET_TEST_WITHOUT. The one thing
// known is ext4-growth, which needs CAP_SYS_RESOURCE.
func without(tb testing.TB, what string) {
	tb.Helper()
	if slices.Contains(strings.Split(os.Getenv("TRIVET_TEST_WITHOUT"), ","), what) {
		tb.Skipf("left out by TRIVET_TEST_WITHOUT=%s", what)
	}
}

// Run runs the suite.
func Run(t *testing.T, target Target) {
	dir := testenv.Filesystem(t, "xfs", "64G")
	d := Start(t, dir, target.New)
	for _, kind := range target.Kinds {
		t.Run(kind.Name(), func(t *testing.T) { runKind(t, d, kind) })
	}
	whole := map[string]func(*testing.T, *Driver){
		"Secrets":      testSecrets,
		"Arguments":    testArguments,
		"Idempotent":   testIdempotentCreate,
		"Sizes":        testSizes,
		"Topology":     testTopology,
		"Publication":  testPublication,
		"Capabilities": testCapabilities,
	}
	for _, name := range sortedKeys(whole) {
		t.Run(name, func(t *testing.T) { whole[name](t, d) })
	}
	// These count, and so want a pool to themselves.
	t.Run("Expansion", func(t *testing.T) { testExpansionRefused(t, target) })
	t.Run("Paging", func(t *testing.T) { testPaging(t, target) })
	t.Run("Promise", func(t *testing.T) { testPromise(t, target) })
	t.Run("SplitServices", func(t *testing.T) { testSplitServices(t, target) })
	t.Run("NodeLimit", func(t *testing.T) { testNodeLimit(t, target) })
}

func runKind(t *testing.T, d *Driver, kind Kind) {
	each := map[string]func(*testing.T, *Driver, Kind){
		"Contents":      testContents,
		"Reboot":        testReboot,
		"OnlineGrowth":  testOnlineGrowth,
		"OfflineGrowth": testOfflineGrowth,
		"ReadOnly":      testReadOnly,
		"AccessModes":   testAccessModes,
		"StageAgain":    testStageAgain,
		"PublishAgain":  testPublishAgain,
		"Duplicates":    testDuplicates,
		"InUse":         testInUse,
		"Health":        testHealth,
	}
	for _, name := range sortedKeys(each) {
		t.Run(name, func(t *testing.T) { each[name](t, d, kind) })
	}
	if !kind.Block() {
		t.Run("MountFlags", func(t *testing.T) { testMountFlags(t, d, kind) })
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
