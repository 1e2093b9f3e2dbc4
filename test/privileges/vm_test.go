//go:build vm

package privileges

import "testing"

// TestGuest measures kinds of volume that need the kernel of a virtual machine, and the growth of an ext4 in use.
func TestGuest(t *testing.T) {
	measureEach(t,
		newSubject(t, "images", "images-xfs", "ext4"),
		newSubject(t, "encrypted images", "images-encrypted", "xfs"),
		newSubject(t, "directories with project quotas", "directories-xfs", "dir"),
		newSubject(t, "logical volumes", "group", "xfs"),
		newSubject(t, "thin logical volumes", "thin", "xfs"),
	)
}

// TestNFS measures directories and images on NFS exports.
func TestNFS(t *testing.T) {
	measureEach(t, newSubject(t, "NFS directories", "nfs", "dir"), newSubject(t, "images on NFS", "images-nfs", "ext4"))
}
