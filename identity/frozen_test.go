package identity_test

import (
	"maps"
	"testing"

	"github.com/trivet-csi/trivet/identity"
)

// TestFrozenManifest: a controller and nodes of different versions understand each other's pools.
func TestFrozenManifest(t *testing.T) {
	pools, manifest := map[string]string{"ssd": "0a1b2c3d", "closed": ""}, map[string]string{"pool.ssd": "0a1b2c3d", "pool.closed": ""}
	if got := identity.Manifest(pools); !maps.Equal(got, manifest) {
		t.Errorf("got manifest %v, want %v", got, manifest)
	}
	if got := identity.Pools(manifest); !maps.Equal(got, pools) {
		t.Errorf("got pools %v, want %v", got, pools)
	}
}
