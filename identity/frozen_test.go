package identity_test

import (
	"maps"
	"testing"

	"github.com/trivet-csi/trivet/identity"
)

// TestFrozenManifest: a controller and nodes of different versions understand each other's pools.
func TestFrozenManifest(t *testing.T) {
	pools, expected := map[string]string{"ssd": "0a1b2c3d", "closed": ""}, map[string]string{"closed": "4e5f6071"}
	kinds := map[string]string{"ssd": "directory", "closed": "disks"}
	manifest := map[string]string{"pool.ssd": "0a1b2c3d", "pool.closed": "", "expected.closed": "4e5f6071", "kind.ssd": "directory", "kind.closed": "disks"}
	if got := identity.Manifest(pools, expected, kinds); !maps.Equal(got, manifest) {
		t.Errorf("got manifest %v, want %v", got, manifest)
	}
	if gotPools, gotExpected := identity.Pools(manifest); !maps.Equal(gotPools, pools) || !maps.Equal(gotExpected, expected) {
		t.Errorf("got pools %v, expected %v; want %v, %v", gotPools, gotExpected, pools, expected)
	}
	if got := identity.Kinds(manifest); !maps.Equal(got, kinds) {
		t.Errorf("got kinds %v, want %v", got, kinds)
	}
}
