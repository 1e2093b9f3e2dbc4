package blockdev_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

const diskSize = 512 * mib

func newDisk(t *testing.T, options ...string) (blockdev.Disk, string) {
	t.Helper()
	device, image, _ := testenv.Disk(t, diskSize, options...)
	return findDisk(t, device), image
}

func findDisk(t *testing.T, device string) blockdev.Disk {
	t.Helper()
	disks, err := blockdev.FindDisks([]string{device})
	must(t, err)
	if len(disks) != 1 {
		t.Fatalf("%s is %d disks", device, len(disks))
	}
	return disks[0]
}

func claim(t *testing.T, d blockdev.Disk) string {
	t.Helper()
	c, err := d.Claim(t.Context())
	must(t, err)
	must(t, c.Mark("a volume"))
	must(t, c.Close())
	return c.GUID.String()
}

func writeAt(t *testing.T, path string, b []byte, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt(b, at)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

func requireReason(t *testing.T, d blockdev.Disk, want blockdev.Reason, detail string) {
	t.Helper()
	if f := d.Inspect(); f.Reason != want || !strings.Contains(f.Detail, detail) {
		t.Errorf("%s is %s (%s), want %s (%s)", d.Path, f.Reason, f.Detail, want, detail)
	}
}

// requirePresent checks the result of blockdev.Present for a disk that is attached, or was.
func requirePresent(t *testing.T, guid string, want, wantRemoved bool) {
	t.Helper()
	if present, removed, err := blockdev.Present(guid, guid); present != want || removed != wantRemoved || err != nil {
		t.Errorf("present %t, removed %t: %v", present, removed, err)
	}
}

// attachDisk attaches a claimed disk, which no process has open.
func attachDisk(t *testing.T, d blockdev.Disk, guid string) {
	t.Helper()
	part, err := d.Attach(t.Context(), guid, guid)
	must(t, err)
	must(t, part.Close())
}

// grown is a disk after its image got twice its size.
func grown(t *testing.T, d blockdev.Disk, image string) blockdev.Disk {
	t.Helper()
	must(t, os.Truncate(image, 2*diskSize))
	testenv.Run(t, "losetup", "-c", d.Path)
	return findDisk(t, d.Path)
}

// TestDiskLife: a blank disk is free, a claimed disk is found by its mark, and a wiped disk is free again, for all
// sizes of sectors.
func TestDiskLife(t *testing.T) {
	for _, sector := range []string{"512", "4096"} {
		t.Run(sector, func(t *testing.T) {
			d, image := newDisk(t, "-b", sector)
			requireReason(t, d, blockdev.DiskFree, "")
			guid := claim(t, d)
			requireReason(t, d, blockdev.DiskClaimed, guid)
			found, m, err := blockdev.FindClaim([]string{d.Path}, blockdev.Claimed{GUID: guid, Identity: d.Identity})
			must(t, err)
			if !found.Same(d) || m.Name != "a volume" || !m.Complete || m.Damaged || m.Used || m.Size != d.Room() || m.Size%mib != 0 {
				t.Errorf("found %+v with %+v", found, m)
			}
			checkTable(t, image, sector)

			part, err := d.Attach(t.Context(), guid, guid)
			must(t, err)
			size, err := blockdev.Size(part)
			must(t, err)
			if size != d.Room() || part.Name() != blockdev.PartitionPath(guid) {
				t.Errorf("%s has %d bytes, want %d", part.Name(), size, d.Room())
			}
			must(t, blockdev.RequireNoSignature(part))
			_, err = part.WriteAt(bytes.Repeat([]byte("secret"), 10000), 0)
			must(t, errors.Join(err, part.Sync()))
			if err := blockdev.Detach(t.Context(), guid, guid); !errors.Is(err, blockdev.ErrDiskBusy) {
				t.Errorf("detached an open partition: %v", err)
			}
			must(t, part.Close())
			requirePresent(t, guid, true, false)
			must(t, blockdev.Detach(t.Context(), guid, guid))
			requirePresent(t, guid, false, false)

			must(t, d.Wipe(t.Context(), guid, wiping(nil)))
			requireReason(t, d, blockdev.DiskFree, "")
			requireBlankImage(t, image)
		})
	}
}

// checkTable reads a partition table with libblkid.
func checkTable(t *testing.T, image, sector string) {
	t.Helper()
	out := testenv.Run(t, "partx", "--raw", "--noheadings", "--output", "NR,START,TYPE,NAME", "--sector-size", sector, image)
	if want := "1 2048 e855209b-c0f3-4ca6-ac51-2bca4d5e1291 a\\x20volume"; out != want && out != strings.Replace(want, "2048", "256", 1) {
		t.Errorf("partx: %q, want %q", out, want)
	}
}

// TestInspect: a disk with any content is not free, and the detail names the content.
func TestInspect(t *testing.T) {
	label := func(offset int64, magic string) func(*testing.T, string) {
		return func(t *testing.T, dev string) { writeAt(t, dev, []byte(magic), (offset+diskSize)%diskSize) }
	}
	run := func(name string, args ...string) func(*testing.T, string) {
		return func(t *testing.T, dev string) { testenv.Run(t, name, append(args, dev)...) }
	}
	for name, tc := range map[string]struct {
		make   func(t *testing.T, device string)
		detail string
	}{
		"ext4":                {run("mkfs.ext4", "-q"), "ext4"},
		"xfs":                 {run("mkfs.xfs", "-q"), "xfs"},
		"btrfs":               {run("mkfs.btrfs", "-q"), "btrfs"},
		"btrfs, mirror alone": {label(64*mib+0x40, "_BHRfS_M"), "btrfs"},
		"ext4, backup alone":  {label(128*mib+0x38, "\x53\xef"), "data at byte"},
		"swap":                {run("mkswap"), "swap space"},
		"LVM":                 {label(512, "LABELONE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 \x00\x00\x00LVM2 001"), "LVM"},
		"LUKS1":               {label(0, "LUKS\xba\xbe\x00\x01"), "LUKS"},
		"LUKS2":               {label(0, "LUKS\xba\xbe\x00\x02"), "LUKS"},
		"LUKS2, second":       {label(4*mib, "SKUL\xba\xbe\x00\x02"), "LUKS"},
		"md 0.90":             {label(-65536, "\xfc\x4e\x2b\xa9"), "md RAID"},
		"md 1.0":              {label(-8192, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"md 1.1":              {label(0, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"md 1.2":              {label(4096, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"ZFS":                 {label(128<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "ZFS"},
		"ZFS, last label":     {label(-(128 << 10), "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "ZFS"},
		"GPT":                 {label(512, "EFI PART"), "partition table"},
		"GPT, backup alone":   {label(-512, "EFI PART"), "partition table"},
		"MBR":                 {label(510, "\x55\xaa"), "partition table"},
		"ISO 9660":            {label(32<<10, "\x01CD001"), "ISO"},
		"BlueStore":           {label(0, "bluestore block device\n"), "Ceph"},
		"bcache":              {label(4096+24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"), "bcache"},
		"DRBD":                {label(-4096+60, "\x83\x74\x02\x6b"), "data"},
		"one byte, first":     {label(0, "\x01"), "data"},
		"one byte, last":      {label(-1, "\x01"), "data at byte"},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := newDisk(t)
			tc.make(t, d.Path)
			requireReason(t, d, blockdev.DiskNotBlank, tc.detail)
			requireNoClaim(t, d, blockdev.ErrNotBlank)
		})
	}
}

// TestInspectPlaces: random data on a large disk is detected in all places of signatures, at their offsets from the
// beginning and the end of the disk, and of the partition that a claim creates.
func TestInspectPlaces(t *testing.T) {
	const gib, tib = 1 << 30, 1 << 40
	device, _, _ := testenv.Disk(t, 2*tib)
	d := findDisk(t, device)
	requireReason(t, d, blockdev.DiskFree, "")
	places := []int64{
		0, 510, 512, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, // labels and first superblocks
		mib, 2 * mib, 4 * mib, // second headers of LUKS2
		8*mib + 1<<10,       // the first copy of an ext4's with blocks of 1 KiB
		64 * mib, 256 * gib, // mirrors of a btrfs
		gib, 10 * gib, 100 * gib, 1000 * gib, // labels of Ceph's BlueStore
		-1 << 10, -4 << 10, -8 << 10, -64 << 10, -128 << 10, -256 << 10, -512 << 10, // formats with metadata at the end
	}
	places = append(places, backupsOfExt4(t, d)...)
	for _, part := range []struct{ start, size int64 }{{0, d.Size}, {mib, d.Room()}} {
		for _, at := range places {
			at = part.start + (at+part.size)%part.size
			random := make([]byte, 512)
			_, _ = rand.Read(random)
			writeAt(t, d.Path, random, at)
			if c, err := d.Claim(t.Context()); !errors.Is(err, blockdev.ErrNotBlank) {
				t.Fatalf("claimed with data at byte %d: %+v, %v", at, c, err)
			}
			writeAt(t, d.Path, make([]byte, len(random)), at)
		}
	}
	requireReason(t, d, blockdev.DiskFree, "")
}

// backupsOfExt4 returns the offsets at which mke2fs would write copies of the superblock.
func backupsOfExt4(t *testing.T, d blockdev.Disk) (places []int64) {
	t.Helper()
	const blockSize = 4096
	_, list, _ := strings.Cut(testenv.Run(t, "mkfs.ext4", "-n", "-b", strconv.Itoa(blockSize), d.Path), "backups stored on blocks:")
	for _, word := range strings.FieldsFunc(list, func(r rune) bool { return r < '0' || r > '9' }) {
		block, err := strconv.ParseInt(word, 10, 64)
		must(t, err)
		places = append(places, block*blockSize)
	}
	if len(places) < 10 {
		t.Fatalf("mkfs.ext4 lists copies at %d", places)
	}
	return places
}

// written returns the number of sectors that were written to a disk (kernel documentation, block/stat.rst).
func written(t *testing.T, d blockdev.Disk) string {
	t.Helper()
	b, err := os.ReadFile("/sys/class/block/" + d.Name + "/stat")
	must(t, err)
	return strings.Fields(string(b))[6]
}

// TestInspectUse: a blank disk that is in use is not free.
func TestInspectUse(t *testing.T) {
	t.Run("mounted", func(t *testing.T) {
		d, _ := newDisk(t)
		dir := t.TempDir()
		testenv.Run(t, "mkfs.ext4", "-q", d.Path)
		must(t, unix.Mount(d.Path, dir, "ext4", 0, ""))
		t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
		requireReason(t, d, blockdev.DiskMounted, dir)
		if _, err := d.OpenExclusive(t.Context()); !errors.Is(err, blockdev.ErrDiskBusy) {
			t.Errorf("opened: %v", err)
		}
	})
	t.Run("second device of a btrfs", func(t *testing.T) {
		first, _ := newDisk(t)
		d, _ := newDisk(t)
		dir := t.TempDir()
		testenv.Run(t, "mkfs.btrfs", "-q", first.Path, d.Path)
		must(t, unix.Mount(first.Path, dir, "btrfs", 0, "device="+d.Path))
		t.Cleanup(func() {
			must(t, unix.Unmount(dir, 0))
			testenv.Run(t, "btrfs", "device", "scan", "--forget", first.Path)
		})
		requireReason(t, d, blockdev.DiskMounted, "btrfs")
	})
	t.Run("swap", func(t *testing.T) {
		d, _ := newDisk(t)
		testenv.Run(t, "mkswap", d.Path)
		testenv.Run(t, "swapon", d.Path)
		t.Cleanup(func() { testenv.Run(t, "swapoff", d.Path) })
		requireReason(t, d, blockdev.DiskSwap, "swap")
	})
	t.Run("partition", func(t *testing.T) {
		d, _ := newDisk(t)
		testenv.Run(t, "addpart", d.Path, "1", "2048", "8192")
		requireReason(t, d, blockdev.DiskPartitioned, "p1")
	})
	t.Run("raw device of a pod", func(t *testing.T) {
		d, _ := newDisk(t)
		target := filepath.Join(t.TempDir(), "pod")
		must(t, os.WriteFile(target, nil, 0o600))
		must(t, unix.Mount(d.Path, target, "", unix.MS_BIND, ""))
		t.Cleanup(func() { must(t, unix.Unmount(target, 0)) })
		requireReason(t, d, blockdev.DiskMounted, target)
		requireNoClaim(t, d, blockdev.ErrDiskBusy)
	})
	t.Run("behind a loop device", func(t *testing.T) {
		d, _ := newDisk(t)
		loop := testenv.PlugIn(t, d.Path)
		requireReason(t, d, blockdev.DiskHeld, loop)
		requireNoClaim(t, d, blockdev.ErrDiskBusy)
	})
	t.Run("exclusive", func(t *testing.T) {
		d, _ := newDisk(t)
		f, err := d.OpenExclusive(t.Context())
		must(t, err)
		t.Cleanup(func() { must(t, f.Close()) })
		requireReason(t, d, blockdev.DiskBusy, "")
		requireNoClaim(t, d, blockdev.ErrDiskBusy)
	})
	t.Run("read-only", func(t *testing.T) {
		d, _ := newDisk(t, "-r")
		requireReason(t, d, blockdev.DiskReadOnly, "read-only")
	})
	t.Run("too small", func(t *testing.T) {
		device, _, _ := testenv.Disk(t, mib)
		requireReason(t, findDisk(t, device), blockdev.DiskEmpty, "")
	})
	t.Run("read errors", func(t *testing.T) {
		d, image := newDisk(t)
		must(t, os.Truncate(image, 64*mib)) // the loop driver fails reads beyond the end
		requireReason(t, d, blockdev.DiskUnreadable, "input/output error")
	})
}

// requireNoClaim requires that a claim of a disk fails and does not write to it.
func requireNoClaim(t *testing.T, d blockdev.Disk, want error) {
	t.Helper()
	before := written(t, d)
	if _, err := d.Claim(t.Context()); !errors.Is(err, want) {
		t.Errorf("claim: %v, want %v", err, want)
	}
	if written(t, d) != before {
		t.Error("the claim wrote to the disk")
	}
}

// TestFindDisks: FindDisks returns each disk once and no partitions and files. It follows links.
func TestFindDisks(t *testing.T) {
	d, _ := newDisk(t)
	claim(t, d)
	dir := t.TempDir()
	for name, to := range map[string]string{"a": d.Path, "b": d.Path, "b-part1": d.Path + "p1", "file": "/etc/hostname", "dangling": dir + "/none"} {
		must(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	disks, err := blockdev.FindDisks([]string{dir + "/*", d.Path})
	must(t, err)
	if len(disks) != 1 || disks[0].Path != dir+"/a" || !disks[0].Same(d) {
		t.Errorf("%+v", disks)
	}
	if _, err := blockdev.FindDisks([]string{"/dev/[a"}); !errors.Is(err, filepath.ErrBadPattern) {
		t.Errorf("a bad glob: %v", err)
	}
}

// TestRootDisk: a disk with a mounted partition, which its glob matches too, is not free. The disks of this machine
// are not free either.
func TestRootDisk(t *testing.T) {
	root, _ := newDisk(t)
	testenv.Run(t, "addpart", root.Path, "1", "2048", "204800")
	testenv.Run(t, "mkfs.ext4", "-q", root.Path+"p1")
	dir := t.TempDir()
	must(t, unix.Mount(root.Path+"p1", dir, "ext4", unix.MS_RDONLY, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	// Not Path + "*": for loop1 this matches loop10, which another test may use.
	disks, err := blockdev.FindDisks([]string{root.Path, root.Path + "p*", "/dev/vd*", "/dev/sd*", "/dev/nvme*"})
	must(t, err)
	if len(disks) == 0 || !disks[0].Same(root) {
		t.Fatalf("found %+v", disks)
	}
	requireReason(t, root, blockdev.DiskMounted, dir)
	requireNoClaim(t, root, blockdev.ErrDiskBusy)
	for _, d := range disks {
		if f := d.Inspect(); f.Reason == blockdev.DiskFree {
			t.Errorf("%s is free", d.Path)
		}
	}
}

// TestDiskRemoved: an attached disk that was removed is present until Detach. When it is inserted again, it is
// another Disk with the same mark.
func TestDiskRemoved(t *testing.T) {
	device, image, pull := testenv.Disk(t, diskSize)
	d := findDisk(t, device)
	guid := claim(t, d)
	attachDisk(t, d, guid)
	pull()
	if _, _, err := blockdev.SearchClaim([]string{device}, guid); !errors.Is(err, blockdev.ErrDiskGone) {
		t.Errorf("found: %v", err)
	}
	requirePresent(t, guid, true, true)
	if err := d.Wipe(t.Context(), guid, wiping(nil)); err == nil {
		t.Error("wiped a removed disk")
	}
	again := findDisk(t, testenv.PlugIn(t, image))
	if m, err := again.Mark(); err != nil || m.GUID.String() != guid || again.Same(d) {
		t.Errorf("the inserted disk has the mark %+v: %v", m, err)
	}
	attachDisk(t, again, guid)
	must(t, blockdev.Detach(t.Context(), guid, guid))
}

// copyOf copies the mark of a claimed disk to another disk.
func copyOf(t *testing.T, image string) blockdev.Disk {
	t.Helper()
	b := make([]byte, 2*mib)
	f, err := os.Open(image)
	must(t, err)
	_, err = f.ReadAt(b, 0)
	must(t, errors.Join(err, f.Close()))
	twin, _ := newDisk(t)
	writeAt(t, twin.Path, b, 0)
	return twin
}

// TestCopiedMark: if two disks have the mark of a claim, neither is used.
func TestCopiedMark(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	twin := copyOf(t, image)
	both := []string{d.Path, twin.Path}
	if _, _, err := blockdev.SearchClaim(both, guid); !errors.Is(err, blockdev.ErrDiskBusy) || !strings.Contains(err.Error(), "copy") {
		t.Errorf("%v", err)
	}
	if _, _, err := blockdev.FindClaim(both, blockdev.Claimed{GUID: guid, Identity: d.Identity}); !errors.Is(err, blockdev.ErrDiskBusy) {
		t.Errorf("%v", err)
	}
}

// TestFindClaim: FindClaim returns only the disk that was claimed, and no copy of it if the disk was removed or
// cannot be read.
func TestFindClaim(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	twin := copyOf(t, image)
	other, broken := newDisk(t)
	must(t, os.Truncate(broken, 0))
	known, unknown := blockdev.Claimed{GUID: guid, Identity: d.Identity}, blockdev.Claimed{GUID: guid}
	find := func(name string, c blockdev.Claimed, want error, among ...blockdev.Disk) {
		t.Helper()
		var globs []string
		for _, d := range among {
			globs = append(globs, d.Path)
		}
		found, _, err := blockdev.FindClaim(globs, c)
		if !errors.Is(err, want) || err == nil && !found.Same(d) {
			t.Errorf("%s: found %s, %v; want %v", name, found.Path, err, want)
		}
	}
	find("the disk", known, nil, d)
	find("beside another disk", known, nil, d, other)
	find("beside a disk that may be the claimed one", unknown, blockdev.ErrDiskUnread, d, other)
	find("removed", known, blockdev.ErrDiskGone, other)
	find("removed, copy present", known, blockdev.ErrDiskOther, twin)
	must(t, os.Truncate(image, 0))
	find("unreadable", known, blockdev.ErrDiskUnread, d)
	find("unreadable, copy present", known, blockdev.ErrDiskUnread, d, twin)
	if found, _, err := blockdev.SearchClaim([]string{d.Path, twin.Path}, guid); err != nil || !found.Same(twin) {
		t.Errorf("SearchClaim found %s, %v", found.Path, err)
	}
	must(t, os.Truncate(image, diskSize))
	find("blank", known, blockdev.ErrNoMark, d)
	find("blank, copy present", known, blockdev.ErrDiskOther, d, twin)
}

// TestTwoPaths: a disk with two paths is found once, and writes on one path are visible on the other.
func TestTwoPaths(t *testing.T) {
	d, image := newDisk(t)
	second := findDisk(t, testenv.PlugIn(t, image))
	disks, err := blockdev.FindDisks([]string{d.Path, second.Path})
	must(t, err)
	if len(disks) != 1 || !d.OneDisk(second) || d.Same(second) {
		t.Errorf("%+v", disks)
	}
	cache, err := os.Open(second.Path) // keeps the page cache of the second path
	must(t, err)
	defer cache.Close()
	requireReason(t, second, blockdev.DiskFree, "")
	claim(t, d)
	if _, err := second.Claim(t.Context()); !errors.Is(err, blockdev.ErrDiskBusy) {
		t.Errorf("claimed twice: %v", err)
	}
}

// TestRepurposed: a disk that got other content is not wiped, although a part of its mark is left.
func TestRepurposed(t *testing.T) {
	for name, tc := range map[string]struct {
		make func(t *testing.T, d blockdev.Disk)
		want blockdev.Reason
	}{
		"filesystem": {func(*testing.T, blockdev.Disk) {}, blockdev.DiskClaimed},
		"boot record": {func(t *testing.T, d blockdev.Disk) {
			t.Helper()
			entry := [64]byte{4: 0x83, 9: 8, 14: 8} // from sector 2048 on
			writeAt(t, d.Path, append(entry[:], 0x55, 0xaa), 446)
		}, blockdev.DiskPartitioned},
	} {
		t.Run(name, func(t *testing.T) {
			d, image := newDisk(t)
			guid := claim(t, d)
			testenv.Run(t, "wipefs", "-q", "-a", d.Path)
			tc.make(t, d)
			testenv.Run(t, "mkfs.ext4", "-q", d.Path+"p1")
			requireReason(t, d, tc.want, "")
			o := wiping(nil)
			o.Wiped = func() error { t.Error("the disk was wiped"); return nil }
			if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, blockdev.ErrNoMark) {
				t.Errorf("wiped: %v", err)
			}
			if err := d.Unmark(t.Context(), guid); !errors.Is(err, blockdev.ErrNoMark) && !errors.Is(err, blockdev.ErrNotBlank) {
				t.Errorf("unmarked: %v", err)
			}
			testenv.Run(t, "e2fsck", "-fn", image+"?offset=1048576")
		})
	}
	t.Run("first table", func(t *testing.T) {
		d, _ := newDisk(t)
		guid := claim(t, d)
		writeAt(t, d.Path, make([]byte, 512), 512)
		if err := d.Wipe(t.Context(), guid, wiping(nil)); !errors.Is(err, blockdev.ErrNoMark) {
			t.Errorf("wiped: %v", err)
		}
		must(t, d.Unmark(t.Context(), guid)) // the disk has no data
		must(t, hidden(d))
		requireReason(t, d, blockdev.DiskFree, "")
	})
}

func hidden(d blockdev.Disk) error {
	if _, err := os.Stat(d.Path + "p1"); err == nil {
		return errors.New("its partition still exists")
	}
	return nil
}

// TestUsed: the mark records the use of a disk, also after the disk has grown and in the second table.
func TestUsed(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	d = grown(t, d, image)
	for range 2 {
		must(t, d.SetUsed(t.Context(), guid))
		if m, err := d.Mark(); err != nil || !m.Used || !m.Complete || m.Damaged || m.Name != "a volume" || m.Size >= d.Room() {
			t.Errorf("%+v, %v", m, err)
		}
	}
	_, err := d.Grow(t.Context(), guid)
	must(t, err)
	writeAt(t, d.Path, make([]byte, 512), 512)
	if m, err := d.Mark(); err != nil || !m.Used || !m.Damaged || m.Size != d.Room() {
		t.Errorf("the second table has %+v, %v", m, err)
	}
}

// TestDetachUnreadable: an unreadable disk can be detached.
func TestDetachUnreadable(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	attachDisk(t, d, guid)
	must(t, os.Truncate(image, 0))
	requirePresent(t, guid, true, true)
	must(t, blockdev.Detach(t.Context(), guid, guid))
	requirePresent(t, guid, false, false)
}

// TestPresentWithoutMark: a raw device without its mark is present while it is mounted, and not afterwards.
func TestPresentWithoutMark(t *testing.T) {
	d, _ := newDisk(t)
	guid := claim(t, d)
	attachDisk(t, d, guid)
	t.Cleanup(func() { must(t, blockdev.Detach(context.WithoutCancel(t.Context()), guid, guid)) })
	target := filepath.Join(t.TempDir(), "pod")
	must(t, os.WriteFile(target, nil, 0o600))
	must(t, unix.Mount(blockdev.PartitionPath(guid), target, "", unix.MS_BIND, ""))
	writeAt(t, d.Path, make([]byte, mib), 0)
	writeAt(t, d.Path, make([]byte, mib), diskSize-mib)
	requirePresent(t, guid, true, true)
	must(t, unix.Unmount(target, 0))
	requirePresent(t, guid, false, false)
}

// TestGrow: Grow resizes the partition and moves the second table while the partition is in use.
func TestGrow(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	part, err := d.Attach(t.Context(), guid, guid)
	must(t, err)
	t.Cleanup(func() {
		must(t, part.Close())
		must(t, blockdev.Detach(context.WithoutCancel(t.Context()), guid, guid))
	})
	_, err = part.WriteAt([]byte("kept"), d.Room()-4)
	must(t, err)
	larger := grown(t, d, image)
	size, err := larger.Grow(t.Context(), guid)
	must(t, err)
	current, err := blockdev.Size(part)
	must(t, err)
	if size != larger.Room() || current != size {
		t.Errorf("%d bytes, partition %d, want %d", size, current, larger.Room())
	}
	checkTable(t, image, "512")
	tail := make([]byte, larger.Room()-d.Room()+4)
	_, err = part.ReadAt(tail, d.Room()-4)
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if string(tail[:4]) != "kept" || slices.ContainsFunc(tail[4:], func(b byte) bool { return b != 0 }) {
		t.Error("the old end of the disk became data")
	}
	if again, err := larger.Grow(t.Context(), guid); err != nil || again != size {
		t.Errorf("again: %d, %v", again, err)
	}
}

// wiping returns the default options of a wipe. at receives the offsets of the progress, and may be nil.
func wiping(at *[]int64) blockdev.WipeOptions {
	return blockdev.WipeOptions{
		Release: true,
		Progress: func(upTo int64) error {
			if at != nil {
				*at = append(*at, upTo)
			}
			return nil
		},
		Wiped: func() error { return nil },
	}
}

// put writes to the data of a claimed disk.
func put(t *testing.T, d blockdev.Disk, guid, content string, at int64) {
	t.Helper()
	part, err := d.OpenData(t.Context(), guid)
	must(t, err)
	_, err = part.WriteAt([]byte(content), at)
	must(t, errors.Join(err, part.Sync(), part.Close()))
	must(t, d.Hide(t.Context()))
}

// requireBlankImage requires that an image has no data.
func requireBlankImage(t *testing.T, image string) {
	t.Helper()
	f, err := os.Open(image)
	must(t, err)
	defer f.Close()
	must(t, blockdev.RequireBlank(f))
}

// TestWipeLeavesNothing: Wipe removes all data, with and without the support of discards.
func TestWipeLeavesNothing(t *testing.T) {
	testenv.RequireRoot(t)
	discards := func(t *testing.T) (device, image string) {
		t.Helper()
		device, image, _ = testenv.Disk(t, 160*mib)
		return device, image
	}
	for name, newDisk := range map[string]func(*testing.T) (device, image string){
		"with discard": discards, "without discard": diskWithoutDiscard,
	} {
		for _, release := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, release %t", name, release), func(t *testing.T) {
				device, image := newDisk(t)
				d := findDisk(t, device)
				guid := claim(t, d)
				for at := range int64(158) {
					put(t, d, guid, "secret", at*mib+123)
				}
				o := wiping(nil)
				o.Release = release
				must(t, d.Wipe(t.Context(), guid, o))
				requireReason(t, d, blockdev.DiskFree, "")
				requireBlankImage(t, image)
			})
		}
	}
}

// TestWipeKeep: with Keep only the places of signatures are overwritten.
func TestWipeKeep(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	part, err := d.Attach(t.Context(), guid, guid)
	must(t, err)
	testenv.Mkfs(t, "ext4", "-b", "4096", part.Name()) // with a copy of its superblock at 128 MiB
	must(t, errors.Join(part.Close(), blockdev.Detach(t.Context(), guid, guid)))
	put(t, d, guid, "kept", 100*mib)
	must(t, d.Wipe(t.Context(), guid, blockdev.WipeOptions{Keep: true, Wiped: func() error { return nil }}))
	requireReason(t, d, blockdev.DiskFree, "")
	f, err := os.Open(image)
	must(t, err)
	defer f.Close()
	middle := make([]byte, 4)
	_, err = f.ReadAt(middle, (100+1)*mib)
	must(t, err)
	if string(middle) != "kept" {
		t.Errorf("the middle has %q", middle)
	}
}

// TestWipeAgain: after an interrupted call the disk is claimed, and the next call continues at the last offset.
func TestWipeAgain(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Wipe(ended, guid, wiping(nil)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	requireReason(t, d, blockdev.DiskClaimed, guid)

	put(t, d, guid, "secret", 100*mib)
	put(t, d, guid, "secret", 400*mib)
	stop, stopped := errors.New("stop"), int64(0)
	o := wiping(nil)
	o.Progress = func(upTo int64) error { stopped = upTo; return stop }
	if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	requireReason(t, d, blockdev.DiskClaimed, guid)
	var at []int64
	o = wiping(&at)
	o.From = stopped
	must(t, d.Wipe(t.Context(), guid, o))
	if len(at) == 0 || at[0] <= stopped || !slices.IsSorted(at) {
		t.Errorf("progress %v, continued at %d", at, stopped)
	}
	requireReason(t, d, blockdev.DiskFree, "")
	requireBlankImage(t, image)
}

// TestWipeWritten: Wipe fails if the disk was written to after it was zeroed.
func TestWipeWritten(t *testing.T) {
	d, _ := newDisk(t)
	guid := claim(t, d)
	put(t, d, guid, "data", 0)
	o := wiping(nil)
	o.From = d.Size
	if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, blockdev.ErrNotBlank) {
		t.Errorf("%v", err)
	}
	requireReason(t, d, blockdev.DiskClaimed, guid)
}

// diskWithoutDiscard creates a disk of 160 MiB on a file that does not support hole punching.
func diskWithoutDiscard(t *testing.T) (device, image string) {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("none", dir, "ramfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	image = filepath.Join(dir, "disk")
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, 160*mib))
	device = testenv.Run(t, "losetup", "-f", "--show", image) // ramfs does not support direct I/O
	t.Cleanup(func() { testenv.Run(t, "losetup", "-d", device) })
	if out, err := testenv.Output("", "blkdiscard", device); err == nil {
		t.Fatalf("%s discards: %s", device, out)
	}
	return device, image
}
