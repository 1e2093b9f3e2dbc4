//go:build vm

package privileges

import (
	"os"
	"testing"
)

// test/vm builds the program, because the virtual machine is too slow.
func init() { program = os.Getenv("TRIVET_TEST_DRIVER") }

// TestGuest measures the kinds of volume that need the kernel of a virtual machine.
func TestGuest(t *testing.T) {
	measureEach(t,
		newSubject(t, "logical volumes", "group", "xfs"),
		newSubject(t, "thin volumes", "thin", "ext4"),
		newSubject(t, "encrypted images", "images-encrypted", "ext4"),
		newSubject(t, "directories with project quotas", "directories-xfs", "dir"),
		newSubject(t, "directories on NFS", "nfs", "dir"),
		newSubject(t, "images on NFS", "images-nfs", "xfs"),
	)
}
