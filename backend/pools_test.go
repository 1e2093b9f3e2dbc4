package backend_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestNamed: a class without a pool gets the first that the backend can use, and no
// class one that it cannot.
func TestNamed(t *testing.T) {
	state, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var configs []pool.Config
	for _, name := range []string{"others", "own", "own2"} {
		configs = append(configs, pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(t.TempDir(), name)}})
	}
	set := pool.NewSet(configs, state)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { defer close(ended); set.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended; state.Close() })
	if err := set.AwaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, own, want string
		says            string // of ErrInvalid
	}{
		{"", "own", "own", ""},
		{"own2", "own", "own2", ""},
		{"others", "own", "", `cannot use pool "others": name one that it can (here: own, own2)`},
		{"", "none", "", "none"},
		{"typo", "own", "", "it has others, own, own2"},
	} {
		t.Run(tc.name+" of "+tc.own, func(t *testing.T) {
			ps := backend.Pools{Backend: "b", Set: set, Own: func(c pool.Config) bool { return strings.HasPrefix(c.Name, tc.own) }}
			p, err := ps.Named(tc.name)
			if tc.says != "" {
				if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("%v does not say %q", err, tc.says)
				}
				return
			}
			if err != nil || p.Name() != tc.want {
				t.Errorf("%v, %v", p, err)
			}
		})
	}
}
