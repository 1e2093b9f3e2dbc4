//go:build vm

package sanity

import (
	"testing"
)

// buses have the disks of the virtual machine, by what matches them.
var buses = map[string]string{"nvme": "/dev/nvme?n1", "scsi": "/dev/sd?", "virtio": "/dev/vd[b-z]"}

// TestRealDisksSanity is TestSanity for disks of other drivers than loop's.
func TestRealDisksSanity(t *testing.T) {
	match := map[string][]string{}
	var all []kind
	for bus, glob := range buses {
		ground := wholeDisks + "-" + bus
		match[ground] = []string{glob}
		for _, k := range []kind{filesystem("ext4"), filesystem("xfs"), filesystem("btrfs"), {name: "block", accessType: "block"}} {
			all = append(all, k.onDisk(ground))
		}
	}
	selected := chosen(t, all)
	suites := disks(t, match)
	runKinds(t, selected, suites)
}
