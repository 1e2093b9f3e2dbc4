//go:build vm

package doctor

import (
	"testing"

	"github.com/trivet-csi/trivet/linux/mount"
)

// TestSELinuxWithoutPolicy: SELinux counts as not enabled if the kernel has it, but no policy is loaded.
func TestSELinuxWithoutPolicy(t *testing.T) {
	expect(t, "SELinux", judgeSELinux(mount.ProbeContext(podContext)), OK, "not enabled")
}
