package controllerserver_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// FuzzPoolToken: what parses gives itself back; all else is stale.
func FuzzPoolToken(f *testing.F) {
	for _, s := range []string{"", "pool ", "pool loop:default.0a1b2c3d:", "pool nfs:nas:pvc-1", "pool nfs:nas:s.001", "loop:default:x", "pool loop:a::", "pool nfs:=nas=/t:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		after, err := controllerserver.ParsePoolToken(token)
		if err != nil {
			if !errors.Is(err, volume.ErrStaleToken) {
				t.Errorf("%q: %v is not ErrStaleToken", token, err)
			}
			return
		}
		if again := controllerserver.PoolToken(after); again != token {
			t.Errorf("%q parsed and became %q", token, again)
		}
	})
}
