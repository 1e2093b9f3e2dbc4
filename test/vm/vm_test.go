// Package vm runs, in virtual machines, tests that the kernel of a build machine may not support. See
// README.md.
package vm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
)

const (
	module = "../.."

	sanityTest = "^TestSanity$"
	growthTest = "^TestConformance$/^images-xfs$/^ext4$/^(OnlineGrowth|OfflineGrowth|LiveSnapshot|SnapshotLifetime)$"

	// hostReserve is the time in which the host builds the programs and downloads a kernel, in
	// addition to the time of the guest.
	hostReserve = 6 * time.Minute
	// The programs time out this long before the guest, so that they can print their stacks.
	dumpReserve = 15 * time.Second

	// onDisk puts temporary files on the guest's first disk, because loop devices have no direct I/O
	// on the guest's root, which is an overlay.
	onDisk = "mkfs.xfs -q /dev/vda && mount /dev/vda /mnt && export TMPDIR=/mnt"
	// withCgroups is added to a prelude to mount a cgroup v2 hierarchy.
	withCgroups = " && mount -t cgroup2 none /sys/fs/cgroup"
	// nfsDisk is onDisk with the second disk for the exports of package nfsd.
	nfsDisk = onDisk + " && export TRIVET_TEST_DISK=/dev/vdb"
	// cryptNFSDisk is nfsDisk with encrypted volumes.
	cryptNFSDisk = nfsDisk + " && modprobe dm_crypt"
	// onGroups is onDisk with the other disks for volume groups, and a configuration of LVM for the tests, because the
	// guest has no udevd.
	onGroups = onDisk + " && modprobe dm_mod && export LVM_SYSTEM_DIR=/run/lvm.test && mkdir $LVM_SYSTEM_DIR && echo '" + lvmConfig + "' >$LVM_SYSTEM_DIR/lvm.conf"

	// onThinPools is onGroups with thin pools.
	onThinPools = onGroups + " && modprobe dm_thin_pool"

	// onEncrypted is onThinPools with encrypted volumes.
	onEncrypted = onThinPools + " && modprobe dm_crypt"

	lvmConfig = `devices{obtain_device_list_from_udev=0 external_device_info_source="none" use_devicesfile=0 scan_lvs=0} ` +
		`global{use_lvmpolld=0 notify_dbus=0 event_activation=0} activation{udev_sync=0 udev_rules=0 monitoring=0} backup{backup=0 archive=0}`
)

// sanityDisks are the disks that test/sanity needs on each bus.
var sanityDisks = slices.Repeat([]string{"322M"}, 5)

// groupDisks are the disks of a guest with volume groups, which are larger than the volumes of the conformance tests.
var groupDisks = []string{"8G", "70G", "70G"}

// guest is a virtual machine that runs test programs one after the other.
type guest struct {
	name     string
	mem      int           // the memory in MiB; 0 for the default of vm.sh
	disks    []string      // the sizes of the virtio disks
	nvme     []string      // the sizes of the NVMe disks
	scsi     []string      // the sizes of the SCSI disks
	prelude  string        // a bash command that runs before the programs
	driver   bool          // TRIVET_TEST_DRIVER is set to the path of a driver
	cluster  bool          // the programs run beside the control plane of a cluster, which cluster.sh starts
	selinux  bool          // SELinux is enforced with the policy of selinux.sh while the programs run
	tls      bool          // TRIVET_TEST_TLSHD is set to the path of tlshd
	kernel   string        // the suite of Debian whose kernel runs if VM_KERNEL is not set; "" for the default of vm.sh
	api      bool          // TRIVET_TEST_CLUSTER is set to the path of a directory with etcd and kube-apiserver
	crashing bool          // TRIVET_TEST_CRASHING is set to the path of a driver with crash points
	limit    time.Duration // the guest is ended after this time
	long     bool          // the guest runs only with -long
	programs []program
	// beforePolicy are the programs that run before the programs, in a guest with selinux without a policy.
	beforePolicy []program
}

// allPrograms returns the programs in the order in which they run.
func (g guest) allPrograms() []program { return slices.Concat(g.beforePolicy, g.programs) }

var long = flag.Bool("long", false, "also run the guests that take minutes each")

// program runs tests of a package, built with the tag vm. For each expression of want, the output
// must contain a matching line. No test may be skipped.
type program struct {
	pkg  string   // the path of the package, relative to the module
	args []string // of the test binary
	want []*regexp.Regexp
}

var guests = []guest{
	{
		name: "sanity", disks: []string{"8G"}, prelude: onDisk, limit: 4 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", sanityTest, "-kinds", "images-xfs ext4"}, passed("TestSanity")}},
	},
	{
		name: "growth", disks: []string{"8G"}, prelude: onDisk, limit: 4 * time.Minute,
		programs: []program{
			{"./backend/loop", []string{"-test.run", growthTest}, passed(`TestConformance/images-xfs/ext4/\w+Growth`, "TestConformance/images-xfs/ext4/LiveSnapshot/frozen")},
		},
	},
	{
		name: "encryption", disks: []string{"32G"}, prelude: onDisk + " && modprobe dm_crypt", limit: 15 * time.Minute,
		programs: []program{{
			"./backend/loop",
			[]string{"-test.run", "^TestEncrypted$/./^ext4$/^(Rotation|Ciphertext|NothingLeft)$|^TestEncrypted$/./^block$/^(EncryptedCopies|NothingLeft)$"},
			passed("TestEncrypted/images-encrypted/ext4/Rotation", "TestEncrypted/images-encrypted/block/EncryptedCopies"),
		}},
	},
	{
		name: "encryption-conformance", disks: []string{"32G"}, prelude: onDisk + " && modprobe dm_crypt", long: true, limit: 60 * time.Minute,
		programs: []program{{
			"./backend/loop",
			[]string{"-test.run", "^(TestEncrypted|TestTransfer)$"},
			passed("TestEncrypted/images-encrypted/xfs/Clone", "TestEncrypted/images-encrypted/block/ChangedBlocks", "TestTransfer/none-btrfs", "TestTransfer/luks2-block"),
		}},
	},
	{
		name: "encryption-crash", disks: []string{"16G", "8G", "8G"}, prelude: onDisk + " && modprobe dm_crypt", crashing: true, long: true, limit: 60 * time.Minute,
		programs: []program{
			{"./test/crash", []string{"-test.run", "^TestEncrypted$", "-test.parallel", "4"}, passed("TestEncrypted/random", "TestEncrypted/rows/.*")},
			{"./test/crash", []string{"-test.run", "^TestEncryptedDisk$", "-test.parallel", "4"}, passed("TestEncryptedDisk/random", "TestEncryptedDisk/rows/.*")},
			power("TestEncryptedPower", "crypt-xfs", "crypt-raw"),
		},
	},
	{
		name: "limits", disks: []string{"8G"}, prelude: onDisk + withCgroups, limit: 5 * time.Minute,
		programs: []program{{"./backend/loop", []string{"-test.run", "^TestIOLimits$/^images-xfs$/^(ext4|block)$"}, passed("TestIOLimits/images-xfs/ext4", "TestIOLimits/images-xfs/block")}},
	},
	{
		name: "limits-conformance", disks: groupDisks, prelude: onEncrypted + withCgroups, long: true, limit: 30 * time.Minute,
		programs: []program{
			{"./backend/loop", []string{"-test.run", "^TestIOLimits$"}, passed("TestIOLimits/images-xfs/btrfs", "TestIOLimits/images-encrypted/ext4")},
			{"./backend/loop", []string{"-test.run", "^TestNoisyNeighbour$/^(ext4|block)$"}, passed("TestNoisyNeighbour/ext4", "TestNoisyNeighbour/block")},
			{"./backend/disk", []string{"-test.run", "^TestIOLimits$"}, passed("TestIOLimits/ext4", "TestIOLimits/block")},
			{"./backend/lvm", []string{"-test.run", "^TestIOLimits$"}, passed("TestIOLimits/group/xfs", "TestIOLimits/thin/ext4")},
		},
	},
	{
		name: "selinux", disks: []string{"8G", "8G"}, prelude: nfsDisk, selinux: true, long: true, limit: 10 * time.Minute,
		beforePolicy: []program{{"./doctor", []string{"-test.run", "^TestSELinuxWithoutPolicy$"}, passed("TestSELinuxWithoutPolicy")}},
		programs: []program{
			{"./linux/mount", []string{"-test.run", "^Test(CanonicalContext|ProbeContext|OtherContext)$"}, passed("TestCanonicalContext", "TestProbeContext", "TestOtherContext/ext4", "TestOtherContext/xfs")},
			{
				"./backend/loop",
				[]string{"-test.run", "^TestConformance$/^images-xfs$/^(ext4|xfs|btrfs)$/^SELinux$"},
				passed("TestConformance/images-xfs/ext4/SELinux/clone", "TestConformance/images-xfs/xfs/SELinux/clone", "TestConformance/images-xfs/btrfs/SELinux"),
			},
			{"./backend/disk", []string{"-test.run", "^TestDisks$/./^ext4$/^SELinux$"}, passed("TestDisks/disks/ext4/SELinux")},
			{"./backend/nfs", []string{"-test.run", "^TestConformance$/./^dir$/^SELinux$"}, passed("TestConformance/nfs/dir/SELinux/clone")},
			{"./backend/local", []string{"-test.run", "^TestConformance$/^directories-unlimited$/^dir$/^SELinux$"}, passed("TestConformance/directories-unlimited/dir/SELinux")},
			{"./backend/loop", []string{"-test.run", "^TestNFSConformance$/./^xfs$/^SELinux$"}, passed("TestNFSConformance/images-nfs/xfs/SELinux/clone")},
		},
	},
	{
		name: "selinux-mapped", disks: groupDisks, prelude: onEncrypted, selinux: true, long: true, limit: 15 * time.Minute,
		programs: []program{
			{"./backend/loop", []string{"-test.run", "^TestEncrypted$/./^ext4$/^SELinux$"}, passed("TestEncrypted/images-encrypted/ext4/SELinux/clone")},
			{"./backend/lvm", []string{"-test.run", "^TestGroup$/./^ext4$/^SELinux$"}, passed("TestGroup/group/ext4/SELinux")},
			{"./backend/lvm", []string{"-test.run", "^TestThin$/./^xfs$/^SELinux$"}, passed("TestThin/thin/xfs/SELinux/clone")},
			{"./backend/lvm", []string{"-test.run", "^TestEncryptedThin$/./^ext4$/^SELinux$"}, passed("TestEncryptedThin/thin-encrypted/ext4/SELinux")},
		},
	},
	{
		name: "privileges", disks: []string{"32G", "16G", "16G"}, prelude: onEncrypted, driver: true, long: true, limit: 60 * time.Minute,
		programs: []program{
			{"./internal/confine", []string{"-test.run", "^Test(Confined|Program32|DeathSignal)$"}, passed("TestConfined/privileged", "TestProgram32", "TestDeathSignal")},
			{"./test/privileges", []string{"-test.run", "^TestGuest$"}, passed("TestGuest/privileged", "TestGuest/all", "TestGuest/SYS_RESOURCE", "TestGuest/`/run/lock/lvm`")},
		},
	},
	{
		name: "quota", disks: []string{"8G"}, prelude: onDisk, limit: 4 * time.Minute,
		programs: []program{{"./linux/quota", []string{"-test.run", "^TestProjects"}, passed("TestProjects/(xfs|ext4)/enforcement_off")}},
	},
	{
		name: "local", disks: []string{"32G"}, prelude: onDisk, limit: 8 * time.Minute,
		programs: []program{{
			"./backend/local",
			[]string{"-test.run", "^TestProjectConformance$/./^dir$/^(LimitEnforced|QuotaIDs|OtherQuotaKind|LimitsOff|LimitedCopy)$"},
			onProjects("LimitEnforced/root", "LimitsOff/required"),
		}},
	},
	{
		name: "local-conformance", disks: []string{"32G"}, prelude: onDisk, long: true, limit: 30 * time.Minute,
		programs: []program{{
			"./backend/local",
			[]string{"-test.run", "^(TestProjectConformance|TestProjectTransfer|TestDamagedQuotas)$"},
			append(onProjects("LimitEnforced/root", "HostileSource"), passed("TestDamagedQuotas/.*", "TestProjectTransfer/(xfs|ext4)")...),
		}},
	},
	{
		name: "local-sanity", disks: []string{"32G"}, prelude: onDisk, long: true, limit: 10 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestProjectSanity$"}, passed("TestProjectSanity")}},
	},
	{
		name: "disks", disks: []string{"8G", "1100M", "1100M", "1100M"}, nvme: []string{"1100M", "1100M", "1100M"}, scsi: []string{"1100M", "1100M", "1100M"},
		prelude: onDisk, long: true, limit: 30 * time.Minute,
		programs: []program{
			{"./backend/disk", []string{"-test.run", "^TestRealDisks$"}, passed("TestRealDisks/disks-scsi/xfs/DiskPulled", "TestRealDisks/disks-nvme/ext4/DiskGrowth", "TestRealDisks/disks-virtio/btrfs")},
			{"./backend/disk", []string{"-test.run", "^TestDisks$/./^ext4$/^DiskGrowth$"}, passed("TestDisks/disks/ext4/DiskGrowth")},
			{"./linux/blockdev", []string{"-test.run", "^TestHeld$"}, passed("TestHeld/disk", "TestHeld/partition")},
		},
	},
	{
		name: "disk-encryption", disks: []string{"32G"}, scsi: []string{"1100M", "1100M", "1100M"}, prelude: onDisk + " && modprobe dm_crypt", long: true, limit: 60 * time.Minute,
		programs: []program{
			{"./backend/disk", []string{"-test.run", "^TestEncrypted$/^disks-encrypted$"}, passed("TestEncrypted/disks-encrypted/ext4/DiskGrowth", "TestEncrypted/disks-encrypted/block/DiskHeader", "TestEncrypted/disks-encrypted/xfs/EncryptedCopies")},
			{"./backend/disk", []string{"-test.run", "^TestEncrypted$/^disks-scsi-encrypted$/./^(DiskPulled|Reboot)$"}, passed("TestEncrypted/disks-scsi-encrypted/(ext4|block)/DiskPulled")},
		},
	},
	{
		name: "disks-sanity", disks: append([]string{"8G"}, sanityDisks...), nvme: sanityDisks, scsi: sanityDisks,
		prelude: onDisk, long: true, limit: 40 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestRealDisksSanity$"}, passed("TestRealDisksSanity")}},
	},
	{
		name: "lvm", disks: groupDisks, prelude: onGroups, limit: 15 * time.Minute,
		programs: []program{
			{
				"./backend/lvm",
				[]string{"-test.run", "^TestGroup$/./^xfs$/^(Reboot|OnlineGrowth|DeleteBesideActivation)$|^TestGroup$/./^block$/^HostileSignatures$"},
				passed("TestGroup/group/xfs/Reboot", "TestGroup/group/xfs/OnlineGrowth", "TestGroup/group/xfs/DeleteBesideActivation", "TestGroup/group/block/HostileSignatures"),
			},
			{"./linux/dm", []string{"-test.run", "^Test(Group|CreateInactive|Activate)$"}, passed("TestGroup", "TestCreateInactive", "TestActivate")},
		},
	},
	lvmConformance("ext4", "GroupMoved"),
	lvmConformance("xfs", "TakenOver"),
	lvmConformance("btrfs", "OnlineGrowth"),
	lvmConformance("block", "ForeignData"),
	{
		name: "thin", disks: groupDisks, prelude: onThinPools, limit: 15 * time.Minute,
		programs: []program{
			{
				"./backend/lvm",
				[]string{"-test.run", "^TestThin$/./^ext4$/^LiveSnapshot$|^TestThin$/./^block$/^ThinRoom$"},
				passed("TestThin/thin/ext4/LiveSnapshot/frozen", "TestThin/thin/block/ThinRoom"),
			},
			{"./linux/dm", []string{"-test.run", "^TestKilledCreate$"}, passed("TestKilledCreate/remove", "TestKilledCreate/copy")},
		},
	},
	{
		name: "thin-transfer", disks: groupDisks, prelude: onEncrypted, long: true, limit: 25 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestTransfer"}, passed("TestTransfer/none-ext4", "TestTransfer/luks2-block", "TestTransferInterrupted")}},
	},
	{
		name: "thin-transfer-crash", disks: []string{"8G", "8G", "8G"}, prelude: onThinPools, crashing: true, long: true, limit: 30 * time.Minute,
		programs: []program{{"./test/crash", []string{"-test.run", "^TestThinKilled(InTransfer|Sender)$"}, passed("TestThinKilledInTransfer/create-image/undone=true", "TestThinKilledInTransfer/receive-abandoned/undone=false", "TestThinKilledSender")}},
	},
	{
		name: "lvm-transfer", disks: groupDisks, prelude: onEncrypted, long: true, limit: 25 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestThickTransfer"}, passed("TestThickTransfer/none-ext4", "TestThickTransfer/luks2-block", "TestThickTransferInterrupted")}},
	},
	{
		name: "lvm-transfer-crash", disks: []string{"8G", "8G", "8G"}, prelude: onGroups, crashing: true, long: true, limit: 30 * time.Minute,
		programs: []program{{"./test/crash", []string{"-test.run", "^TestThickKilledInTransfer$"}, passed("TestThickKilledInTransfer/create-image/undone=true", "TestThickKilledInTransfer/receive-abandoned")}},
	},
	{
		name: "thin-conformance", disks: groupDisks, prelude: onThinPools, long: true, limit: 90 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestThin$"}, passed("TestThin/thin/ext4/SnapshotGroup", "TestThin/thin/block/ThinRoom")}},
	},
	{
		name: "lvm-sanity", disks: groupDisks, prelude: onGroups, long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestGroupSanity$"}, passed("TestGroupSanity")}},
	},
	{
		name: "lvm-crash", disks: []string{"8G", "8G", "8G", "8G", "8G"}, prelude: onGroups, crashing: true, long: true, limit: 60 * time.Minute,
		programs: []program{
			{"./test/crash", []string{"-test.run", "^TestGroup$", "-test.parallel", "4"}, passed("TestGroup/random", "TestGroup/rows/.*")},
			power("TestGroupPower", "group", "group-raw"),
		},
	},
	{
		name: "lvm-encryption", disks: groupDisks, prelude: onEncrypted, long: true, limit: 60 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestEncryptedGroup$"}, passed("TestEncryptedGroup/group-encrypted/ext4/Ciphertext", "TestEncryptedGroup/group-encrypted/block/HostileSignatures")}},
	},
	{
		name: "thin-encryption", disks: groupDisks, prelude: onEncrypted, long: true, limit: 75 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestEncryptedThin$"}, passed("TestEncryptedThin/thin-encrypted/ext4/LiveSnapshot/frozen", "TestEncryptedThin/thin-encrypted/ext4/SnapshotGroup")}},
	},
	{
		name: "lvm-encryption-crash", disks: []string{"8G", "8G", "8G", "8G", "8G"}, prelude: onEncrypted, crashing: true, long: true, limit: 75 * time.Minute,
		programs: []program{
			{"./test/crash", []string{"-test.run", "^TestEncryptedGroup$", "-test.parallel", "4"}, passed("TestEncryptedGroup/random", "TestEncryptedGroup/rows/.*")},
			{"./test/crash", []string{"-test.run", "^TestEncryptedThin$", "-test.parallel", "4"}, passed("TestEncryptedThin/random", "TestEncryptedThin/rows/.*")},
			power("TestEncryptedGroupPower", "gcrypt", "gcrypt-raw"),
			power("TestEncryptedThinPower", "tcrypt", "tcrypt-raw"),
		},
	},
	{
		name: "thin-sanity", disks: groupDisks, prelude: onThinPools, long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestThinSanity$"}, passed("TestThinSanity")}},
	},
	{
		name: "encryption-sanity", disks: []string{"16G"}, prelude: onDisk + " && modprobe dm_crypt", long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestEncryptedSanity$"}, passed("TestEncryptedSanity")}},
	},
	{
		name: "nfs-encryption-sanity", disks: []string{"2G", "32G"}, prelude: cryptNFSDisk, long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestEncryptedNFSSanity$"}, passed("TestEncryptedNFSSanity")}},
	},
	{
		name: "disk-encryption-sanity", disks: []string{"16G"}, prelude: onDisk + " && modprobe dm_crypt", long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestEncryptedDisksSanity$"}, passed("TestEncryptedDisksSanity")}},
	},
	{
		name: "lvm-encryption-sanity", disks: groupDisks, prelude: onEncrypted, long: true, limit: 60 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestEncryptedGroupSanity$"}, passed("TestEncryptedGroupSanity")}},
	},
	{
		name: "thin-crash", disks: []string{"8G", "8G", "8G", "8G", "8G"}, prelude: onThinPools, crashing: true, long: true, limit: 60 * time.Minute,
		programs: []program{
			{"./test/crash", []string{"-test.run", "^TestThin$", "-test.parallel", "4"}, passed("TestThin/random", "TestThin/rows/.*")},
			{"./test/crash", []string{"-test.run", "^TestTakeover$"}, passed("TestTakeover/create-image/group-existing/retry", "TestTakeover/create-image/thin-existing/undo")},
			power("TestThinPower", "thin", "thin-raw"),
		},
	},
	{
		name: "nfs", disks: []string{"2G", "2G"}, prelude: nfsDisk, long: true, limit: 10 * time.Minute,
		programs: []program{{"./internal/testenv/nfsd", nil, passed("TestServer/restart")}},
	},
	{
		name: "mount", disks: []string{"2G", "2G"}, prelude: nfsDisk, long: true, limit: 10 * time.Minute,
		programs: []program{{"./linux/mount", []string{"-test.run", "NFS|^TestForce"}, passed("TestForceUnmountNFS/nfsvers=4.2")}},
	},
	{
		name: "flexvolume", disks: []string{"2G", "2G"}, prelude: nfsDisk, driver: true, long: true, limit: 10 * time.Minute,
		programs: []program{{"./flexvolume", []string{"-test.run", "^TestNFS$"}, passed("TestNFS/outage")}},
	},
	{
		name: "clone", disks: []string{"4G", "4G"}, prelude: nfsDisk, long: true, limit: 20 * time.Minute,
		programs: []program{{"./linux/clone", []string{"-test.run", "^TestNFS$"}, passed("TestNFS/client_writes/Delta")}},
	},
	{
		name: "images", disks: []string{"2G", "32G"}, prelude: cryptNFSDisk, long: true, limit: 40 * time.Minute,
		programs: []program{{"./backend/loop", []string{"-test.run", "^TestNFS"}, passed(`TestNFSConformance/images-nfs/xfs/\w+Growth`)}},
	},
	{
		name: "nfs-encryption", disks: []string{"2G", "32G"}, prelude: cryptNFSDisk, long: true, limit: 60 * time.Minute,
		programs: []program{{"./backend/loop", []string{"-test.run", "^TestEncryptedNFS$"}, passed(`TestEncryptedNFS/images-nfs-encrypted/ext4/\w+Growth`, "TestEncryptedNFS/images-nfs-encrypted/block/EncryptedCopies")}},
	},
	{
		name: "directories", disks: []string{"2G", "32G"}, prelude: nfsDisk, long: true, limit: 30 * time.Minute,
		programs: []program{{"./backend/nfs", []string{"-test.run", "^TestConformance$"}, passed("TestConformance/nfs/dir/TwoNodes")}},
	},
	{
		name: "nfs-sanity", disks: []string{"2G", "32G"}, prelude: nfsDisk, long: true, limit: 40 * time.Minute,
		programs: []program{{"./test/sanity", []string{"-test.run", "^TestNFSSanity$"}, passed("TestNFSSanity")}},
	},
	{
		name: "volumes", disks: []string{"4G", "2G"}, prelude: nfsDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{
			{"./test/volumemanager", []string{"-test.run", "^Test(NFS.*|HugePages)$"}, passed("TestNFS", "TestNFSPlugins", "TestHugePages")},
			{"./volumemanager/plugins/nfsvolume", []string{"-test.run", "^TestNFS"}, passed("TestNFSRecycle")},
			{"./volumemanager/plugins/flexvolume", []string{"-test.run", "^TestNFS"}, passed("TestNFSSilent")},
			{"./volumemanager/plugins/emptydir", []string{"-test.run", "^TestProject"}, passed("TestProjectSizeLimit/ext4")},
		},
	},
	{
		name: "lvm-volumes", disks: []string{"16G", "16G", "16G"}, prelude: onEncrypted, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/volumemanager", []string{"-test.run", "^Test(Groups|EncryptedDisks)$"}, passed("TestGroups", "TestEncryptedDisks")}},
	},
	{
		name: "crash", disks: []string{"2G", "32G"}, prelude: cryptNFSDisk, crashing: true, long: true, limit: time.Hour,
		programs: []program{
			{"./test/crash", []string{"-test.run", "^TestNFS$", "-test.parallel", "4"}, passed("TestNFS/rows/.*")},
			{"./test/crash", []string{"-test.run", "^TestProject$", "-test.parallel", "4"}, passed("TestProject/xfs/.*/retry", "TestProject/ext4/.*/undo")},
		},
	},
	{
		name: "verify", disks: []string{"2G", "32G"}, prelude: nfsDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/verify", []string{"-test.run", "^TestNFS$", "-histories", "6"}, passed(`TestNFS/histories/\d+`)}},
	},
	{
		name: "lvm-verify", disks: []string{"8G", "16G"}, prelude: onEncrypted, driver: true, long: true, limit: 40 * time.Minute,
		programs: []program{{"./test/verify", []string{"-test.run", "^TestGroups$", "-histories", "4"}, passed("TestGroups/group", "TestGroups/thin")}},
	},
	{
		name: "lvm-encryption-verify", disks: []string{"8G", "16G"}, prelude: onEncrypted, driver: true, long: true, limit: 40 * time.Minute,
		programs: []program{{"./test/verify", []string{"-test.run", "^TestEncryptedGroups$", "-histories", "4"}, passed("TestEncryptedGroups/group-encrypted", "TestEncryptedGroups/thin-encrypted")}},
	},
	{
		name: "encryption-verify", disks: []string{"8G", "16G"}, prelude: cryptNFSDisk, driver: true, long: true, limit: 40 * time.Minute,
		programs: []program{{"./test/verify", []string{"-test.run", "^TestEncrypted$", "-histories", "3"}, passed("TestEncrypted/images-encrypted", "TestEncrypted/images-nfs-encrypted", "TestEncrypted/disks-encrypted")}},
	},
	{
		name: "nodes", disks: []string{"4G", "4G"}, prelude: nfsDisk, driver: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^Test(TwoNodes|SameIdentity.*)$"}, passed("TestTwoNodes/cut_off")}},
	},
	{
		name: "kerberos", disks: []string{"4G", "4G"}, prelude: nfsDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^TestKerberos$"}, passed("TestKerberos/krb5i", "TestKerberos/changed_key")}},
	},
	{
		name: "tls", kernel: "trixie-backports", disks: []string{"4G", "4G"}, prelude: nfsDisk, driver: true, tls: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^TestTLS$"}, passed("TestTLS/xprtsec=none", "TestTLS/xprtsec=mtls", "TestTLS/cut_off", "TestTLS/expired", "TestTLS/untrusted_node")}},
	},
	{
		name: "forwarded", disks: []string{"4G", "4G"}, prelude: nfsDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^TestForwardedSnapshot$"}, passed("TestForwardedSnapshot/xfs/frozen")}},
	},
	{
		name: "outage", disks: []string{"4G", "2G"}, prelude: cryptNFSDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^TestOutage$"}, passed("TestOutage/clear")}},
	},
	{
		name: "export-changes", disks: []string{"4G", "2G"}, prelude: cryptNFSDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^(TestOutageLock|TestExportChanges)$"}, passed("TestExportChanges/squashed")}},
	},
	{
		name: "tenants", disks: []string{"4G", "4G"}, prelude: nfsDisk, driver: true, long: true, limit: 20 * time.Minute,
		programs: []program{{"./test/nfs", []string{"-test.run", "^(TestHostile|TestBadInput|TestFull)$"}, passed("TestHostile/IDs")}},
	},
	{
		name: "health", mem: 4 << 10, disks: []string{"4G", "2G"}, scsi: []string{"512M", "512M"},
		prelude: onGroups + " && modprobe dm_crypt && export TRIVET_TEST_DISK=/dev/vdb", driver: true, api: true, long: true, limit: 30 * time.Minute,
		programs: []program{
			{"./test/nfs", []string{"-test.run", "^TestHealth$"}, passed("TestHealth/silent_server", "TestHealth/lost_lock", "TestHealth/full_pool", "TestHealth/pulled_disk", "TestHealth/pulled_disk_of_a_pool")},
			{"./cmd/trivet", []string{"-test.run", "^TestTracesOfEncrypted$"}, passed("TestTracesOfEncrypted")},
		},
	},
	{
		name: "limits-cluster", mem: 8 << 10, disks: []string{"16G"}, prelude: onDisk, cluster: true, long: true, limit: 90 * time.Minute,
		programs: []program{{"./test/e2e", []string{"-test.run", "^TestIOLimits$"}, append(passed("TestIOLimits"), regexp.MustCompile(`dd if=/dev/zero .* by the limit`))}},
	},
	{
		name: "kubernetes", mem: 8 << 10, disks: []string{"16G", "4G"}, prelude: nfsDisk, cluster: true, long: true, limit: time.Hour,
		programs: []program{{"./test/e2e", []string{"-test.run", "^TestNAS$"}, passed("TestNAS")}},
	},
}

// lvmConformance returns the guest of the conformance tests for one kind of logical volume, of which a row must run.
func lvmConformance(kind, row string) guest {
	return guest{
		name: "lvm-" + kind, disks: groupDisks, prelude: onGroups, long: true, limit: 45 * time.Minute,
		programs: []program{{"./backend/lvm", []string{"-test.run", "^TestGroup$/./^" + kind + "$"}, passed("TestGroup/group/" + kind + "/" + row)}},
	}
}

// power returns the program that runs a test of power failures, in which volumes of some kinds must be created and deleted.
func power(test string, kinds ...string) program {
	p := program{"./test/crash", []string{"-test.run", "^" + test + "$"}, nil}
	for _, kind := range kinds {
		p.want = append(p.want, passed(test+"/"+kind+"/CreateVolume/.*", test+"/"+kind+"/DeleteVolume/.*", test+"/"+kind)...)
	}
	return p
}

// passed returns expressions that match the lines with which tests and subtests report success.
func passed(names ...string) (lines []*regexp.Regexp) {
	for _, name := range names {
		lines = append(lines, regexp.MustCompile(`(?m)^ *--- PASS: `+name+` `))
	}
	return lines
}

// onProjects returns passed for subtests of TestProjectConformance on each filesystem with project
// quotas.
func onProjects(names ...string) (lines []*regexp.Regexp) {
	for _, name := range names {
		lines = append(lines, passed("TestProjectConformance/directories-xfs/dir/"+name, "TestProjectConformance/directories-ext4/dir/"+name)...)
	}
	return lines
}

var (
	skipped = regexp.MustCompile(`(?m)^ *--- SKIP: .*`)
	failed  = regexp.MustCompile(`(?m)^ *--- FAIL: (\S+).*`)
	// section matches the line before the messages of a test, message the first line of a message.
	section = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE) +(\S+)`)
	message = regexp.MustCompile(`^ {4,}\w+\.go:\d+: `)
)

// A log may end with the output of other tests, of which CI shows only the tail.
const (
	causesOfTest = 10
	allCauses    = 40
)

// causes returns the last messages of the failed tests in the output of go test -v, and panics.
func causes(out string) (lines []string) {
	failures := map[string]bool{}
	for _, match := range failed.FindAllStringSubmatch(out, -1) {
		failures[match[1]] = true
	}
	var order []string
	byTest := map[string][]string{}
	test, wanted := "", false
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\r\n")
		switch found := section.FindStringSubmatch(line); {
		case found != nil:
			test, wanted = found[1], false
		case message.MatchString(line):
			wanted = failures[test]
		case strings.HasPrefix(line, "panic: "):
			wanted = true
		case !strings.HasPrefix(line, "        "): // the further lines of a message are indented more
			wanted = false
		}
		if !wanted {
			continue
		}
		if byTest[test] == nil {
			order = append(order, test)
		}
		byTest[test] = append(byTest[test], test+": "+strings.TrimSpace(line))
	}
	for _, test := range order {
		lines = append(lines, byTest[test][max(0, len(byTest[test])-causesOfTest):]...)
	}
	return lines[:min(len(lines), allCauses)]
}

// TestCauses: only the messages of failed tests are causes, even if other tests log in between and afterwards.
func TestCauses(t *testing.T) {
	const out = "=== RUN   TestGood\r\n    a_test.go:1: fine\n=== RUN   TestBad\nI1123 a line of klog\n    a_test.go:2: got 1\n        want 2\nmore of klog\n" +
		"=== RUN   TestBad/sub\n=== PAUSE TestBad/sub\n=== RUN   TestOther\n=== CONT  TestBad/sub\n    a_test.go:3: sub failed\n=== NAME  TestOther\n    a_test.go:4: fine too\n" +
		"--- PASS: TestOther (0.00s)\n--- FAIL: TestBad (0.10s)\n    --- FAIL: TestBad/sub (0.00s)\n--- PASS: TestGood (0.00s)\n"
	want := []string{"TestBad: a_test.go:2: got 1", "TestBad: want 2", "TestBad/sub: a_test.go:3: sub failed"}
	if got := causes(out); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := causes("=== RUN   TestSlow\npanic: test timed out after 1m\n"); !slices.Equal(got, []string{"TestSlow: panic: test timed out after 1m"}) {
		t.Errorf("got %q, want the panic", got)
	}
	many := "=== RUN   TestBad\n" + strings.Repeat("    a_test.go:1: same\n", 100) + "    a_test.go:2: last\n--- FAIL: TestBad (0.00s)\n"
	if got := causes(many); len(got) != causesOfTest || got[causesOfTest-1] != "TestBad: a_test.go:2: last" {
		t.Errorf("got %q, want the last %d messages", got, causesOfTest)
	}
}

// TestVM runs the programs of each guest in a virtual machine. Without -long, it runs only the short guests.
func TestVM(t *testing.T) {
	testenv.RequireRoot(t)
	dependOnSources(t)
	ctx := interruptible(t)
	for _, g := range guests {
		if g.long && !*long {
			continue
		}
		t.Run(g.name, func(t *testing.T) {
			if *long { // otherwise the other packages of make test already use all cores
				t.Parallel()
			}
			ctx, cancel := context.WithTimeout(ctx, g.limit+hostReserve)
			defer cancel()
			options := []string{"--timeout", seconds(g.limit)}
			if g.mem != 0 {
				options = append(options, "--mem", strconv.Itoa(g.mem))
			}
			for _, size := range g.disks {
				options = append(options, "--disk", size)
			}
			for _, size := range g.nvme {
				options = append(options, "--nvme", size)
			}
			for _, size := range g.scsi {
				options = append(options, "--scsi", size)
			}
			if g.selinux {
				options = append(options, "--append", "security=selinux", "--append", "enforcing=0") // until the policy is loaded
			}
			script := g.script(ctx, t)
			vm := exec.CommandContext(ctx, "./vm.sh", append(options, "--", "bash", "-c", script)...)
			vm.Env = append(os.Environ(), "VM_KERNEL="+cmp.Or(os.Getenv("VM_KERNEL"), g.kernel))
			check(t, g, run(ctx, t, vm))
		})
	}
}

// script builds the programs and returns the bash script that runs them in the guest.
func (g guest) script(ctx context.Context, t *testing.T) string {
	t.Helper()
	lines := []string{g.prelude + " || exit", "failed=0"}
	if g.driver {
		lines = append(lines, "export TRIVET_TEST_DRIVER="+quote(buildDriver(ctx, t)))
	}
	if g.crashing {
		lines = append(lines, "export TRIVET_TEST_CRASHING="+quote(buildDriver(ctx, t, "-tags", "crashpoints")))
	}
	if g.tls {
		lines = append(lines, "export TRIVET_TEST_TLSHD="+quote(lastLine(run(ctx, t, exec.CommandContext(ctx, "./tlshd.sh")))))
	}
	if g.api {
		run(ctx, t, exec.CommandContext(ctx, "../e2e/cluster/build.sh"))
		programs := run(ctx, t, exec.CommandContext(ctx, "bash", "-c", `. ../e2e/cluster/env.sh && echo "$bin"`))
		lines = append(lines, "export TRIVET_TEST_CLUSTER="+quote(strings.TrimSpace(programs)))
	}
	var enter []string
	if g.cluster {
		run(ctx, t, exec.CommandContext(ctx, "../e2e/run", "build", "vm"))
		lines = append(lines, ". ./cluster.sh")
		in, err := filepath.Abs("../e2e/cluster/in.sh")
		if err != nil {
			t.Fatal(err)
		}
		// Package nfsd needs mounts that propagate.
		enter = []string{"IN=0", quote(in), "unshare", "--mount", "--propagation", "shared"}
	}
	for i, p := range g.allPrograms() {
		if g.selinux && i == len(g.beforePolicy) {
			policy := lastLine(run(ctx, t, exec.CommandContext(ctx, "./selinux.sh")))
			lines = append(lines, "mount -t selinuxfs none /sys/fs/selinux && dd if="+quote(policy)+" of=/sys/fs/selinux/load bs=64M iflag=fullblock status=none && echo 1 >/sys/fs/selinux/enforce || exit")
		}
		folder, err := filepath.Abs(filepath.Join(module, p.pkg))
		if err != nil {
			t.Fatal(err)
		}
		left := fmt.Sprintf("-test.timeout=$((%s - SECONDS))s", seconds(g.limit-dumpReserve))
		words := append(slices.Clone(enter), quote(build(ctx, t, p.pkg)), "-test.v", left)
		for _, a := range p.args {
			words = append(words, quote(a))
		}
		lines = append(lines, "echo "+quote("=== "+p.pkg), "cd "+quote(folder), strings.Join(words, " ")+" || failed=1")
	}
	return strings.Join(append(lines, "exit $failed"), "\n")
}

// lastLine returns the last line of the output of a program, which may begin with messages of apt.
func lastLine(out string) string {
	out = strings.TrimSpace(out)
	return out[strings.LastIndexByte(out, '\n')+1:]
}

// seconds formats a duration for vm.sh and bash.
func seconds(d time.Duration) string { return strconv.Itoa(int(d.Seconds())) }

// quote quotes a text as one word of the shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// check fails the test if a wanted line is missing in the output of a guest, or a test was skipped.
func check(t *testing.T, g guest, out string) {
	t.Helper()
	t.Log(out)
	for _, p := range g.allPrograms() {
		for _, want := range p.want {
			if !want.MatchString(out) {
				t.Errorf("%s: no line of the output matches %s, so the test did not run or did not pass", p.pkg, want)
			}
		}
	}
	for _, line := range skipped.FindAllString(out, -1) {
		t.Errorf("a test was skipped: %s", strings.TrimSpace(line))
	}
}

// dependOnSources lists every directory of the module, so that go test does not
// use a cached result of this package after a source has changed.
func dependOnSources(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(module, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && path != module && strings.HasPrefix(e.Name(), ".") {
			return fs.SkipDir
		}
		if errors.Is(err, fs.ErrNotExist) { // removed during the walk
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// interruptible returns a context that ends with the test or at a signal. A signal
// does not end the test process, so that vm.sh ends first and cleans up.
func interruptible(t *testing.T) context.Context {
	t.Helper()
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	t.Cleanup(stop)
	return ctx
}

// build builds a static test binary of a package. It has no race detector, because
// the guest is too slow for one.
func build(ctx context.Context, t *testing.T, pkg string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), filepath.Base(pkg)+".test")
	compile(ctx, t, "test", "-c", "-trimpath", "-tags", "e2e,vm", "-o", binary, pkg)
	return binary
}

// buildDriver builds a static driver.
func buildDriver(ctx context.Context, t *testing.T, flags ...string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "trivet")
	compile(ctx, t, slices.Concat([]string{"build", "-trimpath", "-o", binary}, flags, []string{"./cmd/trivet"})...)
	return binary
}

// compile runs the go command without cgo, so that it builds a static binary.
func compile(ctx context.Context, t *testing.T, args ...string) {
	t.Helper()
	c := exec.CommandContext(ctx, "go", args...)
	c.Dir = module
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	run(ctx, t, c)
}

// run runs a command to its end and returns its output. It fails the test if
// the command fails or takes too long.
func run(ctx context.Context, t *testing.T, c *exec.Cmd) string {
	t.Helper()
	// The kernel sends Pdeathsig when the thread that started the process ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.WaitDelay = 10 * time.Second
	if c.Env == nil {
		c.Env = os.Environ()
	}
	c.Env = append(c.Env, "TMPDIR="+t.TempDir())
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		t.Log(&out)
		for _, line := range failed.FindAllString(out.String(), -1) {
			t.Error(strings.TrimSpace(line))
		}
		for _, line := range causes(out.String()) {
			t.Error(line)
		}
		t.Fatalf("%s: %v", filepath.Base(c.Path), errors.Join(context.Cause(ctx), err))
	}
	return out.String()
}
