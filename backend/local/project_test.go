//go:build vm

package local_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestProjectConformance runs the conformance tests on filesystems with project quotas.
func TestProjectConformance(t *testing.T) { targets.Run(t, "directories-xfs", "directories-ext4") }
