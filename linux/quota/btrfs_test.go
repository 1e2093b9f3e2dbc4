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
	"github.com/trivet-csi/trivet/linux/sys"
)

func TestBtrfs(t *testing.T) {
	const metadata = 256 << 10
	g := openKind(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	t.Run("root", func(t *testing.T) { testWriter(t, g, asRoot, metadata) })
	t.Run("unprivileged user", func(t *testing.T) { testWriter(t, g, asNobody, metadata) })
	t.Run("parallel", func(t *testing.T) { testParallel(t, g) })
	t.Run("release", func(t *testing.T) { testRelease(t, g) })
	t.Run("nested", func(t *testing.T) { testNested(t, g) })
	t.Run("deep", func(t *testing.T) { testDeep(t, g) })
	t.Run("mount point", func(t *testing.T) { testMountPoint(t, g) })
	t.Run("not a subvolume", func(t *testing.T) { testNoSubvolume(t, g) })
	t.Run("ID in use", func(t *testing.T) { testUsedID(t, g) })
	t.Run("interrupted", func(t *testing.T) { testInterrupted(t, g) })
	t.Run("qgroup without subvolume", func(t *testing.T) { testUnassign(t, g) })
	t.Run("quotas off and on", func(t *testing.T) { testOffAndOn(t, g) })
}

// TestBtrfsCrash: limits survive a crash. A copy of the image of the mounted filesystem has the state after a crash.
func TestBtrfsCrash(t *testing.T) {
	d := newDisk(t, "btrfs", "512M")
	d.mount(t)
	testenv.SwitchQuotas(t, d.at, true)
	g := openKind(t, Btrfs, d.at)
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

// testNested: subvolumes that a tenant creates in a limited subvolume count towards its limit and are removed
// with it, even if the tenant has made them read-only or immutable.
func testNested(t *testing.T, g *testFS) {
	const limit = 16 * mib
	path, id := g.createLimited(t, "nested", Limit{Bytes: limit})
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
		t.Errorf("got usage %+v, want between %d and %d bytes", u, limit-mib, limit)
	}
	for _, s := range []string{inner, filepath.Dir(inner)} {
		testenv.Run(t, "btrfs", "property", "set", s, "ro", "true")
	}
	if members, err := g.fs.subvolumes.members(group(id)); err != nil || len(members) != 5 {
		t.Errorf("got members %v, %v, want 5 members", members, err)
	}
	g.remove(t, "nested")
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the removed directory: got %v, want %v", err, os.ErrNotExist)
	}
	g.release(t, id)
}

// testDeep: RemoveDir destroys more subvolumes than the kernel lists at once, and subvolumes that are nested deeper
// than PATH_MAX.
func testDeep(t *testing.T, g *testFS) {
	_, id := g.createLimited(t, "deep", Limit{Bytes: 64 * mib})
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

// testMountPoint: RemoveDir does not remove a subvolume that is mounted at a directory.
func testMountPoint(t *testing.T, g *testFS) {
	path, id := g.createLimited(t, "elsewhere", Limit{Bytes: mib})
	dir := g.create(t, "mounted")
	dir.Close()
	at := dir.Name()
	testenv.Run(t, "mount", "--bind", path, at)
	t.Cleanup(func() { testenv.Run(t, "umount", at) })
	if done, err := g.fs.RemoveDir(g.dir, "mounted"); done || !errors.Is(err, unix.EXDEV) {
		t.Errorf("RemoveDir: got %t, %v, want false and EXDEV", done, err)
	}
	if got := g.idOf(t, "elsewhere"); got != id {
		t.Errorf("ID of the mounted subvolume: got %d, want %d", got, id)
	}
}

// testNoSubvolume: a directory that is not a subvolume gets no limit, and RemoveDir does not remove it.
func testNoSubvolume(t *testing.T, g *testFS) {
	must(t, unix.Mkdirat(int(g.dir.Fd()), "plain", dirMode))
	dir, err := openDir(g.dir, "plain")
	must(t, err)
	defer dir.Close()
	if id, err := g.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error", id)
	}
	if id, err := g.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("got ID %d, %v, want 0", id, err)
	}
	if done, err := g.fs.RemoveDir(g.dir, "plain"); done || err != nil {
		t.Errorf("RemoveDir: got %t, %v, want false", done, err)
	}
	if err := g.fs.MakeDir(g.dir, "plain"); !errors.Is(err, os.ErrExist) {
		t.Errorf("creating the directory again: got %v, want %v", err, os.ErrExist)
	}
}

// testUsedID: Allocate refuses an ID that is recorded for another directory or that has a qgroup.
func testUsedID(t *testing.T, g *testFS) {
	recorded := g.create(t, "recorded")
	if id, err := g.fs.Allocate(recorded, Limit{Bytes: mib}, func(uint64) bool { return true }); err == nil {
		t.Errorf("Allocate returned ID %d, want an error because it is recorded", id)
	}
	recorded.Close()
	foreign := g.create(t, "foreign")
	defer foreign.Close()
	id, err := subvolume(foreign)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "create", fmt.Sprint("1/", id), g.path)
	member := g.create(t, "member")
	defer member.Close()
	memberID, err := subvolume(member)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "assign", fmt.Sprint("0/", memberID), fmt.Sprint("1/", id), g.path)
	if id, err := g.fs.Allocate(foreign, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error because it has a qgroup", id)
	}
	if u := g.usage(t, id); u != (Usage{}) {
		t.Errorf("the existing qgroup changed: got usage %+v, want none", u)
	}
	if id := g.idOf(t, "foreign"); id != 0 {
		t.Errorf("got ID %d, want 0 because Allocate failed", id)
	}
	for _, name := range []string{"recorded", "foreign"} {
		g.remove(t, name)
	}
	g.createLimited(t, "next", Limit{Bytes: mib})
}

// testInterrupted: a qgroup is released if Allocate was killed before it assigned the subvolume.
func testInterrupted(t *testing.T, g *testFS) {
	dir := g.create(t, "interrupted")
	id, err := subvolume(dir)
	must(t, err)
	must(t, dir.Close())
	must(t, sys.CreateQgroup(g.dir, group(id)))
	if got := g.idOf(t, "interrupted"); got != id {
		t.Errorf("got ID %d, want %d", got, id)
	}
	g.remove(t, "interrupted")
	g.release(t, id)
	if _, err := os.Stat(g.fs.subvolumes.sysfs + "/" + groupDir(id)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the qgroup after the release: got %v, want %v", err, os.ErrNotExist)
	}
}

// testUnassign: a qgroup can be removed when the subvolume is no longer a member of it.
func testUnassign(t *testing.T, g *testFS) {
	_, id := g.createLimited(t, "unassigned", Limit{Bytes: mib})
	s := g.fs.subvolumes
	for range 2 {
		must(t, s.unassign(id, group(id)))
	}
	must(t, s.removeGroup(group(id)))
	if id := g.idOf(t, "unassigned"); id != 0 {
		t.Errorf("got ID %d, want 0", id)
	}
	g.remove(t, "unassigned")
}

// TestBtrfsUnlinked: Release frees an ID whose directory was removed by rmdir(2). It does not wait for the
// commit that the kernel makes every 30 seconds.
func TestBtrfsUnlinked(t *testing.T) {
	g := openKind(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	path, id := g.createLimited(t, "unlinked", Limit{Bytes: mib})
	must(t, os.Remove(path))
	must(t, retry.For(t.Context(), 20*time.Second, func() (bool, error) {
		err := g.fs.Release(id)
		return errors.Is(err, ErrBusy), err
	}))
}

// testOffAndOn: after quotas were switched off and on, Set restores a limit for later writes.
func testOffAndOn(t *testing.T, g *testFS) {
	const limit = 16 * mib
	path, id := g.createLimited(t, "off", Limit{Bytes: limit})
	inner := subvolumeCreate(t, path, "inner")
	testenv.SwitchQuotas(t, g.path, false)
	if err := g.fs.Check(); err == nil || !strings.Contains(err.Error(), "btrfs quota enable --simple") {
		t.Errorf("Check with quotas off: got %v, want the remedy", err)
	}
	if err := g.fs.Set(id, Limit{Bytes: limit}); err == nil {
		t.Error("Set with quotas off: got no error")
	}
	must(t, g.fs.Release(id))
	testenv.SwitchQuotas(t, g.path, true)
	must(t, g.fs.Check())
	must(t, g.fs.Set(id, Limit{Bytes: limit}))
	fill(t, filepath.Join(inner, "file"), asRoot)
	if u := g.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("got usage %+v, want between %d and %d bytes", u, limit-mib, limit)
	}
	g.remove(t, "off")
	g.release(t, id)
}

// TestOverride: check rejects a filesystem with a quota override. The test uses another directory in place of sysfs,
// because writing to sysfs needs CAP_SYS_RESOURCE.
func TestOverride(t *testing.T) {
	s := &subvolumes{sysfs: t.TempDir()}
	must(t, os.Mkdir(filepath.Join(s.sysfs, "qgroups"), 0o755))
	must(t, os.WriteFile(filepath.Join(s.sysfs, "qgroups", "mode"), []byte("squota\n"), 0o600))
	for _, override := range []string{"1", "0"} {
		must(t, os.WriteFile(filepath.Join(s.sysfs, "quota_override"), []byte(override+"\n"), 0o600))
		if err := s.check(); (err == nil) != (override == "0") {
			t.Errorf("check with quota_override %s: got %v, want an error only for 1", override, err)
		}
	}
}
