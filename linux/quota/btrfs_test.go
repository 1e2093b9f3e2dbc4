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

// TestBtrfs tests the limits of subvolumes.
func TestBtrfs(t *testing.T) {
	const metadata = 256 << 10 // bytes that the filesystem itself uses
	fsys := openKind(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	t.Run("root", func(t *testing.T) { testWriter(t, fsys, asRoot, metadata) })
	t.Run("unprivileged user", func(t *testing.T) { testWriter(t, fsys, asNobody, metadata) })
	t.Run("parallel", func(t *testing.T) { testParallel(t, fsys) })
	t.Run("release", func(t *testing.T) { testRelease(t, fsys) })
	t.Run("nested", func(t *testing.T) { testNested(t, fsys) })
	t.Run("deep", func(t *testing.T) { testDeep(t, fsys) })
	t.Run("mount point", func(t *testing.T) { testMountPoint(t, fsys) })
	t.Run("not a subvolume", func(t *testing.T) { testNoSubvolume(t, fsys) })
	t.Run("ID in use", func(t *testing.T) { testUsedID(t, fsys) })
	t.Run("interrupted", func(t *testing.T) { testInterrupted(t, fsys) })
	t.Run("qgroup without subvolume", func(t *testing.T) { testUnassign(t, fsys) })
	t.Run("quotas off and on", func(t *testing.T) { testOffAndOn(t, fsys) })
}

// TestBtrfsCrash: limits survive a crash. A copy of the image of the mounted filesystem has the state after a crash.
func TestBtrfsCrash(t *testing.T) {
	d := newDisk(t, "btrfs", "512M")
	d.mount(t)
	testenv.SwitchQuotas(t, d.at, true)
	fsys := openKind(t, Btrfs, d.at)
	testDurable(t, d, fsys, func() {
		testenv.Run(t, "cp", "--sparse=always", d.image, d.image+".crashed")
		fsys.close()
		d.unmount(t)
		d.image += ".crashed"
	})
}

// TestBtrfsWhy: Why contains the command that corrects the quotas of a btrfs.
func TestBtrfsWhy(t *testing.T) {
	at := testenv.Filesystem(t, "btrfs", "256M")
	requireNone(t, at, "btrfs quota enable --simple")
	testenv.Run(t, "btrfs", "quota", "enable", at)
	requireNone(t, at, "btrfs quota disable")
}

// subvolumeCreate creates a subvolume as a tenant does, and returns its path.
func subvolumeCreate(t *testing.T, path ...string) string {
	t.Helper()
	at := filepath.Join(path...)
	testenv.Run(t, "btrfs", "subvolume", "create", at)
	return at
}

// testNested: subvolumes that a tenant creates in a limited subvolume count towards its limit and are removed
// with it, even if the tenant has made them read-only or immutable.
func testNested(t *testing.T, fsys *testFS) {
	const limit = 16 * mib
	path, id := fsys.createLimited(t, "nested", Limit{Bytes: limit})
	outer := subvolumeCreate(t, path, "outer")
	inner := subvolumeCreate(t, outer, "inner")
	folder := filepath.Join(inner, "folder")
	must(t, os.Mkdir(folder, 0o755))
	fixed := subvolumeCreate(t, folder, "fixed")
	testenv.Run(t, "btrfs", "subvolume", "snapshot", "-r", fixed, filepath.Join(inner, "snapshot"))
	testenv.Run(t, "chattr", "+i", fixed, folder, path)
	must(t, os.Chmod(inner, 0o777))
	fill(t, filepath.Join(inner, "file"), asNobody)
	if u := fsys.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("got usage %+v, want between %d and %d bytes", u, limit-mib, limit)
	}
	for _, subvolume := range []string{inner, outer} {
		testenv.Run(t, "btrfs", "property", "set", subvolume, "ro", "true")
	}
	if members, err := fsys.fs.subvolumes.members(group(id)); err != nil || len(members) != 5 {
		t.Errorf("got members %v, %v, want 5: the limited subvolume, outer, inner, fixed and snapshot", members, err)
	}
	fsys.remove(t, "nested")
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the removed directory: got %v, want %v", err, os.ErrNotExist)
	}
	fsys.release(t, id)
}

// testDeep: RemoveDir destroys more subvolumes than the kernel lists at once, and subvolumes that are nested deeper
// than PATH_MAX.
func testDeep(t *testing.T, fsys *testFS) {
	_, id := fsys.createLimited(t, "deep", Limit{Bytes: 64 * mib})
	at, err := openDir(fsys.dir, "deep")
	must(t, err)
	for i := range 300 {
		must(t, fsys.fs.MakeDir(at, fmt.Sprint("beside-", i)))
	}
	for range 25 {
		name := strings.Repeat("d", unix.NAME_MAX)
		must(t, fsys.fs.MakeDir(at, name))
		below, err := openDir(at, name)
		must(t, err)
		at.Close()
		at = below
	}
	at.Close()
	fsys.remove(t, "deep")
	fsys.release(t, id)
}

// testMountPoint: RemoveDir does not remove a subvolume that is mounted at a directory.
func testMountPoint(t *testing.T, fsys *testFS) {
	path, id := fsys.createLimited(t, "elsewhere", Limit{Bytes: mib})
	dir := fsys.create(t, "mounted")
	dir.Close()
	at := dir.Name()
	testenv.Run(t, "mount", "--bind", path, at)
	t.Cleanup(func() { testenv.Run(t, "umount", at) })
	if done, err := fsys.fs.RemoveDir(fsys.dir, "mounted"); done || !errors.Is(err, unix.EXDEV) {
		t.Errorf("RemoveDir: got %t, %v, want false and EXDEV", done, err)
	}
	if got := fsys.idOf(t, "elsewhere"); got != id {
		t.Errorf("ID of the mounted subvolume: got %d, want %d", got, id)
	}
}

// testNoSubvolume: a directory that is not a subvolume gets no limit, and RemoveDir does not remove it.
func testNoSubvolume(t *testing.T, fsys *testFS) {
	must(t, unix.Mkdirat(int(fsys.dir.Fd()), "plain", dirMode))
	dir, err := openDir(fsys.dir, "plain")
	must(t, err)
	defer dir.Close()
	if id, err := fsys.fs.Allocate(dir, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error", id)
	}
	if id, err := fsys.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("got ID %d, %v, want 0", id, err)
	}
	if done, err := fsys.fs.RemoveDir(fsys.dir, "plain"); done || err != nil {
		t.Errorf("RemoveDir: got %t, %v, want false", done, err)
	}
	if err := fsys.fs.MakeDir(fsys.dir, "plain"); !errors.Is(err, os.ErrExist) {
		t.Errorf("creating the directory again: got %v, want %v", err, os.ErrExist)
	}
}

// testUsedID: Allocate refuses an ID that is recorded for another directory or that has a qgroup.
func testUsedID(t *testing.T, fsys *testFS) {
	recorded := fsys.create(t, "recorded")
	if id, err := fsys.fs.Allocate(recorded, Limit{Bytes: mib}, func(uint64) bool { return true }); err == nil {
		t.Errorf("Allocate returned ID %d, want an error because it is recorded", id)
	}
	recorded.Close()
	foreign := fsys.create(t, "foreign")
	defer foreign.Close()
	id, err := subvolume(foreign)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "create", fmt.Sprint("1/", id), fsys.path)
	member := fsys.create(t, "member")
	defer member.Close()
	memberID, err := subvolume(member)
	must(t, err)
	testenv.Run(t, "btrfs", "qgroup", "assign", fmt.Sprint("0/", memberID), fmt.Sprint("1/", id), fsys.path)
	if id, err := fsys.fs.Allocate(foreign, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error because it has a qgroup", id)
	}
	if u := fsys.usage(t, id); u != (Usage{}) {
		t.Errorf("the existing qgroup changed: got usage %+v, want none", u)
	}
	if id := fsys.idOf(t, "foreign"); id != 0 {
		t.Errorf("got ID %d, want 0 because Allocate failed", id)
	}
	for _, name := range []string{"recorded", "foreign"} {
		fsys.remove(t, name)
	}
	fsys.createLimited(t, "next", Limit{Bytes: mib})
}

// testInterrupted: a qgroup is released if Allocate was killed before it assigned the subvolume.
func testInterrupted(t *testing.T, fsys *testFS) {
	dir := fsys.create(t, "interrupted")
	id, err := subvolume(dir)
	must(t, err)
	must(t, dir.Close())
	must(t, sys.CreateQgroup(fsys.dir, group(id)))
	if got := fsys.idOf(t, "interrupted"); got != id {
		t.Errorf("got ID %d, want %d", got, id)
	}
	fsys.remove(t, "interrupted")
	fsys.release(t, id)
	if _, err := os.Stat(fsys.fs.subvolumes.sysfs + "/" + groupDir(id)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the qgroup after the release: got %v, want %v", err, os.ErrNotExist)
	}
}

// testUnassign: a qgroup can be removed when the subvolume is no longer a member of it.
func testUnassign(t *testing.T, fsys *testFS) {
	_, id := fsys.createLimited(t, "unassigned", Limit{Bytes: mib})
	s := fsys.fs.subvolumes
	for range 2 {
		must(t, s.unassign(id, group(id)))
	}
	must(t, s.removeGroup(group(id)))
	if id := fsys.idOf(t, "unassigned"); id != 0 {
		t.Errorf("got ID %d, want 0", id)
	}
	fsys.remove(t, "unassigned")
}

// TestBtrfsUnlinked: Release frees an ID whose directory was removed by rmdir(2). Release does not wait for
// the commit that the kernel makes every 30 seconds.
func TestBtrfsUnlinked(t *testing.T) {
	fsys := openKind(t, Btrfs, testenv.SimpleQuotas(t, "512M"))
	path, id := fsys.createLimited(t, "unlinked", Limit{Bytes: mib})
	must(t, os.Remove(path))
	must(t, retry.For(t.Context(), 20*time.Second, func() (bool, error) {
		err := fsys.fs.Release(id)
		return errors.Is(err, ErrBusy), err
	}))
}

// testOffAndOn: after quotas were switched off and on, Set restores a limit for later writes.
func testOffAndOn(t *testing.T, fsys *testFS) {
	const limit = 16 * mib
	path, id := fsys.createLimited(t, "off", Limit{Bytes: limit})
	inner := subvolumeCreate(t, path, "inner")
	testenv.SwitchQuotas(t, fsys.path, false)
	if err := fsys.fs.Check(); err == nil || !strings.Contains(err.Error(), "btrfs quota enable --simple") {
		t.Errorf("Check with quotas off: got %v, want the remedy", err)
	}
	if err := fsys.fs.Set(id, Limit{Bytes: limit}); err == nil {
		t.Error("Set with quotas off: got no error, want one")
	}
	must(t, fsys.fs.Release(id))
	testenv.SwitchQuotas(t, fsys.path, true)
	must(t, fsys.fs.Check())
	must(t, fsys.fs.Set(id, Limit{Bytes: limit}))
	fill(t, filepath.Join(inner, "file"), asRoot)
	if u := fsys.usage(t, id); u.Bytes > limit || u.Bytes < limit-mib {
		t.Errorf("got usage %+v, want between %d and %d bytes", u, limit-mib, limit)
	}
	fsys.remove(t, "off")
	fsys.release(t, id)
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
