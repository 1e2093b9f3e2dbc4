//go:build vm

package disk_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestRealDisks runs the conformance tests on the NVMe, SCSI and virtio disks of the virtual machine.
func TestRealDisks(t *testing.T) { targets.Run(t, "disks-nvme", "disks-scsi", "disks-virtio") }

// TestEncrypted runs the conformance tests for encrypted volumes.
func TestEncrypted(t *testing.T) { targets.Run(t, "disks-encrypted", "disks-scsi-encrypted") }

// TestIOLimits: the I/O of pods is limited on a disk, of which a volume is a partition.
func TestIOLimits(t *testing.T) { backendtest.IOLimitsEnforced(t, targets.ByName(t, "disks")) }
