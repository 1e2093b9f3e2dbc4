package pool_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var must, await, stateRoot = pool.Must, pool.Await, pool.StateRoot

// env is the environment of a node-local pool: a state directory and the pool's configuration.
type env struct {
	state *os.Root
	cfg   pool.Config
}

func newEnv(t *testing.T) env {
	t.Helper()
	return env{stateRoot(t), pool.Config{Name: "p", Directory: pool.Directory{Path: filepath.Join(t.TempDir(), "pool")}}}
}

// newEnvOn is an environment whose pool is on a new filesystem, which is mounted at disk.
func newEnvOn(t *testing.T, fsType, size string) (e env, disk string) {
	t.Helper()
	disk = testenv.Filesystem(t, fsType, size)
	e = newEnv(t)
	e.cfg.Directory.Path = filepath.Join(disk, "pool")
	return e, disk
}

func (e env) open(t *testing.T) *pool.Pool {
	t.Helper()
	p, err := pool.Open(t.Context(), pool.Forms, e.cfg, e.state, nil)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

// wantRefused fails the test unless opening the pool fails with an error that wantError accepts.
func (e env) wantRefused(t *testing.T, kind error, says ...string) {
	t.Helper()
	p, err := pool.Open(t.Context(), pool.Forms, e.cfg, e.state, nil)
	if err == nil {
		p.Close()
	}
	wantError(t, err, kind, says...)
}

// wantError fails the test unless errors.Is(err, kind), and the message of err contains all strings.
func wantError(t *testing.T, err, kind error, says ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got %v, want %v", err, kind)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("error %q does not contain %q", err, s)
		}
	}
}

// record is the record of a volume with an image.
func record(p *pool.Pool, name string, size int64) volume.Volume {
	return volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("loop", name), CoName: name, Capacity: size,
		FSType: "ext4", SectorSize: 4096, Created: time.Now().UTC().Truncate(time.Second),
	}
}

// add creates a volume with an image of 1 MiB.
func add(t *testing.T, p *pool.Pool, name string) volume.Volume {
	t.Helper()
	v := record(p, name, 1<<20)
	must(t, p.Create(t.Context(), v, image(v.Capacity)))
	return v
}

// image returns a build function for Pool.Create that makes an image.
func image(size int64) func(*os.Root) error {
	return func(dir *os.Root) error {
		f, err := dir.Create(pool.ImageFile)
		if err != nil {
			return err
		}
		return errors.Join(f.Truncate(size), f.Close())
	}
}

func usage(t *testing.T, p *pool.Pool) pool.Usage {
	t.Helper()
	u, err := p.Usage()
	must(t, err)
	return u
}

// TestIdentity: a pool has the same UUID when it is opened again, and one driver at a time opens it.
func TestIdentity(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	first := p.ShortUUID()
	p.Close()
	// A driver that is killed after it wrote the marker does not record the UUID in the state
	// directory.
	must(t, e.state.Remove("known-pools/p"))
	p = e.open(t)
	if p.ShortUUID() != first {
		t.Errorf("UUID of the pool that was opened again: got %s, want %s", p.ShortUUID(), first)
	}
	e.wantRefused(t, volume.ErrPrecondition, "in use by another driver")
}

// TestDiskNotMounted: an empty directory at the path of a known pool is not made a new pool.
func TestDiskNotMounted(t *testing.T) {
	testenv.RequireRoot(t)
	e, disk := newEnvOn(t, "ext4", "64M")
	p := e.open(t)
	add(t, p, "v")
	p.Close()
	// The path of an unmounted disk is an empty directory.
	elsewhere := filepath.Join(t.TempDir(), "pool")
	e.cfg.Directory.Path = elsewhere
	e.wantRefused(t, volume.ErrPrecondition, "is its disk mounted?", elsewhere)
	if entries, err := os.ReadDir(elsewhere); err != nil || len(entries) > 0 {
		t.Errorf("the refused directory contains %v (error %v), want nothing", entries, err)
	}
	e.cfg.Directory.Path = filepath.Join(disk, "pool")
	if v, err := e.open(t).Lookup("v"); err != nil || v.CoName != "v" {
		t.Errorf("with the disk mounted again: got %+v, %v; want volume v", v, err)
	}
}

// TestRequireMount: with requireMount, a pool is opened only at a mount point. A lost+found folder is no
// foreign file.
func TestRequireMount(t *testing.T) {
	e := newEnv(t)
	e.cfg.RequireMount = true
	e.wantRefused(t, volume.ErrPrecondition, "not a mount point", "requireMount")
	e.cfg.Directory.Path = testenv.Filesystem(t, "ext4", "64M")
	e.open(t).Close()
}

// TestForeignDirectory: a directory that contains foreign files is not made a pool.
func TestForeignDirectory(t *testing.T) {
	e := newEnv(t)
	must(t, os.Mkdir(e.cfg.Directory.Path, 0o755))
	must(t, os.WriteFile(filepath.Join(e.cfg.Directory.Path, "letter.txt"), nil, 0o600))
	e.wantRefused(t, volume.ErrPrecondition, "letter.txt", "empty directory")
	must(t, os.Remove(filepath.Join(e.cfg.Directory.Path, "letter.txt")))
	e.open(t)
}

// TestAnotherPool: a directory is refused if it contains another pool than the one that was opened under
// the name before, or than the configured UUID.
func TestAnotherPool(t *testing.T) {
	e, other := newEnv(t), newEnv(t)
	e.open(t).Close()
	other.open(t).Close()
	e.cfg.Directory.Path = other.cfg.Directory.Path
	e.wantRefused(t, volume.ErrPrecondition, "mount the right disk")
	e.cfg.UUID = "01234567-89ab-4def-8123-456789abcdef"
	e.wantRefused(t, volume.ErrPrecondition, e.cfg.UUID)
}

// TestMarker: a pool with an invalid marker is refused, and the marker is not changed.
func TestMarker(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		kind error
		says string
	}{
		"garbage":       {"{", volume.ErrDamaged, "not a pool marker"},
		"no uuid":       {`{"version":1}`, volume.ErrDamaged, "not a pool marker"},
		"newer version": {`{"version":2,"uuid":"01234567-89ab-4def-8123-456789abcdef"}`, volume.ErrPrecondition, "version 2"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			must(t, os.Mkdir(e.cfg.Directory.Path, 0o755))
			marker := filepath.Join(e.cfg.Directory.Path, "pool.json")
			must(t, os.WriteFile(marker, []byte(tc.text), 0o600))
			e.wantRefused(t, tc.kind, marker, tc.says)
			if b, err := os.ReadFile(marker); string(b) != tc.text {
				t.Errorf("marker: got %q (error %v), want it unchanged", b, err)
			}
		})
	}
}

// TestReplacedDirectory: no call changes anything after the directory of an open pool was replaced.
func TestReplacedDirectory(t *testing.T) {
	for name, replace := range map[string]func(t *testing.T, path string){
		"removed": func(t *testing.T, path string) { must(t, os.Rename(path, path+".away")) },
		"replaced": func(t *testing.T, path string) {
			must(t, os.Rename(path, path+".away"))
			must(t, os.Mkdir(path, 0o755))
		},
		"covered by a mount": func(t *testing.T, path string) {
			testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", path)
			t.Cleanup(func() { testenv.Run(t, "umount", path) })
		},
		"marker missing": func(t *testing.T, path string) { must(t, os.Remove(filepath.Join(path, "pool.json"))) },
		"marker of another pool": func(t *testing.T, path string) {
			must(t, os.WriteFile(filepath.Join(path, "pool.json"), []byte(`{"version":1,"uuid":"01234567-89ab-4def-8123-456789abcdef"}`), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.RequireRoot(t)
			e := newEnv(t)
			p := e.open(t)
			v := add(t, p, "v")
			replace(t, e.cfg.Directory.Path)
			wantError(t, p.Create(t.Context(), record(p, "w", 1<<20), image(1<<20)), volume.ErrUnavailable, `pool "p"`)
			wantError(t, p.Remove(t.Context(), v), volume.ErrUnavailable, `pool "p"`)
			wantError(t, p.Attachments.Attach("v", pool.Attachment{Node: "n"}), volume.ErrUnavailable, `pool "p"`)
			wantError(t, p.Grow(t.Context(), v, 2<<20, func() error { t.Error("Grow called apply"); return nil }), volume.ErrUnavailable, `pool "p"`)
			if u := usage(t, p); u.Promised != 1<<20 || u.Volumes != 1 {
				t.Errorf("usage: got %+v, want one volume of 1 MiB", u)
			}
		})
	}
}

// TestLeftovers: entries that a killed driver left in tmp and trash are cleared by the next one,
// and count until they are removed.
func TestLeftovers(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	add(t, p, "stays")
	gone := add(t, p, "gone")
	p.Close()
	dir := e.cfg.Directory.Path
	must(t, os.Rename(filepath.Join(dir, "volumes", "gone"), filepath.Join(dir, ".trivet/trash/gone.01234567")))
	must(t, os.MkdirAll(filepath.Join(dir, ".trivet/tmp/half/attached"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, ".trivet/tmp/half/image"), nil, 0o600))
	p = e.open(t)
	if left, err := os.ReadDir(filepath.Join(dir, ".trivet/tmp")); err != nil || len(left) > 0 {
		t.Errorf("tmp contains %v (error %v), want nothing", left, err)
	}
	await(t, "the trash to be emptied", func() bool {
		left, err := os.ReadDir(filepath.Join(dir, ".trivet/trash"))
		return err == nil && len(left) == 0 && usage(t, p).Volumes == 1
	})
	if u := usage(t, p); u.Promised != 1<<20 {
		t.Errorf("got %d promised bytes, want %d", u.Promised, 1<<20)
	}
	if _, err := p.Lookup(gone.ID.Name); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("lookup of the volume that was in the trash: got %v, want ErrNotFound", err)
	}
	if _, err := p.Lookup("stays"); err != nil {
		t.Error(err)
	}
}

// TestMountInTmp: a pool is not opened if a filesystem is mounted in an entry of tmp, and the files on
// that filesystem are not removed.
func TestMountInTmp(t *testing.T) {
	testenv.RequireRoot(t)
	e := newEnv(t)
	e.open(t).Close()
	victim := filepath.Join(e.cfg.Directory.Path, ".trivet/tmp/half/attached")
	must(t, os.MkdirAll(victim, 0o700))
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", victim)
	t.Cleanup(func() { testenv.Run(t, "umount", victim) })
	must(t, os.WriteFile(filepath.Join(victim, "precious"), nil, 0o600))
	e.wantRefused(t, volume.ErrPrecondition, "a filesystem is mounted at this path: unmount it")
	if _, err := os.Stat(filepath.Join(victim, "precious")); err != nil {
		t.Error(err)
	}
}

// TestMountInData: if a filesystem is mounted on the data in an entry of tmp, the pool is opened, and the
// reaper removes all of the entry except the mounted filesystem.
func TestMountInData(t *testing.T) {
	testenv.RequireRoot(t)
	e := newEnv(t)
	e.open(t).Close()
	tmp := filepath.Join(e.cfg.Directory.Path, ".trivet/tmp/half")
	must(t, os.MkdirAll(filepath.Join(tmp, "data"), 0o700))
	must(t, os.WriteFile(filepath.Join(tmp, "other"), nil, 0o600))
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", filepath.Join(tmp, "data"))
	must(t, os.WriteFile(filepath.Join(tmp, "data", "precious"), nil, 0o600))
	p := e.open(t)
	moved, err := filepath.Glob(filepath.Join(e.cfg.Directory.Path, ".trivet/trash/half.*/data"))
	if err != nil || len(moved) != 1 {
		t.Fatalf("data in the trash: got %q, %v; want one directory", moved, err)
	}
	t.Cleanup(func() { testenv.Run(t, "umount", moved[0]) })
	await(t, "the reaper to remove the file", func() bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(moved[0]), "other"))
		return errors.Is(err, os.ErrNotExist)
	})
	add(t, p, "v")
	if _, err := os.Stat(filepath.Join(moved[0], "precious")); err != nil {
		t.Error(err)
	}
}

// TestFailedBuild: a failed create leaves no files and no reservation.
func TestFailedBuild(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	failed := errors.New("build failed")
	err := p.Create(t.Context(), record(p, "v", 1<<20), func(dir *os.Root) error {
		must(t, dir.WriteFile("image", []byte("half"), 0o600))
		return failed
	})
	wantError(t, err, failed)
	for _, dir := range []string{"volumes", ".trivet/tmp", ".trivet/trash"} {
		if left, err := os.ReadDir(filepath.Join(e.cfg.Directory.Path, dir)); err != nil || len(left) > 0 {
			t.Errorf("%s contains %v (error %v), want nothing", dir, left, err)
		}
	}
	if u := usage(t, p); u.Promised != 0 || u.Volumes != 0 {
		t.Errorf("usage: got %+v, want no volume", u)
	}
	add(t, p, "v")
}

// TestLookupDamaged: Lookup tells a damaged volume from a missing one, and List shows it by its ID.
func TestLookupDamaged(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	add(t, p, "v")
	add(t, p, "w")
	dir := filepath.Join(e.cfg.Directory.Path, "volumes")
	if _, err := p.Lookup("none"); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("lookup of a missing volume: got %v, want ErrNotFound", err)
	}
	must(t, os.Rename(filepath.Join(dir, "w"), filepath.Join(dir, "x")))
	_, err := p.Lookup("x")
	wantError(t, err, volume.ErrDamaged, `"x"`, ":w", "renamed")
	must(t, os.Remove(filepath.Join(dir, "v/volume.json")))
	_, err = p.Lookup("v")
	wantError(t, err, volume.ErrDamaged, "volume.json", "backup")
	must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "v/volume.json")))
	if _, err := p.Lookup("v"); err == nil {
		t.Error("a record outside the pool was read")
	}
	must(t, os.Remove(filepath.Join(dir, "v/volume.json")))
	must(t, os.WriteFile(filepath.Join(dir, "v/volume.json"), []byte("{}"), 0o600))
	_, err = p.Lookup("v")
	wantError(t, err, volume.ErrDamaged, "version 0")
	// Damaged volumes are listed by their IDs, so that they do not seem to be deleted.
	if list, more, err := p.List("loop", "", 10); err != nil || more || len(list) != 2 || list[0].ID != p.ID("loop", "v") || list[0].Version != 0 {
		t.Errorf("List: got %v, more %t, %v; want v and x without records, and no more", list, more, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "v/image")); err != nil {
		t.Errorf("the image of the volume without a valid record: %v", err)
	}
}

// TestLedger: the room of a pool depends on its configuration, and is the limit of a create.
func TestLedger(t *testing.T) {
	disk := testenv.Filesystem(t, "ext4", "256M")
	for name, tc := range map[string]struct {
		change func(*pool.Config)
		room   func(u pool.Usage) int64 // expected room in bytes
	}{
		"filesystem":   {func(*pool.Config) {}, func(u pool.Usage) int64 { return u.Total - u.Used - u.Total/100*2 }},
		"size":         {func(c *pool.Config) { c.Size, c.Reserve = "100Mi", "0" }, func(pool.Usage) int64 { return 100 << 20 }},
		"reserve":      {func(c *pool.Config) { c.Size, c.Reserve = "100Mi", "30Mi" }, func(pool.Usage) int64 { return 70 << 20 }},
		"percentage":   {func(c *pool.Config) { c.Size, c.Reserve = "100Mi", "10%" }, func(pool.Usage) int64 { return 90 << 20 }},
		"overcommit":   {func(c *pool.Config) { c.Size, c.Reserve, c.Overcommit = "100Mi", "0", 3 }, func(pool.Usage) int64 { return 300 << 20 }},
		"large size":   {func(c *pool.Config) { c.Size, c.Reserve = "1Ti", "0" }, func(u pool.Usage) int64 { return u.Total - u.Used }},
		"huge reserve": {func(c *pool.Config) { c.Size, c.Reserve = "100Mi", "1Ti" }, func(pool.Usage) int64 { return 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.cfg.Directory.Path = filepath.Join(disk, strings.ReplaceAll(name, " ", "-"))
			tc.change(&e.cfg)
			p := e.open(t)
			u := usage(t, p)
			const slack = 1 << 20 // the pool's own folders
			if want := tc.room(u); u.Room > want+slack || u.Room < want-slack {
				t.Errorf("got room for %d bytes, want %d: %+v", u.Room, want, u)
			}
			wantError(t, p.Create(t.Context(), record(p, "v", u.Room+1), image(1)), volume.ErrExhausted, `pool "p"`, fmt.Sprint(u.Room+1))
		})
	}
}

// TestMaxVolumes: a pool with maxVolumes volumes refuses new ones, until a volume is deleted.
func TestMaxVolumes(t *testing.T) {
	e := newEnv(t)
	e.cfg.MaxVolumes = 1
	p := e.open(t)
	v := add(t, p, "v")
	wantError(t, p.Create(t.Context(), record(p, "w", 1<<20), image(1<<20)), volume.ErrExhausted, "maxVolumes of 1")
	if u := usage(t, p); !u.Full {
		t.Errorf("usage: got %+v, want Full", u)
	}
	must(t, p.Remove(t.Context(), v))
	await(t, "the volume to be removed", func() bool { return usage(t, p).Volumes == 0 })
	add(t, p, "w")
}

// TestForeignUse: space that other files on the pool's disk use is not promised.
func TestForeignUse(t *testing.T) {
	e, disk := newEnvOn(t, "ext4", "256M")
	p := e.open(t)
	before := usage(t, p).Room
	p.Close()
	must(t, os.WriteFile(filepath.Join(disk, "film"), make([]byte, 64<<20), 0o600))
	f, err := os.Open(filepath.Join(disk, "film"))
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	if after := usage(t, e.open(t)).Room; after > before-60<<20 {
		t.Errorf("room beside a foreign file of 64 MiB: got %d bytes, want at least 60 MiB less than %d", after, before)
	}
}

// TestSet: a pool that cannot be opened does not affect the others. Of a pool and its copy, only the
// first one is opened.
func TestSet(t *testing.T) {
	e := newEnv(t)
	e.open(t).Close()
	copied := e.cfg
	copied.Name, copied.Directory.Path = "copy", e.cfg.Directory.Path+".copy"
	testenv.Run(t, "cp", "-a", e.cfg.Directory.Path, copied.Directory.Path)
	broken := pool.Config{Name: "broken", Directory: pool.Directory{Path: "/proc/none/pool"}}
	set := pool.NewSet(pool.Forms, []pool.Config{broken, e.cfg, copied}, e.state)
	if _, err := set.Named("p"); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("before Run: got %v, want ErrUnavailable", err)
	}
	end := run(t, set)
	_, err := set.Named("broken")
	wantError(t, err, volume.ErrUnavailable, "/proc/none")
	p, err := set.Named("p")
	must(t, err)
	_, err = set.Named("copy")
	wantError(t, err, volume.ErrUnavailable, "same uuid")
	_, err = set.Named("none")
	wantError(t, err, volume.ErrInvalid, `"none"`)
	if _, err := set.ByID(p.ID("loop", "v")); err != nil {
		t.Error(err)
	}
	_, err = set.ByID(volume.ID{Backend: "loop", Pool: "p", PoolUUID: "ffffffff", Name: "v"})
	wantError(t, err, volume.ErrUnavailable, "not on this node")
	end()
	if _, err := set.Named("p"); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("after the end of Run: got %v, want ErrUnavailable", err)
	}
	e.open(t).Close() // the set has released the lock of the pool
	// The UUID of the refused copy was not recorded, so a new pool with its name can be created.
	copied.Directory.Path += ".own"
	env{e.state, copied}.open(t)
}

// TestDirectIOAlign: the pool returns the alignment of its filesystem.
func TestDirectIOAlign(t *testing.T) {
	testenv.RequireRoot(t)
	e, _ := newEnvOn(t, "xfs", "512M")
	if got := e.open(t).DirectIOAlign(); got != 512 {
		t.Errorf("xfs on a device with sectors of 512 bytes: got alignment %d, want 512", got)
	}
}

// TestRoomFromTheTrash: a create waits for the removal of a deleted volume whose space it needs.
func TestRoomFromTheTrash(t *testing.T) {
	e := newEnv(t)
	e.cfg.Size, e.cfg.Reserve = "10Mi", "0"
	p := e.open(t)
	for range 5 {
		v := record(p, "v", 8<<20)
		must(t, p.Create(t.Context(), v, image(v.Capacity)))
		wantError(t, p.Create(t.Context(), record(p, "w", 8<<20), image(8<<20)), volume.ErrExhausted)
		must(t, p.Remove(t.Context(), v))
	}
}

// TestAccessTime: reads of an image do not change its access time, which a loop device would make durable.
func TestAccessTime(t *testing.T) {
	p := newEnv(t).open(t)
	add(t, p, "v")
	old := time.Now().Add(-72 * time.Hour).Truncate(time.Second)
	must(t, os.Chtimes(p.ImagePath("v"), old, time.Now()))
	accessed := func() time.Time {
		var st syscall.Stat_t
		must(t, syscall.Stat(p.ImagePath("v"), &st))
		return time.Unix(st.Atim.Unix())
	}
	f, err := p.Images.Open("v", os.O_RDONLY)
	must(t, err)
	defer f.Close()
	_, err = f.ReadAt(make([]byte, 1), 0)
	must(t, err)
	if got := accessed(); !got.Equal(old) {
		t.Errorf("got the access time %v after a read, want %v as before", got, old)
	}
	_, err = os.ReadFile(p.ImagePath("v"))
	must(t, err)
	if accessed().Equal(old) {
		t.Error("the filesystem of this test has no access times")
	}
}

// TestReplacedImage: if an image is deleted and made again while a call waits for its lock, the
// call does not get the lock of the old image.
func TestReplacedImage(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	v := add(t, p, "v")
	first, err := p.Images.Lock("v")
	must(t, err)
	got := make(chan error, 1)
	go func() {
		f, err := p.Images.AwaitLock(t.Context(), "v")
		if err == nil {
			err = f.Close()
		}
		got <- err
	}()
	// When the image is open twice, the call has opened it and waits for its lock.
	await(t, "the call to wait for the lock", func() bool {
		open, err := filepath.Glob("/proc/self/fd/*")
		must(t, err)
		n := 0
		for _, fd := range open {
			if target, err := os.Readlink(fd); err == nil && target == p.ImagePath("v") {
				n++
			}
		}
		return n == 2
	})
	must(t, p.Remove(t.Context(), v))
	add(t, p, "v")
	must(t, first.Close())
	wantError(t, <-got, volume.ErrPending, "replaced")
}

// TestBlocksReservedForRoot: blocks that the filesystem reserves for root are not promised.
func TestBlocksReservedForRoot(t *testing.T) {
	e, disk := newEnvOn(t, "ext4", "256M")
	p := e.open(t)
	before := usage(t, p)
	device := testenv.Run(t, "findmnt", "-n", "-o", "SOURCE", disk)
	testenv.Run(t, "tune2fs", "-m", "50", device)
	after := usage(t, p)
	if after.Room > before.Room/2 || after.Free > before.Free/2+1<<20 || after.Used != before.Used {
		t.Errorf("with half of the disk reserved for root: got %+v, want half of the room and free space of %+v", after, before)
	}
}

// TestLockVolume: only one call at a time holds the lock of a volume, in one process and between
// processes.
func TestLockVolume(t *testing.T) {
	local, e := newEnv(t).open(t), newExport(t)
	for name, pools := range map[string][2]*pool.Pool{"node-local": {local, local}, "export": {e.open(t), e.open(t)}} {
		t.Run(name, func(t *testing.T) {
			a, b := pools[0], pools[1]
			add(t, a, "v")
			first, err := a.LockVolume(t.Context(), "v")
			must(t, err)
			_, err = b.LockVolume(t.Context(), "v")
			wantError(t, err, volume.ErrPending, "retry")
			began := time.Now()
			_, err = b.TryLockVolume("v")
			wantError(t, err, volume.ErrPending, "retry")
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Errorf("TryLockVolume waited %v", took)
			}
			must(t, first.Close())
			second, err := b.TryLockVolume("v")
			must(t, err)
			must(t, second.Close())
			_, err = b.LockVolume(t.Context(), "none")
			wantError(t, err, volume.ErrNotFound)
		})
	}
}

// TestLockDeleted: a call that waits for the lock of a volume does not get that of its removed folder.
func TestLockDeleted(t *testing.T) {
	local, e := newEnv(t).open(t), newExport(t)
	for name, p := range map[string]*pool.Pool{"node-local": local, "export": e.open(t)} {
		for _, want := range []error{volume.ErrNotFound, volume.ErrPending} {
			t.Run(name+"/"+want.Error(), func(t *testing.T) {
				v := add(t, p, "v")
				first, err := p.LockVolume(t.Context(), "v")
				must(t, err)
				result := make(chan error, 1)
				go func() {
					second, err := p.LockVolume(t.Context(), "v")
					if err == nil {
						err = second.Close()
					}
					result <- err
				}()
				time.Sleep(300 * time.Millisecond) // the call waits for up to a second
				must(t, p.Remove(t.Context(), v))
				if errors.Is(want, volume.ErrPending) { // it has been replaced
					v = add(t, p, "v")
				}
				must(t, first.Close())
				wantError(t, <-result, want)
				if errors.Is(want, volume.ErrPending) {
					must(t, p.Remove(t.Context(), v))
				}
			})
		}
	}
}
