//go:build vm

package local_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestProjectConformance is TestConformance where project quotas limit directories.
func TestProjectConformance(t *testing.T) { targets.Run(t, "directories-xfs", "directories-ext4") }
