package privileges

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/confine"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/frozen"
)

// need is something that the driver of a node needs.
type need struct {
	// name is that of a capability, or of a part of the container.
	name string
	// without contains the shell commands that take away a part of the container.
	without string
	// use is what the driver uses it for.
	use string
	// fails contains the first call that fails without it, by the name of the subject.
	fails map[string]string
}

// capabilities are those of confine.Needed, in the same order. Those without failing calls are not measured.
var capabilities = []need{
	{
		name: "SYS_ADMIN", use: "mounts, partitions, quotas, and attributes `trusted.*`",
		fails: map[string]string{
			"images":                          "NodeStageVolume",
			"raw images":                      "NodePublishVolume",
			"directories":                     "NodeStageVolume",
			"directories on btrfs":            "CreateVolume",
			"whole disks":                     "CreateVolume",
			"logical volumes":                 "CreateVolume",
			"thin volumes":                    "CreateVolume",
			"encrypted images":                "NodeStageVolume",
			"directories with project quotas": "CreateVolume",
			"directories on NFS":              "CreateVolume",
			"images on NFS":                   "CreateVolume",
		},
	},
	{
		name: "CHOWN", use: "`uid` and `gid` of a class, and the owners of copied files",
		fails: map[string]string{
			"directories":                     "CreateVolume",
			"directories on btrfs":            "CreateVolume",
			"directories with project quotas": "CreateVolume",
		},
	},
	{
		name: "DAC_OVERRIDE", use: "files of other users in copies",
		fails: map[string]string{
			"directories":                     "CreateSnapshot",
			"directories with project quotas": "access of the pod",
		},
	},
	{
		name: "DAC_READ_SEARCH", use: "subvolumes of btrfs, which are opened by number",
		fails: map[string]string{
			"directories on btrfs": "ControllerExpandVolume",
		},
	},
	{
		name: "FOWNER", use: "`mode` of a class, and the modes of copied files",
		fails: map[string]string{
			"directories":                     "CreateVolume",
			"directories on btrfs":            "CreateVolume",
			"directories with project quotas": "CreateVolume",
			"directories on NFS":              "CreateSnapshot",
		},
	},
	{
		name: "FSETID", use: "set-group-ID bits of `mode` of a class, and of the modes of copied files",
		fails: map[string]string{
			"directories":                     "access of the pod",
			"directories on btrfs":            "access of the pod",
			"directories with project quotas": "access of the pod",
		},
	},
	{
		name: "MKNOD", use: "device nodes of disks and of the device mapper, and device nodes in copied directories",
		fails: map[string]string{
			"directories":                     "CreateSnapshot",
			"whole disks":                     "NodeStageVolume",
			"logical volumes":                 "CreateVolume",
			"thin volumes":                    "CreateVolume",
			"encrypted images":                "NodeStageVolume",
			"directories with project quotas": "CreateSnapshot",
			"directories on NFS":              "CreateSnapshot",
		},
	},
	{
		name: "SETFCAP", use: "file capabilities in copied directories",
		fails: map[string]string{
			"directories":                     "CreateSnapshot",
			"directories with project quotas": "CreateSnapshot",
		},
	},
	{
		name: "SYS_RESOURCE", use: "growth of an ext4 that is in use",
		fails: map[string]string{
			"encrypted images": "NodeExpandVolume",
			"thin volumes":     "NodeExpandVolume",
		},
	},
	{
		name: "LINUX_IMMUTABLE", use: "images of snapshots, which are immutable, and immutable files in copied directories",
		fails: map[string]string{
			"images":                          "CreateSnapshot",
			"raw images":                      "CreateSnapshot",
			"directories":                     "CreateSnapshot",
			"encrypted images":                "CreateSnapshot",
			"directories with project quotas": "CreateSnapshot",
		},
	},
	{name: "SETUID", use: "exports that map root to another user: the driver tests whether they map other users, too"},
	{name: "SETGID", use: "the same for the groups"},
	{name: "IPC_LOCK", use: "`cryptsetup` and `lvm` keep passphrases and themselves in memory, out of the swap space"},
	{name: "SYS_NICE", use: "`cryptsetup` and `lvm` run with a higher priority while a device is suspended"},
	{name: "NET_BIND_SERVICE", use: "ports below 1024 for metrics and for calls of the controller, if they are configured"},
}

// hide returns commands that cover directories, as if the container did not have them.
func hide(dirs string) string {
	return "for dir in " + dirs + "; do mount --make-rprivate $dir; mount -t tmpfs -o ro none $dir; done"
}

// parts are the parts of a container that the driver of a node needs.
var parts = []need{
	{
		name: "`kubeletDir`", without: hide("$KUBELET"),
		use: "the staging and target paths of the kubelet",
		fails: map[string]string{
			"images":                          "NodeStageVolume",
			"raw images":                      "NodePublishVolume",
			"directories":                     "NodeStageVolume",
			"directories on btrfs":            "NodeStageVolume",
			"whole disks":                     "NodeStageVolume",
			"logical volumes":                 "NodeStageVolume",
			"thin volumes":                    "NodeStageVolume",
			"encrypted images":                "NodeStageVolume",
			"directories with project quotas": "NodeStageVolume",
			"directories on NFS":              "NodeStageVolume",
			"images on NFS":                   "NodeStageVolume",
		},
	},
	{
		name: "propagation `Bidirectional` of `kubeletDir`", without: "mount --make-rslave $KUBELET",
		use: "makes the driver's mounts visible to the kubelet and pods",
		fails: map[string]string{
			"images":                          "access of the pod",
			"raw images":                      "access of the pod",
			"directories":                     "access of the pod",
			"directories on btrfs":            "access of the pod",
			"whole disks":                     "access of the pod",
			"logical volumes":                 "access of the pod",
			"thin volumes":                    "access of the pod",
			"encrypted images":                "access of the pod",
			"directories with project quotas": "access of the pod",
			"directories on NFS":              "access of the pod",
			"images on NFS":                   "access of the pod",
		},
	},
	{
		name: "`stateDir`", without: hide("$STATE"),
		use: "UUIDs of pools, certificates, records of disks",
		fails: map[string]string{
			"images":                          "start of the driver",
			"raw images":                      "start of the driver",
			"directories":                     "start of the driver",
			"directories on btrfs":            "start of the driver",
			"whole disks":                     "start of the driver",
			"logical volumes":                 "start of the driver",
			"thin volumes":                    "start of the driver",
			"encrypted images":                "start of the driver",
			"directories with project quotas": "start of the driver",
			"directories on NFS":              "start of the driver",
			"images on NFS":                   "start of the driver",
		},
	},
	{
		name: "the directories of pools", without: hide("$POOLS"),
		use: "volumes and their records",
		fails: map[string]string{
			"images":                          "CreateVolume",
			"raw images":                      "CreateVolume",
			"directories":                     "CreateVolume",
			"directories on btrfs":            "CreateVolume",
			"encrypted images":                "CreateVolume",
			"directories with project quotas": "CreateVolume",
		},
	},
	{
		name: "`/dev`", without: `mount -t tmpfs -o mode=755 none /dev
			for node in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9"; do set -- $node "$@"; mknod -m 666 /dev/$1 c $2 $3; shift 3; done`,
		use: "loop devices, disks, logical volumes",
		fails: map[string]string{
			"images":           "NodeStageVolume",
			"raw images":       "NodeStageVolume",
			"whole disks":      "CreateVolume",
			"logical volumes":  "CreateVolume",
			"thin volumes":     "CreateVolume",
			"encrypted images": "NodeStageVolume",
			"images on NFS":    "NodeStageVolume",
		},
	},
	{
		name: "`/sys/fs/cgroup`", without: "umount /sys/fs/cgroup",
		use: "the limits of the I/O of pods",
		fails: map[string]string{
			"images":           "CreateVolume",
			"whole disks":      "CreateVolume",
			"logical volumes":  "CreateVolume",
			"thin volumes":     "CreateVolume",
			"encrypted images": "CreateVolume",
		},
	},
	{
		name: "`" + lvmLocks + "`", without: "umount " + lvmLocks,
		use: "no command of the node changes a volume group at the same time",
		fails: map[string]string{
			"logical volumes": "CreateVolume",
			"thin volumes":    "CreateVolume",
		},
	},
}

// onStart is the name of the call if the driver does not start.
const onStart = "start of the driver"

// measure runs the driver with privileges, and returns the first call of each subject that fails, by the name of the
// subject.
func (n *node) measure(t *testing.T, p privileges) map[string]string {
	t.Helper()
	failed := map[string]string{}
	d, err := n.start(t, &p)
	if err != nil {
		t.Log(err)
		for _, s := range n.subjects {
			failed[s.name] = onStart
		}
		return failed
	}
	var lives []*life
	for _, s := range n.subjects {
		l := n.newLife(t, s, d)
		if call, err := l.run(); call != "" {
			t.Logf("%s: %s: %v", s.name, call, err)
			failed[s.name] = call
			lives = append(lives, l)
		}
	}
	d.stop()
	n.remove(t, lives)
	return failed
}

// remove removes what lives have left, with a driver that is not in a container.
func (n *node) remove(t *testing.T, lives []*life) {
	t.Helper()
	if len(lives) == 0 {
		return
	}
	d, err := n.start(t, nil)
	must(t, err)
	defer d.stop()
	for _, l := range lives {
		if err := l.remove(d); err != nil {
			t.Errorf("removing the volumes of %s: %v", l.s.name, err)
		}
	}
}

// measureEach checks that no call fails if the driver confines itself, or has exactly what the subjects need by the tables, and
// that the calls of the tables fail without each of these needs.
func measureEach(t *testing.T, subjects ...*subject) {
	n := newNode(t, subjects...)
	t.Cleanup(func() {
		if t.Failed() {
			log := n.logSince(0)
			t.Logf("the end of the drivers' log:\n%s", log[max(0, len(log)-8192):])
		}
	})
	var all []string
	for _, c := range n.needed(capabilities) {
		all = append(all, c.name)
	}
	t.Run("privileged", func(t *testing.T) {
		if n.has(func(s *subject) bool { return s.kind.Has(backendtest.Thin) }) {
			testenv.Run(t, "rmmod", "dm_thin_pool", "dm_crypt") // no confined program can load them, only the kernel
		}
		if failed := n.measure(t, privileges{}); len(failed) > 0 {
			t.Errorf("got failed calls %v in a privileged container, want none", failed)
		}
	})
	t.Run("all", func(t *testing.T) {
		if failed := n.measure(t, privileges{capabilities: all}); len(failed) > 0 {
			t.Errorf("got failed calls %v with all needs of the tables, want none", failed)
		}
	})
	for _, c := range n.needed(capabilities) {
		others := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == c.name })
		t.Run(c.name, func(t *testing.T) { n.compare(t, c, privileges{capabilities: others}) })
	}
	for _, part := range n.needed(parts) {
		t.Run(part.name, func(t *testing.T) { n.compare(t, part, privileges{capabilities: all, without: part.without}) })
	}
}

// needed returns the needs of the subjects.
func (n *node) needed(all []need) (found []need) {
	for _, one := range all {
		if len(n.failures(one)) > 0 {
			found = append(found, one)
		}
	}
	return found
}

// failures returns the first call of each subject that fails without a need, as in the table.
func (n *node) failures(of need) map[string]string {
	calls := map[string]string{}
	for _, s := range n.subjects {
		if call := of.fails[s.name]; call != "" {
			calls[s.name] = call
		}
	}
	return calls
}

// compare compares the calls that fail with those of the table.
func (n *node) compare(t *testing.T, c need, p privileges) {
	t.Helper()
	if got, want := n.measure(t, p), n.failures(c); !maps.Equal(got, want) {
		t.Errorf("got failed calls %q without %s, want %q as in the table", got, c.name, want)
	}
}

// TestNode measures the kinds of volume that need no virtual machine. Only the growth of an ext4 in use also needs
// SYS_RESOURCE, which tests may lack.
func TestNode(t *testing.T) {
	measureEach(t,
		newSubject(t, "images", "images-xfs", "xfs"),
		newSubject(t, "raw images", "images-ext4", "block"),
		newSubject(t, "directories", "directories-unlimited", "dir"),
		newSubject(t, "directories on btrfs", "directories-btrfs", "dir"),
		newSubject(t, "whole disks", "disks", "xfs"),
	)
}

// TestNeeded: the table contains the capabilities that the driver keeps.
func TestNeeded(t *testing.T) {
	var kept, listed []string
	for _, c := range confine.Needed {
		kept = append(kept, c.Name)
	}
	for _, c := range capabilities {
		listed = append(listed, c.name)
	}
	if !slices.Equal(kept, listed) {
		t.Errorf("the driver keeps %q, and the table contains %q: make them equal", kept, listed)
	}
}

// TestTable checks the tables in docs/operations/security.md. With -update, the test writes them.
func TestTable(t *testing.T) {
	rows := "| capability | for | without it, the first call that fails |\n|---|---|---|\n" + rowsOf(capabilities, "`") +
		"\n| part of the container | for | without it, the first call that fails |\n|---|---|---|\n" + rowsOf(parts, "")
	frozen.Generated(t, "../../docs/operations/security.md", "make docs-privileges", rows)
}

// rowsOf returns the rows of a table. quote surrounds the names.
func rowsOf(needs []need, quote string) string {
	var rows strings.Builder
	for _, n := range needs {
		kinds := map[string][]string{} // by call
		for _, name := range slices.Sorted(maps.Keys(n.fails)) {
			kinds[n.fails[name]] = append(kinds[n.fails[name]], name)
		}
		var cell []string
		for _, call := range slices.Sorted(maps.Keys(kinds)) {
			cell = append(cell, call+": "+strings.Join(kinds[call], ", "))
		}
		if len(cell) == 0 {
			cell = []string{"not measured"}
		}
		fmt.Fprintf(&rows, "| %s%s%s | %s | %s |\n", quote, n.name, quote, n.use, strings.Join(cell, "; "))
	}
	return rows.String()
}
