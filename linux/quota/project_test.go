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

// projectDisk creates a filesystem with project quota. For ext4 it uses the remedy from Why.
func projectDisk(t *testing.T, fsType string) *disk {
	t.Helper()
	d := newDisk(t, fsType, "512M", "prjquota")
	if fsType == "ext4" {
		testenv.Run(t, "tune2fs", "-O", "project,quota", "-Q", "prjquota", d.image)
	}
	d.mount(t)
	return d
}

func TestProjects(t *testing.T) {
	for fsType, kind := range map[string]Kind{"xfs": XFS, "ext4": Ext4} {
		t.Run(fsType, func(t *testing.T) {
			const block = 4096
			d := projectDisk(t, fsType)
			g := openedAs(t, kind, d.at)
			root := asRoot
			if kind == Ext4 {
				root = asPlainRoot
			}
			t.Run("root", func(t *testing.T) { testWriter(t, g, root, 2*block) })
			t.Run("unprivileged user", func(t *testing.T) { testWriter(t, g, asNobody, 2*block) })
			t.Run("parallel", func(t *testing.T) { testParallel(t, g) })
			t.Run("release", func(t *testing.T) { testRelease(t, g) })
			t.Run("statfs", func(t *testing.T) { testStatfs(t, g) })
			t.Run("inodes", func(t *testing.T) { testInodes(t, g) })
			t.Run("rounding", func(t *testing.T) { testRounding(t, g) })
			t.Run("others", func(t *testing.T) { testOthers(t, g) })
			t.Run("processes", func(t *testing.T) { testProcesses(t, g) })
			t.Run("foreign", func(t *testing.T) { testForeign(t, g) })
			t.Run("off", func(t *testing.T) { testOff(t, g) })
		})
	}
}

// TestProjectsCrash: limits are durable. After the shutdown the disk has the content of the journal.
func TestProjectsCrash(t *testing.T) {
	const (
		goingDown = 0x8004587d // XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN
		noFlush   = 2          // XFS_FSOP_GOING_FLAGS_NOLOGFLUSH, EXT4_GOING_FLAGS_NOLOGFLUSH
	)
	for _, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			d := projectDisk(t, fsType)
			g := opened(t, d.at)
			testDurable(t, d, g, func() {
				how := uint32(noFlush)
				rawIoctl(t, g.dir, goingDown, unsafe.Pointer(&how))
				g.close()
				d.unmount(t)
			})
		})
	}
}

func TestProjectsWhy(t *testing.T) {
	requireNone(t, testenv.Filesystem(t, "xfs", "512M"), "with the option prjquota")
	requireNone(t, testenv.Filesystem(t, "xfs", "512M", "pqnoenforce"), "not pqnoenforce")
	requireNone(t, testenv.Filesystem(t, "ext4", "64M"), "tune2fs -O project,quota")
	counting := newDisk(t, "ext4", "64M")
	testenv.Run(t, "tune2fs", "-O", "project,quota", "-Q", "prjquota", counting.image)
	counting.mount(t)
	requireNone(t, counting.at, "with the option prjquota")
	requireNone(t, testenv.Filesystem(t, "btrfs", "256M"), "Linux 6.7")
}

// testStatfs: statfs(2) of the directory returns the limit as its size.
func testStatfs(t *testing.T, g *ground) {
	path, id := g.limited(t, "statfs", Limit{Bytes: 16 * mib, Inodes: 1000})
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	if size := int64(st.Blocks) * st.Bsize; size != 16*mib || st.Files != 1000 {
		t.Errorf("statfs shows %d bytes and %d inodes", size, st.Files)
	}
	g.remove(t, "statfs")
	g.release(t, id)
}

// testInodes: the limit of inodes applies, can be raised, and can be removed.
func testInodes(t *testing.T, g *ground) {
	path, id := g.limited(t, "inodes", Limit{Bytes: 16 * mib, Inodes: 10})
	testenv.Run(t, "chown", "-R", "65534", path)
	createFiles := func() int {
		testenv.Run(t, "bash", "-c", "cd "+path+" && "+strings.Join(asNobody, " ")+" bash -c 'for i in {1..30}; do : > $i; done' 2> /dev/null || :")
		names, err := os.ReadDir(path)
		must(t, err)
		return len(names)
	}
	for _, limit := range []int64{10, 20} {
		must(t, g.fs.Set(id, Limit{Bytes: 16 * mib, Inodes: limit}))
		if n := createFiles(); n != int(limit)-1 { // the directory counts too
			t.Errorf("%d files were created, the limit is %d inodes", n, limit)
		}
		if u := g.usage(t, id); u.Inodes != limit || u.Limit.Inodes != limit {
			t.Errorf("the usage is %+v, the limit %d inodes", u, limit)
		}
	}
	must(t, g.fs.Set(id, Limit{Bytes: 16 * mib}))
	if n := createFiles(); n != 30 {
		t.Errorf("%d files were created without a limit of inodes", n)
	}
	g.remove(t, "inodes")
	g.release(t, id)
}

// testRounding: a limit is rounded up by less than a block.
func testRounding(t *testing.T, g *ground) {
	const requested, block = 16*mib - 1, 4096
	_, id := g.limited(t, "rounding", Limit{Bytes: requested})
	if u := g.usage(t, id); u.Limit.Bytes < requested || u.Limit.Bytes >= requested+block {
		t.Errorf("the limit is %d, requested %d", u.Limit.Bytes, requested)
	}
	g.remove(t, "rounding")
	g.release(t, id)
}

// picking makes the IDs the next ones to be picked, repeatedly.
func (g *ground) picking(ids ...uint32) {
	p := g.fs.limits.(*projects)
	p.pick = func() uint32 {
		id := ids[0]
		ids = append(ids[1:], id)
		return id
	}
}

// testOthers: Allocate does not choose an ID that is in use in any way.
func testOthers(t *testing.T, g *ground) {
	const used, limited, both, recorded, free = minProject + 1, minProject + 2, minProject + 3, minProject + 4, minProject + 5
	p := g.fs.limits.(*projects)
	defer func(pick func() uint32) { p.pick = pick }(p.pick)
	for name, id := range map[string]uint32{"used": used, "both": both} {
		f, err := os.Create(filepath.Join(g.path, name))
		must(t, err)
		_, err = sys.ChangeAttributes(f, func(a *sys.Attributes) { a.Project = id })
		must(t, err)
		f.Close()
	}
	for _, id := range []uint32{limited, both} {
		must(t, p.limit(id, Limit{Inodes: 1000}))
	}
	g.picking(used, limited, both, recorded, free)
	dir := g.made(t, "others")
	defer dir.Close()
	id, err := g.fs.Allocate(dir, Limit{Bytes: mib}, func(id uint64) bool { return id == recorded })
	if err != nil || id != free {
		t.Errorf("allocate returned %d, %v, want %d", id, err, free)
	}
	g.picking(used)
	again := g.made(t, "again")
	defer again.Close()
	if id, err := g.fs.Allocate(again, Limit{Bytes: mib}, noneTaken); err == nil {
		t.Errorf("allocate returned %d, which is in use", id)
	}
	limit := Limit{Inodes: 1000}
	for id, want := range map[uint64]Usage{used: {Inodes: 1}, limited: {Limit: limit}, both: {Inodes: 1, Limit: limit}} {
		if u := g.usage(t, id); u != want {
			t.Errorf("project %d has %+v, want %+v", id, u, want)
		}
	}
}

// testProcesses: processes that do not share the lock and pick the same IDs get different IDs.
func testProcesses(t *testing.T, g *ground) {
	const n, tries = 4, 20
	for try := range tries {
		ids := make([]uint64, n)
		errs := make([]error, n)
		var all sync.WaitGroup
		for i := range n {
			dir := g.made(t, fmt.Sprint("process-", try, "-", i))
			other := &projects{kind: g.fs.Kind(), dir: g.dir, choosing: new(sync.Mutex), pick: counting(uint32(minProject + 1000*(1+try)))}
			all.Go(func() {
				defer dir.Close()
				ids[i], errs[i] = other.allocate(dir, Limit{Bytes: mib}, noneTaken)
			})
		}
		all.Wait()
		must(t, errors.Join(errs...))
		slices.Sort(ids)
		if len(slices.Compact(ids)) != n {
			t.Errorf("an ID is shared: %d", ids)
		}
	}
}

// counting picks consecutive IDs.
func counting(from uint32) func() uint32 {
	return func() uint32 {
		from++
		return from
	}
}

// testForeign: IDs outside of the range of the driver are refused.
func testForeign(t *testing.T, g *ground) {
	dir := g.made(t, "foreign")
	defer dir.Close()
	must(t, setProject(dir, 42))
	if id, err := g.fs.ID(dir); id != 0 || err != nil {
		t.Errorf("ID %d, %v", id, err)
	}
	for _, id := range []uint64{0, 42, 1 << 32, 1<<32 | minProject} {
		if err := g.fs.Set(id, Limit{Bytes: mib}); err == nil {
			t.Errorf("the limit of %d was set", id)
		}
		if err := g.fs.Release(id); err == nil {
			t.Errorf("%d was released", id)
		}
	}
}

// testOff: Check fails after an administrator has switched enforcement off.
func testOff(t *testing.T, g *ground) {
	const qXQuotaOff = 'X'<<8 + 2
	g.limited(t, "off", Limit{Bytes: mib})
	flags := uint32(sys.ProjectQuotaEnforced)
	const projectQuota = 2 // PRJQUOTA
	if _, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, g.dir.Fd(), qXQuotaOff<<8|projectQuota, 0, uintptr(unsafe.Pointer(&flags)), 0, 0); errno != 0 {
		t.Fatalf("Q_XQUOTAOFF: %v", errno)
	}
	if err := g.fs.Check(); err == nil || !strings.Contains(err.Error(), "with the option prjquota") {
		t.Errorf("check: %v", err)
	}
}
