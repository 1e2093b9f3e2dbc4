package driver

import (
	"testing"

	"github.com/trivet-csi/trivet/pool"
)

// TestWithoutNFS: in Kubernetes exports are mounted only if the configuration says so.
func TestWithoutNFS(t *testing.T) {
	nas := []pool.Config{{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/e"}}}
	local := []pool.Config{{Name: "default", Directory: pool.Directory{Path: "/p"}}}
	for _, tc := range []struct {
		name    string
		c       Config
		refused bool
	}{
		{"no Kubernetes", Config{Pools: local}, false},
		{"off", Config{Pools: local, Kubernetes: &Kubernetes{}}, true},
		{"on", Config{Pools: local, Kubernetes: &Kubernetes{NFS: true}}, false},
		{"a pool", Config{Pools: nas, Kubernetes: &Kubernetes{}}, false},
	} {
		if err := (Options{Config: tc.c}).withoutNFS(); (err != nil) != tc.refused {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}
