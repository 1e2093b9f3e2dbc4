package blockdev_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestDeviceSource: a source distinguishes mounts of its filesystem, bind mounts of its device node, and other
// mounts.
func TestDeviceSource(t *testing.T) {
	at := testenv.Filesystem(t, "btrfs", "128M")
	e, err := mount.OnPath(at)
	must(t, err)
	dir := t.TempDir()
	node, foreign := filepath.Join(dir, "node"), filepath.Join(dir, "foreign")
	must(t, os.WriteFile(node, nil, 0o600))
	must(t, os.Mkdir(foreign, 0o700))
	for path, from := range map[string]string{node: e.Source, foreign: t.TempDir()} {
		must(t, mount.Bind(from, path, mount.Options{}))
		t.Cleanup(func() { must(t, mount.Unmount(path)) })
	}
	filesystem, raw := &blockdev.DeviceSource{Path: e.Source, FSType: "btrfs"}, &blockdev.DeviceSource{Path: e.Source}
	for _, tc := range []struct {
		path            string
		filesystem, raw bool // the expected results of Shows of both sources
		owned           bool // the expected result of Owns of filesystem
	}{
		{path: at, filesystem: true, raw: true, owned: true},
		{path: node, raw: true, owned: true},
		{path: foreign},
		{path: dir}, // not mounted
		{path: filepath.Join(dir, "missing")},
	} {
		shows, err := filesystem.Shows(tc.path)
		must(t, err)
		rawShows, err := raw.Shows(tc.path)
		must(t, err)
		owns, err := filesystem.Owns(tc.path)
		must(t, err)
		if shows != tc.filesystem || rawShows != tc.raw || owns != tc.owned {
			t.Errorf("%s: got shown by the filesystem %t, by the raw device %t, owned %t, want %+v", tc.path, shows, rawShows, owns, tc)
		}
	}
	if mounts, err := mount.Of(filesystem); err != nil || len(mounts) != 2 {
		t.Errorf("got mounts %v, %v, want two", mounts, err)
	}
	must(t, filesystem.Grow())
	if problems, err := filesystem.Problems(); err != nil || len(problems) > 0 {
		t.Errorf("got problems %v, %v, want none", problems, err)
	}
}

// withoutListing runs do as on a kernel without listmount(2) and statmount(2), where the mount table is read.
func withoutListing(tb testing.TB, errno syscall.Errno, do func()) {
	tb.Helper()
	testenv.Forbid(tb, errno, []uint32{unix.SYS_LISTMOUNT, unix.SYS_STATMOUNT}, do)
}

// TestElsewhere: all mount points of a filesystem and of its device are found, except those at the staging path, also if it
// has two paths. The result is the same on each kernel.
func TestElsewhere(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			staged := testenv.Filesystem(t, fsType, "300M")
			e, err := mount.OnPath(staged)
			must(t, err)
			source := &blockdev.DeviceSource{Path: e.Source, FSType: fsType}
			elsewhere := func(mountID int, want ...string) {
				t.Helper()
				find := func() {
					got, err := mount.Elsewhere(source, uint64(mountID))
					slices.Sort(got)
					slices.Sort(want)
					if err != nil || !slices.Equal(got, want) {
						t.Errorf("staged as mount %d: got %q, %v, want %q", mountID, got, err, want)
					}
				}
				find()
				withoutListing(t, unix.ENOSYS, find)
				withoutListing(t, unix.EPERM, find)
			}
			bind := func(from, at string) (unmount func()) {
				must(t, mount.Bind(from, at, mount.Options{}))
				return func() { must(t, mount.Unmount(at)) }
			}
			elsewhere(e.ID)
			elsewhere(0, staged)

			dir := t.TempDir()
			pod, node, other := filepath.Join(dir, "pod"), filepath.Join(dir, "node"), filepath.Join(dir, "other")
			must(t, os.WriteFile(node, nil, 0o600))
			must(t, errors.Join(os.Mkdir(pod, 0o700), os.Mkdir(other, 0o700)))
			leave := bind(staged, pod)
			elsewhere(e.ID, pod)
			leave()
			elsewhere(e.ID)

			defer bind(e.Source, node)()
			elsewhere(e.ID, node)
			elsewhere(0, staged, node)

			must(t, unix.Mount(filepath.Dir(staged), other, "", unix.MS_BIND|unix.MS_REC, ""))
			must(t, unix.Mount("", other, "", unix.MS_PRIVATE|unix.MS_REC, "")) // its unmount does not unmount staged
			defer func() { must(t, unix.Unmount(other, unix.MNT_DETACH)) }()
			elsewhere(e.ID, node)
		})
	}
}

// BenchmarkElsewhere measures the check of a ReadWriteOncePod volume, with eight callers.
func BenchmarkElsewhere(b *testing.B) {
	staged := testenv.Filesystem(b, "ext4", "64M")
	e, err := mount.OnPath(staged)
	must(b, err)
	source := &blockdev.DeviceSource{Path: e.Source, FSType: "ext4"}
	ways := []struct {
		name string
		run  func(do func())
	}{
		{"listmount", func(do func()) { do() }},
		{"mount table", func(do func()) { withoutListing(b, unix.ENOSYS, do) }},
	}
	total := 0
	for _, mounts := range []int{100, 1000} {
		mountMany(b, mounts-total)
		total = mounts
		for _, way := range ways {
			b.Run(fmt.Sprintf("%d mounts, %s", mounts, way.name), func(b *testing.B) {
				b.SetParallelism(max(1, 8/runtime.GOMAXPROCS(0)))
				b.RunParallel(func(pb *testing.PB) {
					way.run(func() {
						for pb.Next() {
							if _, err := mount.Elsewhere(source, uint64(e.ID)); err != nil {
								b.Error(err)
							}
						}
					})
				})
			})
		}
	}
}

// mountMany makes n mounts as on a node: half of them are memory, such as tokens and Secrets.
func mountMany(b *testing.B, n int) {
	b.Helper()
	dir, from := b.TempDir(), b.TempDir()
	for i := range n {
		at := filepath.Join(dir, fmt.Sprint(i))
		must(b, os.Mkdir(at, 0o700))
		if i%2 == 0 {
			must(b, unix.Mount("tmpfs", at, "tmpfs", 0, ""))
		} else {
			must(b, mount.Bind(from, at, mount.Options{}))
		}
		b.Cleanup(func() { must(b, unix.Unmount(at, 0)) })
	}
}
