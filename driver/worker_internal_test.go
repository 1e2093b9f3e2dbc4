package driver

import (
	"testing"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

// TestHangs: a call that takes long is not given up as long as what it works with
// answers.
func TestHangs(t *testing.T) {
	t.Run("slow", func(t *testing.T) {
		returned, asked := make(chan struct{}), 0
		if hangs(returned, time.Millisecond, func() bool {
			if asked++; asked == 3 {
				close(returned)
			}
			return true
		}) {
			t.Error("given up")
		}
		if asked < 3 {
			t.Errorf("asked %d times", asked)
		}
	})
	t.Run("hangs", func(t *testing.T) {
		asked := 0
		if !hangs(make(chan struct{}), time.Millisecond, func() bool { asked++; return asked < 3 }) {
			t.Error("not given up")
		}
	})
	t.Run("returned", func(t *testing.T) {
		returned := make(chan struct{})
		close(returned)
		if hangs(returned, time.Hour, func() bool { t.Error("asked"); return false }) {
			t.Error("given up")
		}
	})
}

// TestWithoutNFS: in Kubernetes exports are mounted where that is asked for.
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
