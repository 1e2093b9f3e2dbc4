package backend_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openSet opens pools until the test ends.
func openSet(t *testing.T, state *os.Root, configs ...pool.Config) *pool.Set {
	t.Helper()
	set := pool.NewSet(volume.Forms{{Name: "loop", OnNodes: true}}, configs, state)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { defer close(ended); set.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended; state.Close() })
	must(t, set.AwaitReady(ctx))
	return set
}

// TestTrashStuck: storage health reports a deleted volume that cannot be removed, with the reason.
func TestTrashStuck(t *testing.T) {
	testenv.RequireRoot(t)
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	path := filepath.Join(t.TempDir(), "p")
	set := openSet(t, state, pool.Config{Name: "p", Directory: pool.Directory{Path: path}})
	p, err := set.Named("p")
	must(t, err)
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("loop", "v"), CoName: "v", Capacity: 1 << 20,
		FSType: "ext4", SectorSize: 4096, Created: time.Now(),
	}
	must(t, p.Create(t.Context(), v, func(dir *os.Root) error {
		return errors.Join(dir.WriteFile(pool.ImageFile, nil, 0o600), dir.Mkdir("held", 0o700))
	}))
	must(t, unix.Mount("trivet-test", filepath.Join(path, "volumes", "v", "held"), "tmpfs", 0, ""))
	must(t, p.Remove(t.Context(), v))
	t.Cleanup(func() {
		held, err := filepath.Glob(filepath.Join(path, ".trivet", "trash", "v.*", "held"))
		must(t, err)
		must(t, unix.Unmount(held[0], 0))
	})
	ps := backend.Pools{Backend: "loop", Set: set, Accepts: func(pool.Config) bool { return true }}
	var found []backend.Condition
	for end := time.Now().Add(10 * time.Second); len(found) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		found = ps.StorageHealth(t.Context())
	}
	if len(found) != 1 || found[0].Reason != "TrashStuck" || found[0].Pool != "p" || !strings.Contains(found[0].Message, "a filesystem is mounted at this path: unmount it") {
		t.Errorf("got conditions %+v, want one TrashStuck of pool p that names the mount", found)
	}
}

// TestNamed: a class without a pool gets the first pool that the backend can use. A pool that the
// backend cannot use is refused.
func TestNamed(t *testing.T) {
	state, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var configs []pool.Config
	for _, name := range []string{"others", "own", "own2"} {
		configs = append(configs, pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(t.TempDir(), name)}})
	}
	set := openSet(t, state, configs...)
	for _, tc := range []struct {
		name    string // of the requested pool
		accepts string // prefix of the names of the pools that the backend can use
		want    string // name of the returned pool
		says    string // text in the error (ErrInvalid); empty if a pool is returned
	}{
		{"", "own", "own", ""},
		{"own2", "own", "own2", ""},
		{"others", "own", "", `cannot use pool "others": name a pool that it can use (own, own2)`},
		{"", "none", "", "none"},
		{"typo", "own", "", "it has others, own, own2"},
	} {
		t.Run(fmt.Sprintf("pool %q, accepts %s", tc.name, tc.accepts), func(t *testing.T) {
			ps := backend.Pools{Backend: "b", Set: set, Accepts: func(c pool.Config) bool { return strings.HasPrefix(c.Name, tc.accepts) }}
			p, err := ps.Named(tc.name)
			if tc.says != "" {
				if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got %v, want ErrInvalid with %q", err, tc.says)
				}
				return
			}
			if err != nil || p.Name() != tc.want {
				t.Errorf("got pool %v, %v; want %s", p, err, tc.want)
			}
		})
	}
}

// TestListOfOtherKind: the controller's driver lists each pool with each backend. A backend that
// cannot use the pool returns an empty list. For a pool that does not exist it returns ErrStaleToken.
func TestListOfOtherKind(t *testing.T) {
	testenv.RequireRoot(t)
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	set := openSet(t, state, pool.Config{Name: "p", Directory: pool.Directory{Path: filepath.Join(t.TempDir(), "p")}})
	p, err := set.Named("p")
	must(t, err)
	ps := &backend.Pools{Backend: "nfs", Set: set, Accepts: pool.Config.Shared}
	if all, more, err := ps.List(t.Context(), p.ID("nfs", ""), 1); err != nil || more || len(all) > 0 {
		t.Errorf("got %v, %t, %v; want an empty list", all, more, err)
	}
	if _, _, err := ps.List(t.Context(), volume.ID{Backend: "nfs", Pool: "gone", Name: "a"}, 1); !errors.Is(err, volume.ErrStaleToken) {
		t.Errorf("after a volume of a pool that does not exist: got %v, want ErrStaleToken", err)
	}
}
