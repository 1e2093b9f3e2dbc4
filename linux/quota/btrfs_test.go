package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Commands of BTRFS_IOC_QUOTA_CTL (uapi/linux/btrfs.h).
const (
	enableClassic = 1
	disable       = 2
	enableSimple  = 4
)

// quotaCtl switches quotas on or off: the program of Debian 12 knows no simple ones.
func quotaCtl(t *testing.T, path string, command uint64) {
	t.Helper()
	const btrfsIocQuotaCtl = 0xc0109428 // _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	args := [2]uint64{command}
	rawIoctl(t, dir, btrfsIocQuotaCtl, unsafe.Pointer(&args))
}

func btrfsDisk(t *testing.T) *disk {
	t.Helper()
	d := newDisk(t, "btrfs", "512M")
	d.mount(t)
	quotaCtl(t, d.at, enableSimple)
	return d
}

func TestBtrfs(t *testing.T) {
	const metadata = 256 << 10
	d := btrfsDisk(t)
	g := lookFor(t, Btrfs, d.at)
	t.Run("root", func(t *testing.T) { testWriter(t, g, asRoot, metadata) })
	t.Run("nobody", func(t *testing.T) { testWriter(t, g, asNobody, metadata) })
	t.Run("parallel", func(t *testing.T) { testParallel(t, g) })
	t.Run("release", func(t *testing.T) { testRelease(t, g) })
	t.Run("nested", func(t *testing.T) { testNested(t, g) })
	t.Run("deep", func(t *testing.T) { testDeep(t, g) })
	t.Run("mounted", func(t *testing.T) { testMounted(t, g) })
	t.Run("plain", func(t *testing.T) { testPlain(t, g) })
	t.Run("taken", func(t *testing.T) { testTakenGroup(t, g) })
	t.Run("unassign", func(t *testing.T) { testUnassign(t, g) })
	t.Run("off", func(t *testing.T) { testOffAndOn(t, g) })
}

// A crash leaves what was written to the disk: a copy of it.
func TestBtrfsCrash(t *testing.T) {
	d := btrfsDisk(t)
	g := lookFor(t, Btrfs, d.at)
	testDurable(t, d, g, func() {
		testenv.Run(t, "cp", "--sparse=always", d.image, d.image+".crashed")
		g.close()
		d.unmount(t)
		d.image += ".crashed"
	})
}

func TestBtrfsWhy(t *testing.T) {
	at := testenv.Filesystem(t, "btrfs", "256M")
	wantNone(t, at, "btrfs quota enable --simple")
	quotaCtl(t, at, enableClassic)
	wantNone(t, at, "btrfs quota disable")
}

func subvolumeCreate(t *testing.T, path ...string) string {
	t.Helper()
	at := filepath.Join(path...)
	testenv.Run(t, "btrfs", "subvolume", "create", at)
	return at
}

// testNested: subvolumes that somebody makes in one count with it, and go with it,
// whatever their owner did to keep them.
func testNested(t *testing.T, g *ground) {
	const limit = 16 * mib
	path, id := g.limited(t, "nested", Limit{Bytes: limit})
	inner := subvolumeCreate(t, path, "outer")
	inner = subvolumeCreate(t, inner, "inner")
	folder := filepath.Join(inner, "folder")
	must(t, os.Mkdir(folder, 0o755))
	fixed := subvolumeCreate(t, folder, "fixed")
	testenv.Run(t, "btrfs", "subvolume", "snapshot", "-r", fixed, filepath.Join(inner, "snapshot"))
	testenv.Run(t, "chattr", "+i", fixed, folder, path)
	fill(t, filepath.Join(inner, "file"), asNobodyIn(t, inner))
	if u := g.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("the usage is %+v, the limit %d", u, limit)
	}
	for _, s := range []string{inner, filepath.Dir(inner)} {
		testenv.Run(t, "btrfs", "property", "set", s, "ro", "true")
	}
	if members, err := g.fs.subvolumes.members(group(id)); err != nil || len(members) != 5 {
		t.Errorf("the members are %v, %v, want 5", members, err)
	}
	g.remove(t, "nested")
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after removal: %v", err)
	}
	g.release(t, id)
}

// asNobodyIn lets nobody write to a directory.
func asNobodyIn(t *testing.T, dir string) []string {
	t.Helper()
	must(t, os.Chmod(dir, 0o777))
	return asNobody
}

// testDeep: more subvolumes than the kernel lists at once, and deeper than a path goes.
func testDeep(t *testing.T, g *ground) {
	_, id := g.limited(t, "deep", Limit{Bytes: 64 * mib})
	at, err := openDir(g.dir, "deep")
	must(t, err)
	for i := range 300 {
		must(t, g.fs.MakeDir(at, fmt.Sprint("beside-", i)))
	}
	for range 25 {
		name := strings.Repeat("d", unix.NAME_MAX)
		must(t, g.fs.MakeDir(at, name))
		below, err := openDir(at, name)
		must(t, err)
		at.Close()
		at = below
	}
	at.Close()
	g.remove(t, "deep")
	g.release(t, id)
}

// testMounted: a subvolume that is mounted at the name of a directory is not its.
func testMounted(t *testing.T, g *ground) {
	path, id := g.limited(t, "elsewhere", Limit{Bytes: mib})
	dir := g.made(t, "mounted")
	dir.Close()
	at := dir.Name()
	testenv.Run(t, "mount", "--bind", path, at)
	t.Cleanup(func() { testenv.Run(t, "umount", at) })
	if done, err := g.fs.RemoveDir(g.dir, "mounted"); done || !errors.Is(err, unix.EXDEV) {
		t.Errorf("remove: %t, %v, want EXDEV", done, err)
	}
	if carried := g.idOf(t, "elsewhere"); carried != id {
		t.Errorf("it carries %d, was given %d", carried, id)
	}
}

// testPlain: a directory that is no subvolume has no limit, and is not removed.
func testPlain(t *testing.T, g *ground) {
	must(t, unix.Mkdirat(int(g.dir.Fd()), "plain", dirMode))
	dir, err := openDir(g.dir, "plain")
	must(t, err)
	defer dir.Close()
	if id, err := g.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("allocate gave %d", id)
	}
	if id, err := g.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("it carries %d, %v", id, err)
	}
	if done, err := g.fs.RemoveDir(g.dir, "plain"); done || err != nil {
		t.Errorf("remove: %t, %v", done, err)
	}
	if err := g.fs.MakeDir(g.dir, "plain"); !errors.Is(err, os.ErrExist) {
		t.Errorf("made again: %v", err)
	}
}

// testTakenGroup: what others have is theirs, and the next directory has another ID.
func testTakenGroup(t *testing.T, g *ground) {
	recorded := g.made(t, "recorded")
	if id, err := g.fs.Allocate(recorded, Limit{Bytes: mib}, func(uint64) bool { return true }); err == nil {
		t.Errorf("it was given %d, which is taken", id)
	}
	recorded.Close()
	theirs := g.made(t, "theirs")
	defer theirs.Close()
	id, err := subvolume(theirs)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "create", fmt.Sprint("1/", id), g.path)
	if id, err := g.fs.Allocate(theirs, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("it was given %d, of which there was a qgroup", id)
	}
	if u := g.usage(t, id); u != (Usage{}) {
		t.Errorf("the others' qgroup has %+v", u)
	}
	if id := g.idOf(t, "theirs"); id != 0 {
		t.Errorf("it carries %d, which is of others", id)
	}
	for _, name := range []string{"recorded", "theirs"} {
		g.remove(t, name)
	}
	g.limited(t, "next", Limit{Bytes: mib})
}

// testUnassign: a qgroup that its subvolume is taken out of can be removed.
func testUnassign(t *testing.T, g *ground) {
	_, id := g.limited(t, "unassigned", Limit{Bytes: mib})
	s := g.fs.subvolumes
	for range 2 {
		must(t, s.unassign(id, group(id)))
	}
	must(t, s.removeGroup(group(id)))
	if carried := g.idOf(t, "unassigned"); carried != 0 {
		t.Errorf("it carries %d", carried)
	}
	g.remove(t, "unassigned")
}

// TestBtrfsUnlinked: what was removed by its name alone is freed before the kernel
// commits by itself, after 30 seconds.
func TestBtrfsUnlinked(t *testing.T) {
	g := lookFor(t, Btrfs, btrfsDisk(t).at)
	path, id := g.limited(t, "unlinked", Limit{Bytes: mib})
	must(t, os.Remove(path))
	must(t, retry.For(t.Context(), 20*time.Second, func() (bool, error) {
		err := g.fs.Release(id)
		return errors.Is(err, ErrBusy), err
	}))
}

// testOffAndOn: with quotas switched off and on again limits can be put back, for what
// is written from then on.
func testOffAndOn(t *testing.T, g *ground) {
	const limit = 16 * mib
	path, id := g.limited(t, "off", Limit{Bytes: limit})
	inner := subvolumeCreate(t, path, "inner")
	quotaCtl(t, g.path, disable)
	if err := g.fs.Check(); err == nil || !strings.Contains(err.Error(), "btrfs quota enable --simple") {
		t.Errorf("check of quotas that are off: %v", err)
	}
	if err := g.fs.Set(id, Limit{Bytes: limit}); err == nil {
		t.Error("a limit was set with quotas off")
	}
	must(t, g.fs.Release(id))
	quotaCtl(t, g.path, enableSimple)
	must(t, g.fs.Check())
	must(t, g.fs.Set(id, Limit{Bytes: limit}))
	fill(t, filepath.Join(inner, "file"), asRoot)
	if u := g.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("the usage is %+v, the limit %d", u, limit)
	}
	g.remove(t, "off")
	g.release(t, id)
}

// TestOverride has a sysfs of its own: to write to the kernel's takes CAP_SYS_RESOURCE.
func TestOverride(t *testing.T) {
	s := &subvolumes{sysfs: t.TempDir()}
	must(t, os.Mkdir(filepath.Join(s.sysfs, "qgroups"), 0o755))
	must(t, os.WriteFile(filepath.Join(s.sysfs, "qgroups", "mode"), []byte("squota\n"), 0o600))
	for _, override := range []string{"1", "0"} {
		must(t, os.WriteFile(filepath.Join(s.sysfs, "quota_override"), []byte(override+"\n"), 0o600))
		if err := s.check(); (err == nil) != (override == "0") {
			t.Errorf("check with %s: %v", override, err)
		}
	}
}
