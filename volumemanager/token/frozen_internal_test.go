package token

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenNames: the file of the key, and the paths at which other programs find the public key, do not change.
func TestFrozenNames(t *testing.T) {
	frozen.List(t, "names", []string{keyFile, DiscoveryPath, JWKSPath})
}
