//go:build vm

package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
)

// projectDisk creates a filesystem with project quota. For ext4 it runs the command that Why recommends.
func projectDisk(t *testing.T, fsType string) *disk {
	t.Helper()
	d := newDisk(t, fsType, "512M", "prjquota")
	if fsType == "ext4" {
		testenv.Run(t, "tune2fs", "-O", "project,quota", "-Q", "prjquota", d.image)
	}
	d.mount(t)
	return d
}

// TestProjects tests the limits of project quota.
func TestProjects(t *testing.T) {
	for fsType, kind := range map[string]Kind{"xfs": XFS, "ext4": Ext4} {
		t.Run(fsType, func(t *testing.T) {
			const block = 4096 // bytes
			d := projectDisk(t, fsType)
			fsys := openKind(t, kind, d.at)
			root := asRoot
			if kind == Ext4 {
				root = asLimitedRoot
			}
			t.Run("root", func(t *testing.T) { testWriter(t, fsys, root, 2*block) })
			t.Run("unprivileged user", func(t *testing.T) { testWriter(t, fsys, asNobody, 2*block) })
			t.Run("parallel", func(t *testing.T) { testParallel(t, fsys) })
			t.Run("release", func(t *testing.T) { testRelease(t, fsys) })
			t.Run("statfs", func(t *testing.T) { testStatfs(t, fsys) })
			t.Run("inodes", func(t *testing.T) { testInodes(t, fsys) })
			t.Run("rounding", func(t *testing.T) { testRounding(t, fsys) })
			t.Run("IDs in use", func(t *testing.T) { testUsedIDs(t, fsys) })
			t.Run("parallel processes", func(t *testing.T) { testProcesses(t, fsys) })
			t.Run("IDs out of range", func(t *testing.T) { testOutOfRange(t, fsys) })
			t.Run("enforcement off", func(t *testing.T) { testOff(t, fsys) })
		})
	}
}

// TestProjectsCrash: limits survive a crash. After the shutdown ioctl, the disk has only what was written before it.
func TestProjectsCrash(t *testing.T) {
	const (
		goingDown = 0x8004587d // XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN
		noFlush   = 2          // XFS_FSOP_GOING_FLAGS_NOLOGFLUSH, EXT4_GOING_FLAGS_NOLOGFLUSH
	)
	for _, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			d := projectDisk(t, fsType)
			fsys := openFS(t, d.at)
			testDurable(t, d, fsys, func() {
				how := uint32(noFlush)
				rawIoctl(t, fsys.dir, goingDown, unsafe.Pointer(&how))
				fsys.close()
				d.unmount(t)
			})
		})
	}
}

// TestProjectsWhy: Why contains the remedy if project quota is switched off, or counts but enforces no limit.
func TestProjectsWhy(t *testing.T) {
	requireNone(t, testenv.Filesystem(t, "xfs", "512M"), "with the option prjquota")
	requireNone(t, testenv.Filesystem(t, "xfs", "512M", "pqnoenforce"), "not pqnoenforce")
	requireNone(t, testenv.Filesystem(t, "ext4", "64M"), "tune2fs -O project,quota")
	notEnforced := newDisk(t, "ext4", "64M")
	testenv.Run(t, "tune2fs", "-O", "project,quota", "-Q", "prjquota", notEnforced.image)
	notEnforced.mount(t)
	requireNone(t, notEnforced.at, "with the option prjquota")
	if !hasSimpleQuotas(t) { // otherwise TestBtrfsWhy tests the remedy
		requireNone(t, testenv.Filesystem(t, "btrfs", "256M"), "Linux 6.7")
	}
}

// hasSimpleQuotas reports whether the kernel is Linux 6.7 or newer.
func hasSimpleQuotas(t *testing.T) bool {
	t.Helper()
	var u unix.Utsname
	must(t, unix.Uname(&u))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	must(t, err)
	return major > 6 || major == 6 && minor >= 7
}

// testStatfs: statfs(2) of a limited directory returns the limit as the size of the filesystem.
func testStatfs(t *testing.T, fsys *testFS) {
	path, id := fsys.createLimited(t, "statfs", Limit{Bytes: 16 * mib, Inodes: 1000})
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	if size := int64(st.Blocks) * st.Bsize; size != 16*mib || st.Files != 1000 {
		t.Errorf("statfs: got %d bytes and %d inodes, want %d and 1000", size, st.Files, 16*mib)
	}
	fsys.remove(t, "statfs")
	fsys.release(t, id)
}

// testInodes: the limit of inodes is enforced, can be raised, and can be removed.
func testInodes(t *testing.T, fsys *testFS) {
	path, id := fsys.createLimited(t, "inodes", Limit{Bytes: 16 * mib, Inodes: 10})
	testenv.Run(t, "chown", "-R", "65534", path)
	createFiles := func() int {
		testenv.Run(t, "bash", "-c", "cd "+path+" && "+strings.Join(asNobody, " ")+" bash -c 'for i in {1..30}; do : > $i; done' 2> /dev/null || :")
		names, err := os.ReadDir(path)
		must(t, err)
		return len(names)
	}
	for _, limit := range []int64{10, 20} {
		must(t, fsys.fs.Set(id, Limit{Bytes: 16 * mib, Inodes: limit}))
		if n := createFiles(); n != int(limit)-1 { // the directory counts too
			t.Errorf("created %d files with a limit of %d inodes, want %d", n, limit, limit-1)
		}
		if u := fsys.usage(t, id); u.Inodes != limit || u.Limit.Inodes != limit {
			t.Errorf("got usage %+v, want %d inodes and a limit of %d", u, limit, limit)
		}
	}
	must(t, fsys.fs.Set(id, Limit{Bytes: 16 * mib}))
	if n := createFiles(); n != 30 {
		t.Errorf("created %d files without a limit of inodes, want 30", n)
	}
	fsys.remove(t, "inodes")
	fsys.release(t, id)
}

// testRounding: a limit is rounded up by less than a block.
func testRounding(t *testing.T, fsys *testFS) {
	const requested, block = 16*mib - 1, 4096
	_, id := fsys.createLimited(t, "rounding", Limit{Bytes: requested})
	if u := fsys.usage(t, id); u.Limit.Bytes < requested || u.Limit.Bytes >= requested+block {
		t.Errorf("got limit %d, want %d rounded up to a block of %d", u.Limit.Bytes, requested, block)
	}
	fsys.remove(t, "rounding")
	fsys.release(t, id)
}

// setPicks makes pick return the IDs in order, repeatedly.
func (fsys *testFS) setPicks(ids ...uint32) {
	p := fsys.fs.limits.(*projects)
	p.pick = func() uint32 {
		id := ids[0]
		ids = append(ids[1:], id)
		return id
	}
}

// testUsedIDs: Allocate does not choose an ID that a file has, that has a limit, or that is recorded.
func testUsedIDs(t *testing.T, fsys *testFS) {
	const used, limited, both, recorded, free = minProject + 1, minProject + 2, minProject + 3, minProject + 4, minProject + 5
	p := fsys.fs.limits.(*projects)
	defer func(pick func() uint32) { p.pick = pick }(p.pick)
	for name, id := range map[string]uint32{"used": used, "both": both} {
		f, err := os.Create(filepath.Join(fsys.path, name))
		must(t, err)
		_, err = sys.ChangeAttributes(f, func(a *sys.Attributes) { a.Project = id })
		must(t, err)
		f.Close()
	}
	for _, id := range []uint32{limited, both} {
		must(t, p.limit(id, Limit{Inodes: 1000}))
	}
	fsys.setPicks(used, limited, both, recorded, free)
	dir := fsys.create(t, "others")
	defer dir.Close()
	id, err := fsys.fs.Allocate(dir, Limit{Bytes: mib}, func(id uint64) bool { return id == recorded })
	if err != nil || id != free {
		t.Errorf("Allocate: got ID %d, %v, want %d", id, err, free)
	}
	fsys.setPicks(used)
	again := fsys.create(t, "again")
	defer again.Close()
	if id, err := fsys.fs.Allocate(again, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("Allocate returned ID %d, want an error because it is in use", id)
	}
	limit := Limit{Inodes: 1000}
	for id, want := range map[uint64]Usage{used: {Inodes: 1}, limited: {Limit: limit}, both: {Inodes: 1, Limit: limit}} {
		if u := fsys.usage(t, id); u != want {
			t.Errorf("usage of project %d: got %+v, want %+v", id, u, want)
		}
	}
}

// testProcesses: processes get different IDs even if they pick the same IDs. Each process is simulated by a value of
// projects with its own lock, because processes share no lock.
func testProcesses(t *testing.T, fsys *testFS) {
	const n, tries = 4, 20
	for try := range tries {
		ids := make([]uint64, n)
		errs := make([]error, n)
		var all sync.WaitGroup
		for i := range n {
			dir := fsys.create(t, fmt.Sprint("process-", try, "-", i))
			other := &projects{kind: fsys.fs.Kind(), dir: fsys.dir, choosing: new(sync.Mutex), pick: consecutive(uint32(minProject + 1000*(1+try)))}
			all.Go(func() {
				defer dir.Close()
				ids[i], errs[i] = other.allocate(dir, Limit{Bytes: mib}, noneTaken)
			})
		}
		all.Wait()
		must(t, errors.Join(errs...))
		slices.Sort(ids)
		if len(slices.Compact(ids)) != n {
			t.Errorf("got IDs %d, want different ones", ids)
		}
	}
}

// consecutive returns a pick function that returns consecutive IDs.
func consecutive(from uint32) func() uint32 {
	return func() uint32 {
		from++
		return from
	}
}

// testOutOfRange: IDs outside of the range that the driver uses are refused.
func testOutOfRange(t *testing.T, fsys *testFS) {
	dir := fsys.create(t, "foreign")
	defer dir.Close()
	must(t, setProject(dir, 42))
	if id, err := fsys.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("got ID %d, %v, want 0", id, err)
	}
	for _, id := range []uint64{0, 42, 1 << 32, 1<<32 | minProject} {
		if err := fsys.fs.Set(id, Limit{Bytes: mib}); err == nil {
			t.Errorf("Set of ID %d: got no error, want one", id)
		}
		if err := fsys.fs.Release(id); err == nil {
			t.Errorf("Release of ID %d: got no error, want one", id)
		}
	}
}

// testOff: Check fails after an administrator has switched enforcement off.
func testOff(t *testing.T, fsys *testFS) {
	const qXQuotaOff = 'X'<<8 + 2 // Q_XQUOTAOFF
	fsys.createLimited(t, "off", Limit{Bytes: mib})
	flags := uint32(sys.ProjectQuotaEnforced)
	const projectQuota = 2 // PRJQUOTA
	if _, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, fsys.dir.Fd(), qXQuotaOff<<8|projectQuota, 0, uintptr(unsafe.Pointer(&flags)), 0, 0); errno != 0 {
		t.Fatalf("Q_XQUOTAOFF: %v", errno)
	}
	if err := fsys.fs.Check(); err == nil || !strings.Contains(err.Error(), "with the option prjquota") {
		t.Errorf("Check: got %v, want the remedy", err)
	}
}
