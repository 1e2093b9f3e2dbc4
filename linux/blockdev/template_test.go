package blockdev_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// templateSizes are the sizes of the tested filesystems: the smallest and the largest, and some between them that are no multiples
// of larger blocks.
var templateSizes = map[string][]int64{
	"ext4":  {16 * mib, 100 * mib, 128 * mib, 128*mib + 4096, gib, gib + 12288, 5*gib - 4096, 16 * gib},
	"xfs":   {300 * mib, 300*mib + 4096, gib, gib + 12288, 5*gib - 4096, 16 * gib},
	"btrfs": {256 * mib, 256*mib + 4096, gib, gib + 12288, 5*gib - 4096, 16 * gib},
}

// formatNew creates a filesystem on a new image from a template.
func formatNew(t *testing.T, formatter *blockdev.Formatter, size int64, spec blockdev.FormatSpec) *os.File {
	t.Helper()
	f := newImage(t, size)
	formatted, err := formatter.FormatNew(t.Context(), f, spec)
	if err != nil || !formatted {
		t.Fatalf("got %t, %v, want that a template of %s with %d bytes is copied", formatted, err, spec.FSType, size)
	}
	return f
}

// TestTemplate: a copy of a template is a filesystem without errors, with the size of its device and its own UUID. It stays thin.
func TestTemplate(t *testing.T) {
	formatter := blockdev.NewFormatter()
	for fsType, sizes := range templateSizes {
		for _, size := range sizes {
			t.Run(fsType+"-"+strconv.FormatInt(size, 10), func(t *testing.T) {
				uuids := map[string]bool{}
				for range 2 {
					f := formatNew(t, formatter, size, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096})
					must(t, testenv.Fsck(fsType, f.Name()))
					sb, err := blockdev.ReadSuperblock(f, fsType)
					if err != nil || sb.Dirty || sb.Size > size || sb.Size < size-8*mib {
						t.Errorf("got superblock %+v, %v, want a clean filesystem of at most %d bytes", sb, err, size)
					}
					var st unix.Stat_t
					must(t, unix.Fstat(int(f.Fd()), &st))
					if st.Blocks*512 > 5*mib {
						t.Errorf("got %d allocated bytes, want at most 5 MiB", st.Blocks*512)
					}
					uuids[uuidOf(t, f.Name())] = true
				}
				if len(uuids) != 2 {
					t.Errorf("got the UUIDs %v of two filesystems, want two", uuids)
				}
			})
		}
	}
}

// TestTemplateOptions: a template has the options of mkfs.
func TestTemplateOptions(t *testing.T) {
	for _, tc := range []struct{ fsType, options string }{
		{"ext4", "-m 1"},
		{"xfs", "-i size=1024"},
		{"xfs", "-m rmapbt=1"},
		{"xfs", "-m finobt=0"},
		{"btrfs", "-m single"},
		{"btrfs", "-n 4096"},
	} {
		t.Run(tc.fsType+" "+tc.options, func(t *testing.T) {
			spec := blockdev.FormatSpec{FSType: tc.fsType, SectorSize: 4096, Options: strings.Fields(tc.options)}
			f := formatNew(t, blockdev.NewFormatter(), gib, spec)
			must(t, testenv.Fsck(tc.fsType, f.Name()))
		})
	}
}

// TestExt4Template: a copy has the parameters that the driver sets, and each of its superblocks and its journal have its UUID.
func TestExt4Template(t *testing.T) {
	f := formatNew(t, blockdev.NewFormatter(), 5*gib, blockdev.FormatSpec{FSType: "ext4", SectorSize: 4096})
	info := testenv.Run(t, "dumpe2fs", "-h", f.Name())
	for _, want := range []string{"Block size:               4096", "Inode size:	          256", "Reserved block count:     0", "metadata_csum_seed"} {
		if !strings.Contains(info, want) {
			t.Errorf("dumpe2fs printed no %q", want)
		}
	}
	uuid := field(t, info, "Filesystem UUID:")
	groups := strings.Fields(testenv.Run(t, "sh", "-c", "dumpe2fs "+f.Name()+" 2>/dev/null | sed -n 's/.*Backup superblock at \\([0-9]*\\).*/\\1/p'"))
	if len(groups) == 0 {
		t.Error("dumpe2fs printed no backup superblock")
	}
	for _, group := range groups {
		if backup := testenv.Run(t, "dumpe2fs", "-h", "-o", "superblock="+group, "-o", "blocksize=4096", f.Name()); field(t, backup, "Filesystem UUID:") != uuid {
			t.Errorf("the backup superblock at block %s has another UUID than the primary one", group)
		}
	}
}

// TestTemplateInUse: two copies of a template can be mounted and written at the same time. After a power failure, their journals
// are replayed.
func TestTemplateInUse(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			formatter := blockdev.NewFormatter()
			var images, dirs []string
			for range 2 {
				f := formatNew(t, formatter, gib, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096})
				dir := t.TempDir()
				testenv.Run(t, "mount", "-t", fsType, "-o", "loop", f.Name(), dir)
				t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
				images, dirs = append(images, f.Name()), append(dirs, dir)
			}
			for _, dir := range dirs {
				for i := range 500 {
					must(t, os.WriteFile(filepath.Join(dir, "old"+strconv.Itoa(i)), content(i), 0o600))
				}
				testenv.Run(t, "sync", "-f", dir)
				for i := range 20 {
					writeSynced(t, filepath.Join(dir, "new"+strconv.Itoa(i)), content(i))
				}
			}
			for i, image := range images {
				failed := copyImage(t, image) // the content of the disk at a power failure
				must(t, unix.Unmount(dirs[i], 0))
				must(t, testenv.Fsck(fsType, image))
				if fsType == "btrfs" { // the kernel prefers the original, which is newer, as long as it knows it
					testenv.Run(t, "btrfs", "device", "scan", "--forget")
				}
				testenv.Run(t, "mount", "-t", fsType, "-o", "loop", failed.Name(), dirs[i])
				requireFiles(t, dirs[i])
				must(t, unix.Unmount(dirs[i], 0))
				must(t, testenv.Fsck(fsType, failed.Name()))
			}
		})
	}
}

// TestNoTemplate: FormatNew does not change an image of whose filesystem there is no template.
func TestNoTemplate(t *testing.T) {
	for name, tc := range map[string]struct {
		size int64
		spec blockdev.FormatSpec
		path string // PATH of programs; empty for no change
	}{
		"too large":         {17 * gib, blockdev.FormatSpec{FSType: "ext4", SectorSize: 4096}, ""},
		"old data":          {gib, blockdev.FormatSpec{FSType: "ext4", SectorSize: 4096, Stale: true}, ""},
		"mkfs fails":        {16 * mib, blockdev.FormatSpec{FSType: "xfs", SectorSize: 4096}, ""},
		"without mkfs":      {gib, blockdev.FormatSpec{FSType: "ext4", SectorSize: 4096}, "/nowhere"},
		"unknown checksums": {gib, blockdev.FormatSpec{FSType: "btrfs", SectorSize: 4096, Options: []string{"--csum", "sha256"}}, ""},
		"large nodes":       {gib, blockdev.FormatSpec{FSType: "btrfs", SectorSize: 4096, Options: []string{"-n", "65536"}}, ""},
		"small sectors":     {gib, blockdev.FormatSpec{FSType: "xfs", SectorSize: 512}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.path != "" {
				t.Setenv("PATH", tc.path)
			}
			f, formatter := newImage(t, tc.size), blockdev.NewFormatter()
			for range 2 { // the second call may find the result of the first
				if formatted, err := formatter.FormatNew(t.Context(), f, tc.spec); formatted || err != nil {
					t.Errorf("got %t, %v, want false", formatted, err)
				}
			}
			must(t, blockdev.RequireBlank(f))
		})
	}
}

// TestHangingMkfs: if mkfs of one type hangs, a call returns without a template before its deadline, and the templates of the
// other types are still made.
func TestHangingMkfs(t *testing.T) {
	bin := t.TempDir()
	fifo := filepath.Join(bin, "release")
	must(t, unix.Mkfifo(fifo, 0o600))
	release, err := os.OpenFile(fifo, os.O_RDWR, 0)
	must(t, err)
	defer release.Close() // ends mkfs.btrfs
	must(t, os.WriteFile(filepath.Join(bin, "mkfs.btrfs"), []byte("#!/bin/sh\nread word <"+fifo+"\nexit 1\n"), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))

	formatter := blockdev.NewFormatter()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	formatted, err := formatter.FormatNew(ctx, newImage(t, gib), blockdev.FormatSpec{FSType: "btrfs", SectorSize: 4096})
	if formatted || err != nil || ctx.Err() != nil {
		t.Errorf("got %t, %v with the context %v, want no template before the deadline", formatted, err, ctx.Err())
	}
	for _, fsType := range []string{"ext4", "xfs"} {
		formatNew(t, formatter, gib, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096})
	}
}
