//go:build vm

package sanity

import (
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// projectFilesystems are grounds that the kernel of the virtual machine has.
var projectFilesystems = map[string]func(testing.TB, string) string{
	"xfs":  func(tb testing.TB, size string) string { return testenv.ProjectQuotas(tb, "xfs", size) },
	"ext4": func(tb testing.TB, size string) string { return testenv.ProjectQuotas(tb, "ext4", size) },
}

// TestProjectSanity is TestSanity for directories that project quotas limit.
func TestProjectSanity(t *testing.T) {
	selected := chosen(t, []kind{localDirectory("xfs"), localDirectory("ext4")})
	runKinds(t, selected, directories(t, selected, projectFilesystems))
}
