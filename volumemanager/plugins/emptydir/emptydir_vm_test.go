//go:build vm

package emptydir_test

import (
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// TestProjectSizeLimit: xfs and ext4 with project quotas limit the size of a volume.
func TestProjectSizeLimit(t *testing.T) {
	for _, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			m := newMachine(t, testenv.ProjectQuotas(t, fsType, "400M"))
			testSizeLimit(t, m)
			m.down(t, "data")
			m.up(t, emptyDir("", 0), plugins.MounterArgs{})
		})
	}
}
