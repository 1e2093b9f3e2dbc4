//go:build vm

package crash

import "testing"

// TestEncrypted is TestGroup for encrypted images.
func TestEncrypted(t *testing.T) {
	testRows(t, encryptedRows, encryptedExt4[0], encryptedRaw[0], encryptedExt4[0])
}

// TestEncryptedDisk is TestGroup for encrypted disks. A pool has only one disk.
func TestEncryptedDisk(t *testing.T) { testRows(t, diskEncryptedRows, diskCryptXFS[0]) }
