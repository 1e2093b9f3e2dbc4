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

// newDisk creates a blank disk, and returns it with the path of its image. options are options of losetup(8).
func newDisk(t *testing.T, options ...string) (blockdev.Disk, string) {
	t.Helper()
	device, image, _ := testenv.Disk(t, diskSize, options...)
	return findDisk(t, device), image
}

// findDisk returns the disk with a device node.
func findDisk(t *testing.T, device string) blockdev.Disk {
	t.Helper()
	disks, err := blockdev.FindDisks([]string{device})
	must(t, err)
	if len(disks) != 1 {
		t.Fatalf("FindDisks of %s: got %d disks, want 1", device, len(disks))
	}
	return disks[0]
}

// claim claims a disk, and returns the GUID of the claim.
func claim(t *testing.T, d blockdev.Disk) string {
	t.Helper()
	c, err := d.Claim(t.Context())
	must(t, err)
	must(t, c.Mark("a volume"))
	must(t, c.Close())
	return c.GUID.String()
}

// writeAt durably writes to a file or device at an offset.
func writeAt(t *testing.T, path string, b []byte, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt(b, at)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// requireReason requires that Inspect returns a reason, whose detail contains a text.
func requireReason(t *testing.T, d blockdev.Disk, want blockdev.Reason, detail string) {
	t.Helper()
	if f := d.Inspect(); f.Reason != want || !strings.Contains(f.Detail, detail) {
		t.Errorf("Inspect of %s: got %s (%s), want %s (%s)", d.Path, f.Reason, f.Detail, want, detail)
	}
}

// requirePresent checks the result of blockdev.Present for a claim whose node has the name guid.
func requirePresent(t *testing.T, guid string, want, wantRemoved bool) {
	t.Helper()
	if present, removed, err := blockdev.Present(guid, guid); present != want || removed != wantRemoved || err != nil {
		t.Errorf("Present: got %t, removed %t, %v, want %t, removed %t", present, removed, err, want, wantRemoved)
	}
}

// attachDisk attaches a claimed disk and closes its partition.
func attachDisk(t *testing.T, d blockdev.Disk, guid string) {
	t.Helper()
	part, err := d.Attach(t.Context(), guid, guid)
	must(t, err)
	must(t, part.Close())
}

// growDisk doubles the size of the image of a disk, and returns the disk.
func growDisk(t *testing.T, d blockdev.Disk, image string) blockdev.Disk {
	t.Helper()
	must(t, os.Truncate(image, 2*diskSize))
	testenv.Run(t, "losetup", "-c", d.Path)
	return findDisk(t, d.Path)
}

// TestDiskLife: a blank disk is free, a claimed disk is found by its mark, and a wiped disk is free again, for all
// sector sizes.
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
				t.Errorf("FindClaim: got disk %+v with mark %+v, want disk %+v with a complete, unused mark", found, m, d)
			}
			checkTable(t, image, sector)

			part, err := d.Attach(t.Context(), guid, guid)
			must(t, err)
			size, err := blockdev.Size(part)
			must(t, err)
			if size != d.Room() || part.Name() != blockdev.NodePath(guid) {
				t.Errorf("attached partition: got %s with %d bytes, want %s with %d", part.Name(), size, blockdev.NodePath(guid), d.Room())
			}
			must(t, blockdev.RequireNoSignature(part))
			_, err = part.WriteAt(bytes.Repeat([]byte("secret"), 10000), 0)
			must(t, errors.Join(err, part.Sync()))
			if err := blockdev.Detach(t.Context(), guid, guid); !errors.Is(err, blockdev.ErrDiskBusy) {
				t.Errorf("detaching an open partition: got %v, want %v", err, blockdev.ErrDiskBusy)
			}
			must(t, part.Close())
			requirePresent(t, guid, true, false)
			must(t, blockdev.Detach(t.Context(), guid, guid))
			requirePresent(t, guid, false, false)

			must(t, d.Wipe(t.Context(), guid, wipeOptions(nil)))
			requireReason(t, d, blockdev.DiskFree, "")
			requireBlankImage(t, image)
		})
	}
}

// checkTable requires that libblkid finds the partition of a claim in an image. The partition begins at 1 MiB, which
// is sector 2048 or 256.
func checkTable(t *testing.T, image, sector string) {
	t.Helper()
	out := testenv.Run(t, "partx", "--raw", "--noheadings", "--output", "NR,START,TYPE,NAME", "--sector-size", sector, image)
	if want := "1 2048 e855209b-c0f3-4ca6-ac51-2bca4d5e1291 a\\x20volume"; out != want && out != strings.Replace(want, "2048", "256", 1) {
		t.Errorf("partx: got %q, want %q", out, want)
	}
}

// TestInspect: a disk with any content is not free, and the detail names the content.
func TestInspect(t *testing.T) {
	// label returns a function that writes a magic number. A negative offset is relative to the end of the disk.
	label := func(offset int64, magic string) func(*testing.T, string) {
		return func(t *testing.T, dev string) { writeAt(t, dev, []byte(magic), (offset+diskSize)%diskSize) }
	}
	// run returns a function that runs a program on the disk.
	run := func(name string, args ...string) func(*testing.T, string) {
		return func(t *testing.T, dev string) { testenv.Run(t, name, append(args, dev)...) }
	}
	for name, tc := range map[string]struct {
		write  func(t *testing.T, device string)
		detail string
	}{
		"ext4":                          {run("mkfs.ext4", "-q"), "ext4"},
		"xfs":                           {run("mkfs.xfs", "-q"), "xfs"},
		"btrfs":                         {run("mkfs.btrfs", "-q"), "btrfs"},
		"btrfs, only a mirror":          {label(64*mib+0x40, "_BHRfS_M"), "btrfs"},
		"ext4, only a backup":           {label(128*mib+0x38, "\x53\xef"), "data at byte"},
		"swap":                          {run("mkswap"), "swap space"},
		"LVM":                           {label(512, "LABELONE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 \x00\x00\x00LVM2 001"), "LVM"},
		"LUKS1":                         {label(0, "LUKS\xba\xbe\x00\x01"), "LUKS"},
		"LUKS2":                         {label(0, "LUKS\xba\xbe\x00\x02"), "LUKS"},
		"LUKS2, only the second header": {label(4*mib, "SKUL\xba\xbe\x00\x02"), "LUKS"},
		"md 0.90":                       {label(-65536, "\xfc\x4e\x2b\xa9"), "md RAID"},
		"md 1.0":                        {label(-8192, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"md 1.1":                        {label(0, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"md 1.2":                        {label(4096, "\xfc\x4e\x2b\xa9\x01"), "md RAID"},
		"ZFS":                           {label(128<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "ZFS"},
		"ZFS, last label":               {label(-(128 << 10), "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "ZFS"},
		"GPT":                           {label(512, "EFI PART"), "partition table"},
		"GPT, only the backup":          {label(-512, "EFI PART"), "partition table"},
		"MBR":                           {label(510, "\x55\xaa"), "partition table"},
		"ISO 9660":                      {label(32<<10, "\x01CD001"), "ISO"},
		"BlueStore":                     {label(0, "bluestore block device\n"), "Ceph"},
		"bcache":                        {label(4096+24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"), "bcache"},
		"DRBD":                          {label(-4096+60, "\x83\x74\x02\x6b"), "data"},
		"only the first byte":           {label(0, "\x01"), "data"},
		"only the last byte":            {label(-1, "\x01"), "data at byte"},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := newDisk(t)
			tc.write(t, d.Path)
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
		8*mib + 1<<10,       // the first backup superblock of an ext4 with blocks of 1 KiB
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
				t.Fatalf("claiming a disk with data at byte %d: got %+v, %v, want %v", at, c, err, blockdev.ErrNotBlank)
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
		t.Fatalf("setup: mkfs.ext4 lists backup superblocks at %d, want at least 10", places)
	}
	return places
}

// sectorsWritten returns the number of sectors that were written to a disk (kernel documentation, block/stat.rst).
func sectorsWritten(t *testing.T, d blockdev.Disk) string {
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
			t.Errorf("opening a mounted disk exclusively: got %v, want %v", err, blockdev.ErrDiskBusy)
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
	t.Run("backing file of a loop device", func(t *testing.T) {
		d, _ := newDisk(t)
		loop := testenv.PlugIn(t, d.Path)
		requireReason(t, d, blockdev.DiskHeld, loop)
		requireNoClaim(t, d, blockdev.ErrDiskBusy)
	})
	t.Run("open exclusively", func(t *testing.T) {
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

// requireNoClaim requires that claiming a disk fails and does not write to the disk.
func requireNoClaim(t *testing.T, d blockdev.Disk, want error) {
	t.Helper()
	before := sectorsWritten(t, d)
	if _, err := d.Claim(t.Context()); !errors.Is(err, want) {
		t.Errorf("Claim: got %v, want %v", err, want)
	}
	if sectorsWritten(t, d) != before {
		t.Error("the failed claim wrote to the disk")
	}
}

// TestFindDisks: FindDisks returns each disk once, follows symbolic links, and skips partitions and files.
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
		t.Errorf("got disks %+v, want only %s/a", disks, dir)
	}
	if got := blockdev.BrokenLinks([]string{dir + "/*"}); !slices.Equal(got, []string{dir + "/dangling"}) {
		t.Errorf("got broken links %q, want only %s/dangling", got, dir)
	}
	if _, err := blockdev.FindDisks([]string{"/dev/[a"}); !errors.Is(err, filepath.ErrBadPattern) {
		t.Errorf("a bad glob: got %v, want %v", err, filepath.ErrBadPattern)
	}
}

// TestRootDisk: a disk with a mounted partition is not free, even if the glob also matches the partition. The
// disks of this machine are not free either.
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
		t.Fatalf("got disks %+v, want %s first", disks, root.Path)
	}
	requireReason(t, root, blockdev.DiskMounted, dir)
	requireNoClaim(t, root, blockdev.ErrDiskBusy)
	for _, d := range disks {
		if f := d.Inspect(); f.Reason == blockdev.DiskFree {
			t.Errorf("Inspect of %s: got free, want a reason why it is not", d.Path)
		}
	}
}

// TestDiskRemoved: an attached disk that was removed is present until Detach. When the disk is inserted again,
// it has the same mark, but is another Disk.
func TestDiskRemoved(t *testing.T) {
	device, image, pull := testenv.Disk(t, diskSize)
	d := findDisk(t, device)
	guid := claim(t, d)
	attachDisk(t, d, guid)
	pull()
	if _, _, err := blockdev.SearchClaim([]string{device}, guid); !errors.Is(err, blockdev.ErrDiskGone) {
		t.Errorf("SearchClaim of a removed disk: got %v, want %v", err, blockdev.ErrDiskGone)
	}
	requirePresent(t, guid, true, true)
	if err := d.Wipe(t.Context(), guid, wipeOptions(nil)); err == nil {
		t.Error("Wipe of a removed disk: got no error, want one")
	}
	again := findDisk(t, testenv.PlugIn(t, image))
	if m, err := again.Mark(); err != nil || m.GUID.String() != guid || again.Same(d) {
		t.Errorf("the disk that was inserted again: got mark %+v, %v, want GUID %s", m, err, guid)
	}
	attachDisk(t, again, guid)
	must(t, blockdev.Detach(t.Context(), guid, guid))
}

// newCopy creates a disk with a copy of the mark of a claimed disk.
func newCopy(t *testing.T, image string) blockdev.Disk {
	t.Helper()
	b := make([]byte, 2*mib)
	f, err := os.Open(image)
	must(t, err)
	_, err = f.ReadAt(b, 0)
	must(t, errors.Join(err, f.Close()))
	duplicate, _ := newDisk(t)
	writeAt(t, duplicate.Path, b, 0)
	return duplicate
}

// TestCopiedMark: if two disks have the mark of a claim, neither is found.
func TestCopiedMark(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	duplicate := newCopy(t, image)
	both := []string{d.Path, duplicate.Path}
	if _, _, err := blockdev.SearchClaim(both, guid); !errors.Is(err, blockdev.ErrDiskBusy) || !strings.Contains(err.Error(), "copy") {
		t.Errorf("SearchClaim: got %v, want %v because of the copy", err, blockdev.ErrDiskBusy)
	}
	if _, _, err := blockdev.FindClaim(both, blockdev.Claimed{GUID: guid, Identity: d.Identity}); !errors.Is(err, blockdev.ErrDiskBusy) {
		t.Errorf("FindClaim: got %v, want %v", err, blockdev.ErrDiskBusy)
	}
}

// TestFindClaim: FindClaim returns only the disk that was claimed, and no copy of it if the disk was removed or
// cannot be read.
func TestFindClaim(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	duplicate := newCopy(t, image)
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
			t.Errorf("%s: got disk %s, %v, want disk %s or %v", name, found.Path, err, d.Path, want)
		}
	}
	find("only the claimed disk", known, nil, d)
	find("unreadable other disk", known, nil, d, other)
	find("unreadable other disk, claim without identity", unknown, blockdev.ErrDiskUnreadable, d, other)
	find("claimed disk removed", known, blockdev.ErrDiskGone, other)
	find("claimed disk removed, copy present", known, blockdev.ErrDiskOther, duplicate)
	must(t, os.Truncate(image, 0))
	find("claimed disk unreadable", known, blockdev.ErrDiskUnreadable, d)
	find("claimed disk unreadable, copy present", known, blockdev.ErrDiskUnreadable, d, duplicate)
	if found, _, err := blockdev.SearchClaim([]string{d.Path, duplicate.Path}, guid); err != nil || !found.Same(duplicate) {
		t.Errorf("SearchClaim: got disk %s, %v, want the copy %s", found.Path, err, duplicate.Path)
	}
	must(t, os.Truncate(image, diskSize))
	find("claimed disk blank", known, blockdev.ErrNoMark, d)
	find("claimed disk blank, copy present", known, blockdev.ErrDiskOther, d, duplicate)
}

// TestTwoPaths: a disk with two paths is found once, and writes on one path are visible on the other.
func TestTwoPaths(t *testing.T) {
	d, image := newDisk(t)
	second := findDisk(t, testenv.PlugIn(t, image))
	disks, err := blockdev.FindDisks([]string{d.Path, second.Path})
	must(t, err)
	if len(disks) != 1 || !d.OneDisk(second) || d.Same(second) {
		t.Errorf("got disks %+v, want one for both paths", disks)
	}
	cache, err := os.Open(second.Path) // keeps the page cache of the second path
	must(t, err)
	defer cache.Close()
	requireReason(t, second, blockdev.DiskFree, "")
	claim(t, d)
	if _, err := second.Claim(t.Context()); !errors.Is(err, blockdev.ErrDiskBusy) {
		t.Errorf("claiming a claimed disk on its second path: got %v, want %v", err, blockdev.ErrDiskBusy)
	}
}

// TestRepurposed: a disk with new content is not wiped, although a part of its mark is left.
func TestRepurposed(t *testing.T) {
	for name, tc := range map[string]struct {
		write func(t *testing.T, d blockdev.Disk)
		want  blockdev.Reason
	}{
		"filesystem in the partition": {func(*testing.T, blockdev.Disk) {}, blockdev.DiskClaimed},
		"boot record and filesystem": {func(t *testing.T, d blockdev.Disk) {
			t.Helper()
			entry := [64]byte{4: 0x83, 9: 8, 14: 8} // a partition that begins at sector 2048
			writeAt(t, d.Path, append(entry[:], 0x55, 0xaa), 446)
		}, blockdev.DiskPartitioned},
	} {
		t.Run(name, func(t *testing.T) {
			d, image := newDisk(t)
			guid := claim(t, d)
			testenv.Run(t, "wipefs", "-q", "-a", d.Path)
			tc.write(t, d)
			testenv.Run(t, "mkfs.ext4", "-q", d.Path+"p1")
			requireReason(t, d, tc.want, "")
			o := wipeOptions(nil)
			o.Wiped = func() error { t.Error("Wipe called Wiped, want no call"); return nil }
			if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, blockdev.ErrNoMark) {
				t.Errorf("Wipe: got %v, want %v", err, blockdev.ErrNoMark)
			}
			if err := d.Unmark(t.Context(), guid); !errors.Is(err, blockdev.ErrNoMark) && !errors.Is(err, blockdev.ErrNotBlank) {
				t.Errorf("Unmark: got %v, want %v or %v", err, blockdev.ErrNoMark, blockdev.ErrNotBlank)
			}
			testenv.Run(t, "e2fsck", "-fn", image+"?offset=1048576")
		})
	}
	t.Run("first partition table overwritten", func(t *testing.T) {
		d, _ := newDisk(t)
		guid := claim(t, d)
		writeAt(t, d.Path, make([]byte, 512), 512)
		if err := d.Wipe(t.Context(), guid, wipeOptions(nil)); !errors.Is(err, blockdev.ErrNoMark) {
			t.Errorf("Wipe: got %v, want %v", err, blockdev.ErrNoMark)
		}
		must(t, d.Unmark(t.Context(), guid)) // the disk has no data
		if _, err := os.Stat(d.Path + "p1"); err == nil {
			t.Errorf("%sp1 still exists after Unmark", d.Path)
		}
		requireReason(t, d, blockdev.DiskFree, "")
	})
}

// TestUsed: SetUsed changes both tables of the mark, even if the disk has grown since they were written.
func TestUsed(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	d = growDisk(t, d, image)
	for range 2 {
		must(t, d.SetUsed(t.Context(), guid))
		if m, err := d.Mark(); err != nil || !m.Used || !m.Complete || m.Damaged || m.Name != "a volume" || m.Size >= d.Room() {
			t.Errorf("got mark %+v, %v, want a complete, used mark of the old size", m, err)
		}
	}
	_, err := d.Grow(t.Context(), guid)
	must(t, err)
	writeAt(t, d.Path, make([]byte, 512), 512)
	if m, err := d.Mark(); err != nil || !m.Used || !m.Damaged || m.Size != d.Room() {
		t.Errorf("second table: got mark %+v, %v, want a used mark of %d bytes", m, err, d.Room())
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

// TestPresentWithoutMark: an attached disk whose mark was overwritten is present while its node is bind-mounted, and
// not afterwards.
func TestPresentWithoutMark(t *testing.T) {
	d, _ := newDisk(t)
	guid := claim(t, d)
	attachDisk(t, d, guid)
	t.Cleanup(func() { must(t, blockdev.Detach(context.WithoutCancel(t.Context()), guid, guid)) })
	target := filepath.Join(t.TempDir(), "pod")
	must(t, os.WriteFile(target, nil, 0o600))
	must(t, unix.Mount(blockdev.NodePath(guid), target, "", unix.MS_BIND, ""))
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
	larger := growDisk(t, d, image)
	size, err := larger.Grow(t.Context(), guid)
	must(t, err)
	current, err := blockdev.Size(part)
	must(t, err)
	if size != larger.Room() || current != size {
		t.Errorf("got size %d and a partition of %d bytes, want %d", size, current, larger.Room())
	}
	checkTable(t, image, "512")
	tail := make([]byte, larger.Room()-d.Room()+4)
	_, err = part.ReadAt(tail, d.Room()-4)
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if string(tail[:4]) != "kept" || slices.ContainsFunc(tail[4:], func(b byte) bool { return b != 0 }) {
		t.Error("the grown partition: the data before the old end changed, or the space after it is not zero")
	}
	if again, err := larger.Grow(t.Context(), guid); err != nil || again != size {
		t.Errorf("second Grow: got %d, %v, want %d", again, err, size)
	}
}

// wipeOptions returns the options of a wipe that may release storage. If at is not nil, it receives the offsets of
// Progress.
func wipeOptions(at *[]int64) blockdev.WipeOptions {
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

// writeData writes to the partition of a claimed disk.
func writeData(t *testing.T, d blockdev.Disk, guid, content string, at int64) {
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

// TestWipeLeavesNothing: Wipe removes all data, whether or not the disk supports discards.
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
					writeData(t, d, guid, "secret", at*mib+123)
				}
				o := wipeOptions(nil)
				o.Release = release
				must(t, d.Wipe(t.Context(), guid, o))
				requireReason(t, d, blockdev.DiskFree, "")
				requireBlankImage(t, image)
			})
		}
	}
}

// TestWipeKeep: with Keep, Wipe overwrites only the header and the places of signatures.
func TestWipeKeep(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	part, err := d.Attach(t.Context(), guid, guid)
	must(t, err)
	testenv.Mkfs(t, "ext4", "-b", "4096", part.Name()) // has a backup superblock at 128 MiB
	must(t, errors.Join(part.Close(), blockdev.Detach(t.Context(), guid, guid)))
	const header = 16 * mib
	writeData(t, d, guid, "header", header-8)
	writeData(t, d, guid, "kept", 100*mib)
	must(t, d.Wipe(t.Context(), guid, blockdev.WipeOptions{Header: header, Keep: true, Wiped: func() error { return nil }}))
	requireReason(t, d, blockdev.DiskFree, "")
	f, err := os.Open(image)
	must(t, err)
	defer f.Close()
	middle := make([]byte, 4)
	_, err = f.ReadAt(middle, (100+1)*mib) // the partition begins at 1 MiB
	must(t, err)
	if string(middle) != "kept" {
		t.Errorf("data between the signatures: got %q, want \"kept\"", middle)
	}
	erased := make([]byte, header)
	_, err = f.ReadAt(erased, mib)
	must(t, err)
	if left := bytes.Trim(erased, "\x00"); len(left) > 0 {
		t.Errorf("the header: got %d bytes of data, want none", len(left))
	}
}

// TestWipeAgain: after an interrupted call the disk is still claimed, and the next call continues at the last offset.
func TestWipeAgain(t *testing.T) {
	d, image := newDisk(t)
	guid := claim(t, d)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Wipe(ended, guid, wipeOptions(nil)); !errors.Is(err, context.Canceled) {
		t.Errorf("Wipe with an ended context: got %v, want %v", err, context.Canceled)
	}
	requireReason(t, d, blockdev.DiskClaimed, guid)

	writeData(t, d, guid, "secret", 100*mib)
	writeData(t, d, guid, "secret", 400*mib)
	stop, stopped := errors.New("stop"), int64(0)
	o := wipeOptions(nil)
	o.Progress = func(upTo int64) error { stopped = upTo; return stop }
	if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, stop) {
		t.Errorf("Wipe whose Progress fails: got %v, want %v", err, stop)
	}
	requireReason(t, d, blockdev.DiskClaimed, guid)
	var at []int64
	o = wipeOptions(&at)
	o.From = stopped
	must(t, d.Wipe(t.Context(), guid, o))
	if len(at) == 0 || at[0] <= stopped || !slices.IsSorted(at) {
		t.Errorf("got progress %v, want increasing offsets above %d", at, stopped)
	}
	requireReason(t, d, blockdev.DiskFree, "")
	requireBlankImage(t, image)
}

// TestWipeWritten: Wipe fails if the disk was written to after it was zeroed.
func TestWipeWritten(t *testing.T) {
	d, _ := newDisk(t)
	guid := claim(t, d)
	writeData(t, d, guid, "data", 0)
	o := wipeOptions(nil)
	o.From = d.Size // as after a call that has zeroed the whole disk
	if err := d.Wipe(t.Context(), guid, o); !errors.Is(err, blockdev.ErrNotBlank) {
		t.Errorf("got %v, want %v", err, blockdev.ErrNotBlank)
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
		t.Fatalf("setup: %s supports discards: %s", device, out)
	}
	return device, image
}
