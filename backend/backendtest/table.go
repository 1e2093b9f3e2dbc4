package backendtest

import (
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/driver"
)

// row is a test of every kind that has the powers that it needs. Rows run in this order with
// one driver for each kind. Those that count bytes or volumes start their own driver.
type row struct {
	name  string
	needs Power
	test  func(*testing.T, *Driver, Kind)
}

// table has the rows. A row that needs no power is for every kind.
var table = []row{
	// A volume on a node.
	{"Contents", 0, testContents},
	{"Reboot", 0, testReboot},
	{"ReadOnly", 0, testReadOnly},
	{"AccessModes", 0, testAccessModes},
	{"MultiNode", Shared | Directory, testMultiNode},
	{"StageAgain", 0, testStageAgain},
	{"StageElsewhere", Filesystem, testStageElsewhere},
	{"PublishAgain", 0, testPublishAgain},
	{"Duplicates", 0, testDuplicates},
	{"InUse", 0, testInUse},
	{"MountFlags", Filesystem, testMountFlags},
	{"DirectoryFlags", Directory, testDirectoryFlags},
	{"PoolFlags", Shared | Directory, testPoolFlags},
	{"Secrets", 0, testSecrets},

	// Health.
	{"Healthy", 0, testHealthy},
	{"ImageHealth", Image, testImageHealth},
	{"DirectoryHealth", Placed, testDirectoryHealth},
	{"DiskHealth", WholeDisk | Pluggable, testDiskHealth},
	{"Dying", WholeDisk | Pluggable, testDiskDying},
	{"Pulled", WholeDisk | Pullable, testDiskPulled},

	// Arguments and capabilities.
	{"CreateArguments", Image | NodeLocal, unchanged(testCreateArguments)},
	{"ControllerArguments", 0, unchanged(testControllerArguments)},
	{"NodeArguments", 0, unchanged(testNodeArguments)},
	{"Targets", Mounted, testTargets},
	{"DirectoryArguments", Placed, testDirectoryArguments},
	{"Capabilities", 0, testCapabilities},
	{"Validate", Image | NodeLocal, testValidate},
	{"ValidateDirectory", Placed, testValidateDirectory},
	{"Idempotent", Image | NodeLocal, testIdempotentCreate},
	{"IdempotentDirectory", Placed, testIdempotentDirectory},
	{"IdempotentDisk", WholeDisk, testIdempotentDisk},
	{"Sizes", Image | NodeLocal, testSizes},
	{"Smallest", Image, testSmallest},
	{"DirectorySizes", Placed, testDirectorySizes},
	{"DiskSizes", WholeDisk, testDiskSizes},
	{"Topology", NodeLocal, testTopology},
	{"NoTopology", Shared, testNoTopology},
	{"Publication", 0, testPublication},

	// Expansion.
	{"OnlineGrowth", Image | Expand, testOnlineGrowth},
	{"OfflineGrowth", Image | Expand, testOfflineGrowth},
	{"DirectoryGrowth", Directory | Expand, testDirectoryGrowth},
	{"DiskGrowth", WholeDisk | Growable | Expand, testDiskGrowth},
	{"Expansion", Image | Expand, testExpansionRefused},

	// Snapshots and copies.
	{"Clone", Clones, testCloneAtRest},
	{"CloneStates", Image | Snapshots, testClone},
	{"CloneOnLarger", WholeDisk | Block | Clones, testCloneOnLarger},
	{"Requests", Snapshots, testSnapshotRequests},
	{"Listing", Snapshots, testSnapshotList},
	{"Sources", Snapshots, testSources},
	{"Parallel", Snapshots, testParallelSnapshots},
	{"Live", Image | LiveCopies, testLiveSnapshot},
	{"RawInUse", Image | Block | RestCopies, testRawInUse},
	{"Group", Image | Filesystem | LiveCopies, testGroup},
	{"SnapshotLife", Image | Snapshots, testSnapshotLife},
	{"Thick", Image | Snapshots, testThickCopy},
	{"Changes", Block | ChangedBlocks, testChanges},
	{"Ledger", Image | Snapshots, testSnapshotLedger},
	{"Long", Block | FullCopies, testLongCopies},
	{"FreezeLimit", Filesystem | FullCopies, testFreezeLimit},
	{"FullPool", Block | FullCopies, testFullPool},
	{"Pools", Image | NodeLocal | Snapshots, testGroupOfPools},
	{"LiveDirectory", Directory | LiveCopies, testLiveDirectory},
	{"DirectoryInUse", Directory | RestCopies, testDirectoryInUse},
	{"DirectoryGroup", Directory | Snapshots, testDirectoryGroup},
	{"Tree", Directory | Snapshots, testTree},
	{"DirectoryLife", Directory | Snapshots, testDirectorySnapshotLife},
	{"SnapshotOfSubDir", Placed | Snapshots, testSnapshotOfSubDir},
	{"NoBlocks", Directory | Snapshots, testNoBlocks},
	{"HostileSource", Placed | NodeLocal | Snapshots, testHostileSource}, // on a server nothing is mounted below
	{"LimitedCopy", Limited | Snapshots, testLimitedCopy},
	{"Removed", 0, testRemoved},

	// Events of a node's disks.
	{"Restored", WholeDisk | Filesystem, testDiskRestored},
	{"DiskMoved", WholeDisk | Pluggable, testDiskMoved},

	// Directories.
	{"Owners", Placed, testOwners},
	{"SubDir", Placed, testSubDir},
	{"OnDelete", Placed, testOnDelete},
	{"Hostile", Placed, testHostile},
	{"Tenant", Placed | NodeLocal, testTenant},
	{"Gone", Placed | NodeLocal, testGone},
	{"GoneAtRoot", Placed | NodeLocal, testGoneAtRoot},
	{"Moved", Placed | NodeLocal, testMoved},
	{"NotLimited", Directory | Unlimited, testUnlimited},
	{"Full", Limited, testFull},
	{"Inodes", Limited, testInodes},
	{"Next", Limited, testNext},
	{"IDs", Limited, testIDs},
	{"Foreign", Limited, testForeign},
	{"Changed", Limited, testChanged},
	{"Copied", Limited, testCopied},
	{"OtherKind", Limited, testOtherKind},
	{"Adopted", Limited, testAdopted},
	{"Kept", Limited, testKept},
	{"TenantUnlimited", Limited, testTenantUnlimited},
	{"Off", Limited, testOff},
	{"Inline", Inline | Filesystem, testInline},
	{"Static", Static, testStatic},
	{"Direct", Static, testDirect},

	// Rows with their own pool, because they count bytes or volumes.
	{"Paging", Divisible, testPaging},
	{"Promise", Divisible, testPromise},
	{"NodeLimit", NodeLocal, testNodeLimit},
	{"SplitServices", NodeLocal, testSplitServices},
	{"TwoNodes", Shared | Directory, onTwoNodes(testTwoNodes)},
	{"OneNode", Shared, onTwoNodes(testOneNode)},
	{"TwoCreators", Shared, onTwoNodes(testTwoCreators)},
}

// Run runs every row of the table that applies to a kind of the target.
func Run(t *testing.T, target Target) {
	for _, wrong := range target.check() {
		t.Errorf("target %s: %s", target.Name, wrong)
	}
	if target.Prepare != nil {
		target.Prepare(t, &target)
	}
	for _, kind := range target.Volumes() {
		t.Run(kind.Name(), func(t *testing.T) {
			d := target.start(t, "64G", func(*driver.Options) {})
			for _, r := range table {
				if !kind.Has(r.needs) {
					continue
				}
				if reason := target.Except[r.name]; reason != "" {
					t.Logf("%s does not hold: %s", r.name, reason)
					continue
				}
				t.Run(r.name, func(t *testing.T) { r.test(t, d, kind) })
			}
		})
	}
}

// CheckTable fails the test if two rows have one name, if a row applies to no kind of the
// targets, or if a target is described wrongly.
func CheckTable(t *testing.T, targets []Target) {
	t.Helper()
	seen := map[string]bool{}
	for _, r := range table {
		if seen[r.name] {
			t.Errorf("two rows are called %s", r.name)
		}
		seen[r.name] = true
		used := slices.ContainsFunc(targets, func(target Target) bool {
			return slices.ContainsFunc(target.Volumes(), func(k Kind) bool { return k.Has(r.needs) })
		})
		if !used {
			t.Errorf("row %s needs %s: no kind has that", r.name, r.needs)
		}
	}
	for _, target := range targets {
		for _, wrong := range target.check() {
			t.Errorf("target %s: %s", target.Name, wrong)
		}
	}
}
