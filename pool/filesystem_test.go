package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// serveSet runs a set of pools until the end of the test.
func serveSet(t *testing.T, configs ...pool.Config) *pool.Set {
	t.Helper()
	set, stop := runSet(t, configs...)
	t.Cleanup(stop)
	return set
}

// runSet runs a set of pools until stop is called.
func runSet(t *testing.T, configs ...pool.Config) (set *pool.Set, stop func()) {
	t.Helper()
	set = pool.NewSet(pool.Forms, configs, stateRoot(t))
	return set, run(t, set)
}

// run runs a set of pools until end is called. It returns when the set is ready.
func run(t *testing.T, set *pool.Set) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { set.Run(ctx) })
	must(t, set.AwaitReady(t.Context()))
	return func() {
		cancel()
		running.Wait()
	}
}

// named returns an open pool of a set.
func named(t *testing.T, set *pool.Set, name string) *pool.Pool {
	t.Helper()
	p, err := set.Named(name)
	must(t, err)
	return p
}

// at is the configuration of a pool in a directory.
func at(name, path string) pool.Config {
	return pool.Config{Name: name, Directory: pool.Directory{Path: path}, Reserve: "0"}
}

// fill creates volumes of one size in several pools at once, until no pool has room. It returns the
// number of volumes that were created in each pool.
func fill(t *testing.T, size int64, pools ...*pool.Pool) []int {
	t.Helper()
	made := make([]int, len(pools))
	var mu sync.Mutex
	var calls sync.WaitGroup
	for i := range 100 {
		which := i % len(pools)
		p := pools[which]
		calls.Go(func() {
			v := record(p, fmt.Sprintf("v%d", i), size)
			err := p.Create(context.Background(), v, image(size))
			if err != nil && !errors.Is(err, volume.ErrExhausted) {
				t.Errorf("creating %s: %v", v.ID, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				made[which]++
			}
		})
	}
	calls.Wait()
	return made
}

// TestOneFilesystem: pools on one filesystem together do not promise more than its space, even if one is
// in a subvolume or behind a bind mount, and if many calls run at once.
func TestOneFilesystem(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"tmpfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			disk := memory(t)
			if fsType == "btrfs" {
				disk = testenv.Filesystem(t, fsType, "256M")
			}
			second := filepath.Join(disk, "second")
			if fsType == "btrfs" { // a subvolume has a device number of its own
				testenv.Run(t, "btrfs", "subvolume", "create", second)
			} else {
				must(t, os.Mkdir(second, 0o700))
			}
			bound := bind(t, second)
			set := serveSet(t, at("a", filepath.Join(disk, "first")), at("b", bound))
			a, b := named(t, set, "a"), named(t, set, "b")
			before := usage(t, a).Room
			made := fill(t, 8<<20, a, b)
			ua, ub := usage(t, a), usage(t, b)
			if sum := ua.Promised + ub.Promised; sum > before || sum != int64(made[0]+made[1])*8<<20 {
				t.Errorf("%d + %d volumes of 8 MiB: got %d promised bytes, want the sum of their sizes, at most %d", made[0], made[1], sum, before)
			}
			if ua.Room >= 8<<20 || ub.Room >= 8<<20 {
				t.Errorf("after volumes were refused: got room for %d bytes in pool a and %d in pool b, want less than 8 MiB", ua.Room, ub.Room)
			}
		})
	}
}

// memory mounts a filesystem of 256 MiB in memory.
func memory(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("trivet-test", dir, "tmpfs", 0, "size=256M"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	return dir
}

// bind mounts a directory at another path.
func bind(t *testing.T, dir string) string {
	t.Helper()
	target := t.TempDir()
	must(t, unix.Mount(dir, target, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(target, 0)) })
	return target
}

// TestOtherPoolsUse: the usage of one pool's volumes is not foreign use for another pool, because
// it was promised already.
func TestOtherPoolsUse(t *testing.T) {
	testenv.RequireRoot(t)
	disk := memory(t)
	first, second := at("a", filepath.Join(disk, "a")), at("b", filepath.Join(disk, "b"))
	p := env{stateRoot(t), first}.open(t)
	const size = 64 << 20
	must(t, p.Create(t.Context(), record(p, "v", size), func(dir *os.Root) error {
		return dir.WriteFile(pool.ImageFile, make([]byte, size), 0o600)
	}))
	room := usage(t, p).Room
	p.Close()
	set := serveSet(t, second, first)
	a, b := named(t, set, "a"), named(t, set, "b")
	const slack = 1 << 20 // for the folders and records of the pools
	if got := usage(t, a).Room; got < room-slack {
		t.Errorf("room of pool a: got %d bytes, want %d as before pool b existed", got, room)
	}
	if got := usage(t, b).Room; got < room-slack || got > room+slack {
		t.Errorf("room of pool b: got %d bytes, want %d like pool a", got, room)
	}
}

// TestPoolOfEndingDriver: while another driver, which is ending, has a pool open, the other pools on the
// filesystem promise nothing. A pool that is refused does not delay the other pools.
func TestPoolOfEndingDriver(t *testing.T) {
	testenv.RequireRoot(t)
	disk := memory(t)
	first, second := at("a", filepath.Join(disk, "a")), at("b", filepath.Join(disk, "b"))
	before, stop := runSet(t, first)
	p := named(t, before, "a")
	const size = 200 << 20
	must(t, p.Create(t.Context(), record(p, "v", size), image(size)))
	stop()
	lock, err := os.Open(filepath.Join(first.Directory.Path, ".trivet", "lock"))
	must(t, err)
	defer lock.Close()
	must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	refused := at("c", filepath.Join(disk, "c"))
	refused.RequireMount = true

	set := serveSet(t, second, refused, first)
	b := named(t, set, "b")
	v := record(b, "v", 100<<20)
	wantError(t, b.Create(t.Context(), v, image(v.Capacity)), volume.ErrUnavailable, `volumes of pool "a" on the same filesystem`)
	if got := usage(t, b).Room; got != 0 {
		t.Errorf("room of pool b before pool a is read: got %d bytes, want 0", got)
	}
	must(t, unix.Flock(int(lock.Fd()), unix.LOCK_UN))
	await(t, "pool a to be open", func() bool { _, err := set.Named("a"); return err == nil })
	wantError(t, b.Create(t.Context(), v, image(v.Capacity)), volume.ErrExhausted, `for pool "a"`)
	small := record(b, "small", 1<<20)
	must(t, b.Create(t.Context(), small, image(small.Capacity)))
}

// TestUnlikePools: pools on one filesystem can have different sizes, reserves and overcommits. The bytes
// that one pool has promised, divided by its overcommit, reduce the room of the others.
func TestUnlikePools(t *testing.T) {
	testenv.RequireRoot(t)
	disk := memory(t)
	plain, sized, dense := at("plain", filepath.Join(disk, "a")), at("sized", filepath.Join(disk, "b")), at("dense", filepath.Join(disk, "c"))
	sized.Size, dense.Overcommit, plain.Reserve = "32Mi", 4, "16Mi"
	set := serveSet(t, plain, sized, dense)
	a, b, c := named(t, set, "plain"), named(t, set, "sized"), named(t, set, "dense")
	roomA, roomC := usage(t, a).Room, usage(t, c).Room
	if got := usage(t, b).Room; got != 32<<20 {
		t.Errorf("room of the pool with size 32Mi: got %d bytes, want %d", got, 32<<20)
	}
	const slack = 16 << 10 // for rounding
	if want := 4 * (roomA + 16<<20); roomC < want-slack || roomC > want+slack {
		t.Errorf("room with overcommit 4 and no reserve: got %d bytes, want %d", roomC, want)
	}
	v := record(c, "v", 64<<20)
	must(t, c.Create(t.Context(), v, image(v.Capacity)))
	if got, want := usage(t, a).Room, roomA-16<<20; got < want-1<<20 || got > want+slack {
		t.Errorf("room beside 64 MiB promised with overcommit 4: got %d bytes, want %d", got, want)
	}
}

// BenchmarkCreate creates and deletes volumes in memory, with several calls at once.
func BenchmarkCreate(b *testing.B) {
	dir := b.TempDir()
	if err := unix.Mount("trivet-test", dir, "tmpfs", 0, "size=8G"); err != nil {
		b.Fatal(err)
	}
	state, err := os.OpenRoot(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer state.Close()
	p, err := pool.Open(b.Context(), pool.Forms, at("a", filepath.Join(dir, "a")), state, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		p.Close()
		if err := unix.Unmount(dir, 0); err != nil {
			b.Error(err)
		}
	}()
	var n atomic.Int64
	b.RunParallel(func(loop *testing.PB) {
		for loop.Next() {
			v := record(p, fmt.Sprintf("v%d", n.Add(1)), 1<<20)
			if err := p.Create(context.Background(), v, image(v.Capacity)); err != nil {
				b.Fatal(err)
			}
			if err := p.Remove(context.Background(), v); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestNestedPools: a pool inside another one is refused, also if its path contains a link or a mount.
func TestNestedPools(t *testing.T) {
	testenv.RequireRoot(t)
	for _, c := range []struct {
		name  string
		inner func(t *testing.T, outer string) string
	}{
		{"directory", func(_ *testing.T, outer string) string { return filepath.Join(outer, "volumes", "new") }},
		{"link", func(t *testing.T, outer string) string {
			link := filepath.Join(t.TempDir(), "link")
			must(t, os.Symlink(outer, link))
			return filepath.Join(link, "inner")
		}},
		{"bind mount", func(t *testing.T, outer string) string {
			inside := filepath.Join(outer, "inner")
			must(t, os.Mkdir(inside, 0o700))
			return bind(t, inside)
		}},
		{"another filesystem", func(t *testing.T, outer string) string {
			inside := filepath.Join(outer, "inner")
			must(t, os.Mkdir(inside, 0o700))
			must(t, unix.Mount("trivet-test", inside, "tmpfs", 0, ""))
			t.Cleanup(func() { must(t, unix.Unmount(inside, 0)) })
			return inside
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			outer := at("outer", filepath.Join(t.TempDir(), "pool"))
			first, stop := runSet(t, outer) // creates the outer pool
			named(t, first, "outer")
			stop()
			inner := at("inner", c.inner(t, outer.Directory.Path))
			set := serveSet(t, outer, inner)
			named(t, set, "outer")
			_, err := set.Named("inner")
			wantError(t, err, volume.ErrPrecondition, `pool "inner" at `+inner.Directory.Path+` is inside pool "outer" at `+outer.Directory.Path)
		})
	}
}
