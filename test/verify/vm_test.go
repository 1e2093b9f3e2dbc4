//go:build vm

package verify

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestGroups runs histories in volume groups and thin pools.
func TestGroups(t *testing.T) { testTargets(t, "group", "thin") }

// TestEncryptedGroups runs histories of encrypted logical volumes.
func TestEncryptedGroups(t *testing.T) { testTargets(t, "group-encrypted", "thin-encrypted") }

// TestEncrypted runs histories of encrypted images and disks.
func TestEncrypted(t *testing.T) {
	testTargets(t, "images-encrypted", "images-nfs-encrypted", "disks-encrypted")
}

// testTargets runs histories of the kinds of targets, which end the driver and start it again.
func testTargets(t *testing.T, names ...string) {
	binary := program(t)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			target := targets.ByName(t, name)
			if target.Prepare != nil {
				target.Prepare(t, &target)
			}
			medium := target.Medium(t, backendtest.Room{Total: "64G", Volumes: count(t), Each: 320 << 20})
			g := &testDriver{medium: medium, shares: true, restarts: true, kinds: target.Volumes()}
			g.serve(t, binary)
			g.run(t)
		})
	}
}
