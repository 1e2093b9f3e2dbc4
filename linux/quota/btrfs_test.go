package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestBtrfs(t *testing.T) {
	const metadata = 256 << 10
	g := openedAs(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	t.Run("root", func(t *testing.T) { testWriter(t, g, asRoot, metadata) })
	t.Run("unprivileged user", func(t *testing.T) { testWriter(t, g, asNobody, metadata) })
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

// TestBtrfsCrash: limits are durable. A copy of the disk has the state after a crash.
func TestBtrfsCrash(t *testing.T) {
	d := newDisk(t, "btrfs", "512M")
	d.mount(t)
	testenv.SwitchQuotas(t, d.at, true)
	g := openedAs(t, Btrfs, d.at)
	testDurable(t, d, g, func() {
		testenv.Run(t, "cp", "--sparse=always", d.image, d.image+".crashed")
		g.close()
		d.unmount(t)
		d.image += ".crashed"
	})
}

func TestBtrfsWhy(t *testing.T) {
	at := testenv.Filesystem(t, "btrfs", "256M")
	requireNone(t, at, "btrfs quota enable --simple")
	testenv.Run(t, "btrfs", "quota", "enable", at)
	requireNone(t, at, "btrfs quota disable")
}

func subvolumeCreate(t *testing.T, path ...string) string {
	t.Helper()
	at := filepath.Join(path...)
	testenv.Run(t, "btrfs", "subvolume", "create", at)
	return at
}

// testNested: subvolumes that a tenant creates in a limited one count towards its limit and are removed with
// it, also if the tenant has protected them.
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
	must(t, os.Chmod(inner, 0o777))
	fill(t, filepath.Join(inner, "file"), asNobody)
	if u := g.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("the usage is %+v, the limit %d", u, limit)
	}
	for _, s := range []string{inner, filepath.Dir(inner)} {
		testenv.Run(t, "btrfs", "property", "set", s, "ro", "true")
	}
	if members, err := g.fs.subvolumes.members(group(id)); err != nil || len(members) != 5 {
		t.Errorf("members %v, %v, want 5", members, err)
	}
	g.remove(t, "nested")
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after removal: %v", err)
	}
	g.release(t, id)
}

// testDeep: RemoveDir destroys more subvolumes than the kernel lists at once, and deeper ones than a path can
// name.
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

// testMounted: RemoveDir does not remove a subvolume that is mounted at a directory.
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
	if got := g.idOf(t, "elsewhere"); got != id {
		t.Errorf("ID %d, want %d", got, id)
	}
}

// testPlain: a directory that is not a subvolume gets no limit, and RemoveDir does not remove it.
func testPlain(t *testing.T, g *ground) {
	must(t, unix.Mkdirat(int(g.dir.Fd()), "plain", dirMode))
	dir, err := openDir(g.dir, "plain")
	must(t, err)
	defer dir.Close()
	if id, err := g.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("allocate returned %d", id)
	}
	if id, err := g.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("ID %d, %v", id, err)
	}
	if done, err := g.fs.RemoveDir(g.dir, "plain"); done || err != nil {
		t.Errorf("remove: %t, %v", done, err)
	}
	if err := g.fs.MakeDir(g.dir, "plain"); !errors.Is(err, os.ErrExist) {
		t.Errorf("created again: %v", err)
	}
}

// testTakenGroup: Allocate refuses an ID with a record or with a qgroup of another user.
func testTakenGroup(t *testing.T, g *ground) {
	recorded := g.made(t, "recorded")
	if id, err := g.fs.Allocate(recorded, Limit{Bytes: mib}, func(uint64) bool { return true }); err == nil {
		t.Errorf("allocate returned %d, which is taken", id)
	}
	recorded.Close()
	foreign := g.made(t, "foreign")
	defer foreign.Close()
	id, err := subvolume(foreign)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "create", fmt.Sprint("1/", id), g.path)
	if id, err := g.fs.Allocate(foreign, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("allocate returned %d, which has a qgroup", id)
	}
	if u := g.usage(t, id); u != (Usage{}) {
		t.Errorf("the qgroup of another user has %+v", u)
	}
	if id := g.idOf(t, "foreign"); id != 0 {
		t.Errorf("ID %d, which belongs to another user", id)
	}
	for _, name := range []string{"recorded", "foreign"} {
		g.remove(t, name)
	}
	g.limited(t, "next", Limit{Bytes: mib})
}

// testUnassign: a qgroup without its subvolume can be removed.
func testUnassign(t *testing.T, g *ground) {
	_, id := g.limited(t, "unassigned", Limit{Bytes: mib})
	s := g.fs.subvolumes
	for range 2 {
		must(t, s.unassign(id, group(id)))
	}
	must(t, s.removeGroup(group(id)))
	if id := g.idOf(t, "unassigned"); id != 0 {
		t.Errorf("ID %d", id)
	}
	g.remove(t, "unassigned")
}

// TestBtrfsUnlinked: Release frees an ID whose directory was removed by rmdir(2). It does not wait for the
// periodic commit of the kernel, every 30 seconds.
func TestBtrfsUnlinked(t *testing.T) {
	g := openedAs(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	path, id := g.limited(t, "unlinked", Limit{Bytes: mib})
	must(t, os.Remove(path))
	must(t, retry.For(t.Context(), 20*time.Second, func() (bool, error) {
		err := g.fs.Release(id)
		return errors.Is(err, ErrBusy), err
	}))
}

// testOffAndOn: after quotas were switched off and on, Set restores a limit for later writes.
func testOffAndOn(t *testing.T, g *ground) {
	const limit = 16 * mib
	path, id := g.limited(t, "off", Limit{Bytes: limit})
	inner := subvolumeCreate(t, path, "inner")
	testenv.SwitchQuotas(t, g.path, false)
	if err := g.fs.Check(); err == nil || !strings.Contains(err.Error(), "btrfs quota enable --simple") {
		t.Errorf("check of quotas that are off: %v", err)
	}
	if err := g.fs.Set(id, Limit{Bytes: limit}); err == nil {
		t.Error("a limit was set with quotas off")
	}
	must(t, g.fs.Release(id))
	testenv.SwitchQuotas(t, g.path, true)
	must(t, g.fs.Check())
	must(t, g.fs.Set(id, Limit{Bytes: limit}))
	fill(t, filepath.Join(inner, "file"), asRoot)
	if u := g.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("the usage is %+v, the limit %d", u, limit)
	}
	g.remove(t, "off")
	g.release(t, id)
}

// TestOverride uses a directory in place of sysfs: writing to sysfs needs CAP_SYS_RESOURCE.
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
