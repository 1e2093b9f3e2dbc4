//go:build vm

package disk_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestRealDisks is TestDisks for disks of other drivers, which the virtual machine has.
func TestRealDisks(t *testing.T) { targets.Run(t, "disks-nvme", "disks-scsi", "disks-virtio") }
