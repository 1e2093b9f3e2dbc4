package backendtest

import (
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/driver"
)

// row is a test that runs with every kind that has all features of needs. The rows of a kind run in the order of
// the table, with the same driver. Rows that count bytes or volumes start their own driver.
type row struct {
	name  string
	needs Feature
	test  func(*testing.T, *Driver, Kind)
}

// table contains all rows. A row that needs no feature runs with every kind.
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
	{"IDMapped", Mounted, testIDMapped},
	{"SELinux", Mounted, testSELinux},
	{"PoolFlags", Shared | Directory, testPoolFlags},
	{"Secrets", 0, testSecrets},

	// Health.
	{"Healthy", 0, testHealthy},
	{"ImageHealth", Image, testImageHealth},
	{"DirectoryHealth", Placed, testDirectoryHealth},
	{"DiskHealth", WholeDisk | Pluggable, testDiskHealth},
	{"DiskDying", WholeDisk | Pluggable, testDiskDying},
	{"DiskPulled", WholeDisk | Pullable, testDiskPulled},

	// Arguments and capabilities.
	{"CreateArguments", Image | NodeLocal, wantUnchanged(testCreateArguments)},
	{"ControllerArguments", 0, wantUnchanged(testControllerArguments)},
	{"NodeArguments", 0, wantUnchanged(testNodeArguments)},
	{"TargetPaths", Mounted, testTargetPaths},
	{"DirectoryArguments", Placed, testDirectoryArguments},
	{"Capabilities", 0, testCapabilities},
	{"ValidateImage", Image | NodeLocal, testValidateImage},
	{"ValidateDirectory", Placed, testValidateDirectory},
	{"IdempotentImage", Image | NodeLocal, testIdempotentImage},
	{"IdempotentDirectory", Placed, testIdempotentDirectory},
	{"IdempotentDisk", WholeDisk, testIdempotentDisk},
	{"ImageSizes", Image | NodeLocal, testImageSizes},
	{"SmallestDevice", Device | Divisible, testSmallestDevice},
	{"DirectorySizes", Placed, testDirectorySizes},
	{"DiskSizes", WholeDisk, testDiskSizes},
	{"Topology", NodeLocal, testTopology},
	{"NoTopology", Shared, testNoTopology},
	{"Publication", 0, testPublication},

	// Expansion.
	{"OnlineGrowth", Device | Divisible | Expand, testOnlineGrowth},
	{"OfflineGrowth", Device | Divisible | Expand, testOfflineGrowth},
	{"DirectoryGrowth", Directory | Expand, testDirectoryGrowth},
	{"DiskGrowth", WholeDisk | Growable | Expand, testDiskGrowth},
	{"ExpansionRefused", Device | Divisible | Expand, testExpansionRefused},

	{"IOLimits", 0, testIOLimits},
	{"Trim", NodeLocal, testTrim},
	{"Check", NodeLocal, testCheck},

	// Snapshots and copies.
	{"Clone", Clones, testClone},
	{"CloneStates", Device | Snapshots, testCloneStates},
	{"CloneOnLarger", WholeDisk | Block | Clones, testCloneOnLarger},
	{"SnapshotRequests", Snapshots, testSnapshotRequests},
	{"SnapshotList", Snapshots, testSnapshotList},
	{"ContentSources", Snapshots, testContentSources},
	{"VolumeModes", Filesystem | Snapshots, testVolumeModes},
	{"ParallelSnapshots", Snapshots, testParallelSnapshots},
	{"LiveSnapshot", Device | LiveCopies, testLiveSnapshot},
	{"RawDeviceInUse", Image | Block | RestCopies, testRawDeviceInUse},
	{"SnapshotGroup", Filesystem | LiveCopies, testSnapshotGroup},
	{"SnapshotLifetime", Device | Snapshots, testSnapshotLifetime},
	{"ThickCopy", Image | Snapshots, testThickCopy},
	{"ChangedBlocks", Block | ChangedBlocks, testChangedBlocks},
	{"SnapshotSpace", Image | Snapshots, testSnapshotSpace},
	{"LongCopies", Block | FullCopies, testLongCopies},
	{"FreezeLimit", Filesystem | FullCopies, testFreezeLimit},
	{"FullPool", Block | FullCopies, testFullPool},
	{"OtherPool", Image | NodeLocal | Snapshots, testOtherPool},
	{"LiveDirectory", Directory | LiveCopies, testLiveDirectory},
	{"DirectoryInUse", Directory | RestCopies, testDirectoryInUse},
	{"DirectoryGroup", Directory | Snapshots, testDirectoryGroup},
	{"DirectoryTree", Directory | Snapshots, testDirectoryTree},
	{"DirectorySnapshotLifetime", Directory | Snapshots, testDirectorySnapshotLifetime},
	{"SnapshotOfSubDir", Placed | Snapshots, testSnapshotOfSubDir},
	{"DirectoryHasNoBlocks", Directory | Snapshots, testDirectoryHasNoBlocks},
	{"HostileSource", Placed | NodeLocal | Snapshots, testHostileSource}, // the server copies no mounts of this node
	{"LimitedCopy", Limited | Snapshots, testLimitedCopy},
	{"NothingLeft", 0, testNothingLeft},

	// Events of a node's disks.
	{"DiskRecordRestored", WholeDisk | Filesystem, testDiskRecordRestored},
	{"DiskMoved", WholeDisk | Pluggable, testDiskMoved},

	// Volume groups.
	{"LogicalVolumes", Logical, testLogicalVolumes},
	{"TakenOver", Logical, testTakenOver},
	{"TakeoverRefused", Logical, testTakeoverRefused},
	{"TakeoverInterrupted", Logical, testTakeoverInterrupted},
	{"GroupMoved", Logical, testGroupMoved},
	{"GroupRoom", Logical | Block, testGroupRoom},
	{"ForeignVolumes", Logical | Block, testForeignVolumes},
	{"HostileSignatures", Logical | Block, testHostileSignatures},
	{"HostileFormats", Logical | Block, testHostileFormats},
	{"HostActivation", Logical, testHostActivation},
	{"DeletedData", Logical | Block, testDeletedData},
	{"ForeignData", Thick | Block, testForeignData},
	{"ZeroingCancelled", Thick | Block, testZeroingCancelled},
	{"ThinVolumes", Thin, testThinVolumes},
	{"ThinPool", Thin | Block, testThinPool},
	{"ThinRoom", Thin | Block, testThinRoom},

	// Encrypted volumes.
	{"Passphrase", Encrypted, testPassphrase},
	{"Rotation", Encrypted, testRotation},
	{"Ciphertext", Encrypted, testCiphertext},
	{"ContainerHeader", Encrypted, testContainerHeader},
	{"ContainerLeftOpen", Encrypted, testContainerLeftOpen},
	{"DiskHeader", Encrypted | WholeDisk | Block, testDiskHeader},
	{"EncryptedCopies", Encrypted | Clones, testEncryptedCopies},

	// Directories.
	{"DirectoryOwner", Placed, testDirectoryOwner},
	{"SubDir", Placed, testSubDir},
	{"OnDelete", Placed, testOnDelete},
	{"HostilePoolContent", Placed, testHostilePoolContent},
	{"HostileTenant", Placed | NodeLocal, testHostileTenant},
	{"DirectoryGone", Placed | NodeLocal, testDirectoryGone},
	{"DirectoryGoneAtRoot", Placed | NodeLocal, testDirectoryGoneAtRoot},
	{"FilesystemMoved", Placed | NodeLocal, testFilesystemMoved},
	{"WithoutLimits", Directory | Unlimited, testWithoutLimits},
	{"LimitEnforced", Limited, testLimitEnforced},
	{"InodeLimit", Limited, testInodeLimit},
	{"LimitAfterDelete", Limited, testLimitAfterDelete},
	{"QuotaIDs", Limited, testQuotaIDs},
	{"ForeignUse", Limited, testForeignUse},
	{"LimitChanged", Limited, testLimitChanged},
	{"LimitLost", Limited, testLimitLost},
	{"OtherQuotaKind", Limited, testOtherQuotaKind},
	{"AdoptedDirectory", Limited, testAdoptedDirectory},
	{"KeptDataLimited", Limited, testKeptDataLimited},
	{"HostileTenantUnlimited", Limited, testHostileTenantUnlimited},
	{"LimitsOff", Limited, testLimitsOff},
	{"InlineVolume", Inline | Filesystem, testInlineVolume},
	{"StaticVolume", Static, testStaticVolume},
	{"DirectPool", Static, testDirectPool},

	// Rows with their own pool, because they count bytes or volumes.
	{"Paging", Divisible, testPaging},
	{"PromisedSpace", Divisible, testPromisedSpace},
	{"VolumesPerNode", NodeLocal, testVolumesPerNode},
	{"SplitServices", NodeLocal, testSplitServices},
	{"DeleteBesideStage", WholeDisk, testDeleteBesideStage},
	{"DeleteBesideActivation", Logical, testDeleteBesideStage},
	{"TwoNodes", Shared | Directory, onTwoNodes(testTwoNodes)},
	{"OneNode", Shared, onTwoNodes(testOneNode)},
	{"TwoCreators", Shared, onTwoNodes(testTwoCreators)},
}

// Run runs the rows of the table with all kinds of the target.
func Run(t *testing.T, target Target) {
	for _, wrong := range target.check() {
		t.Errorf("target %s: %s", target.Name, wrong)
	}
	if target.Prepare != nil {
		target.Prepare(t, &target)
	}
	kinds := target.Volumes()
	if target.Variant && testing.Short() {
		kinds = kinds[:1]
	}
	for _, kind := range kinds {
		t.Run(kind.Name(), func(t *testing.T) {
			d := target.start(t, "64G", func(*driver.Options) {})
			for _, r := range table {
				if !kind.Has(r.needs) {
					continue
				}
				if reason := target.Except[r.name]; reason != "" {
					t.Logf("row %s does not apply: %s", r.name, reason)
					continue
				}
				t.Run(r.name, func(t *testing.T) { r.test(t, d, kind) })
			}
		})
	}
}

// CheckTable fails the test if two rows have the same name, if a row runs with no kind of the targets, or if the
// description of a target is wrong.
func CheckTable(t *testing.T, targets []Target) {
	t.Helper()
	seen := map[string]bool{}
	for _, r := range table {
		if seen[r.name] {
			t.Errorf("two rows have the name %s", r.name)
		}
		seen[r.name] = true
		used := slices.ContainsFunc(targets, func(target Target) bool {
			return slices.ContainsFunc(target.Volumes(), func(k Kind) bool { return k.Has(r.needs) })
		})
		if !used {
			t.Errorf("row %s needs the features %s, but no kind has all of them", r.name, r.needs)
		}
	}
	for _, target := range targets {
		for _, wrong := range target.check() {
			t.Errorf("target %s: %s", target.Name, wrong)
		}
	}
}
