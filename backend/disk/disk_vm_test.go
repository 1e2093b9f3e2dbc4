//go:build vm

package disk_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestRealDisks runs the conformance tests on the NVMe, SCSI and virtio disks of the virtual machine.
func TestRealDisks(t *testing.T) { targets.Run(t, "disks-nvme", "disks-scsi", "disks-virtio") }
