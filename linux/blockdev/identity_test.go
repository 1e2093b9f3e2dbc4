package blockdev_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// uuidOf returns the UUID of the filesystem on an image.
func uuidOf(t *testing.T, image string) string {
	t.Helper()
	return testenv.Run(t, "blkid", "-p", "-o", "value", "-s", "UUID", image)
}

// mountImage mounts an image until the test ends, or unmount is called.
func mountImage(t *testing.T, fsType, image string) (dir string, unmount func()) {
	t.Helper()
	dir = t.TempDir()
	options := map[string]string{"ext4": "loop", "xfs": "loop,nouuid", "btrfs": "loop,commit=300"}[fsType]
	testenv.Run(t, "mount", "-t", fsType, "-o", options, image, dir)
	unmount = sync.OnceFunc(func() { must(t, unix.Unmount(dir, 0)) })
	t.Cleanup(unmount)
	return dir, unmount
}

// newImageInUse creates an image whose filesystem stays mounted. Some of its files are only in its journal,
// because they were synced after the last commit.
func newImageInUse(t *testing.T, fsType string, size int64) (image string) {
	t.Helper()
	f := newFilesystem(t, fsType, size)
	dir, _ := mountImage(t, fsType, f.Name())
	for i := range 500 {
		must(t, os.WriteFile(filepath.Join(dir, "old"+strconv.Itoa(i)), content(i), 0o600))
	}
	testenv.Run(t, "sync", "-f", dir)
	for i := range 20 {
		writeSynced(t, filepath.Join(dir, "new"+strconv.Itoa(i)), content(i))
	}
	switch fsType {
	case "ext4":
		if info := testenv.Run(t, "dumpe2fs", "-h", f.Name()); !strings.Contains(info, "needs_recovery") {
			t.Fatalf("setup: the ext4 has no journal to replay: %s", info)
		}
	case "btrfs":
		if info := testenv.Run(t, "btrfs", "inspect-internal", "dump-super", f.Name()); field(t, info, "\nlog_root\t") == "0" {
			t.Fatalf("setup: the btrfs has no log to replay: %s", info)
		}
	}
	return f.Name()
}

// content returns the content of the file with a number.
func content(i int) []byte { return bytes.Repeat([]byte(fmt.Sprintf("%07d\n", i)), 1000) }

// writeSynced creates a file and makes its content durable.
func writeSynced(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	_, err = f.Write(b)
	must(t, err)
	must(t, f.Sync())
}

// copyImage creates a copy of an image and opens it for writing.
func copyImage(t *testing.T, image string) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "copy")
	testenv.Run(t, "cp", "--sparse=always", image, name)
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	t.Cleanup(func() { must(t, f.Close()) })
	return f
}

// requireFiles requires the files that newImageInUse created.
func requireFiles(t *testing.T, dir string) {
	t.Helper()
	for prefix, n := range map[string]int{"old": 500, "new": 20} {
		for i := range n {
			got, err := os.ReadFile(filepath.Join(dir, prefix+strconv.Itoa(i)))
			if err != nil || !bytes.Equal(got, content(i)) {
				t.Fatalf("file %s%d: got %d bytes, %v, want %d bytes of its original content", prefix, i, len(got), err, len(content(i)))
			}
		}
	}
}

// TestReidentify: a copy of a filesystem in use, and a copy of the copy, can be mounted beside the original, and have
// all synced files.
func TestReidentify(t *testing.T) {
	testenv.RequireRoot(t)
	for fsType, size := range map[string]int64{"ext4": gib, "xfs": 400 * mib, "btrfs": 400 * mib} {
		t.Run(fsType, func(t *testing.T) {
			image := newImageInUse(t, fsType, size)
			uuids := map[string]bool{uuidOf(t, image): true}
			for range 2 {
				f := copyImage(t, image)
				must(t, blockdev.Reidentify(t.Context(), f, fsType))
				uuids[uuidOf(t, f.Name())] = true
				if fsType == "ext4" { // the others replay their log when they are mounted
					must(t, testenv.Fsck(fsType, f.Name()))
				}
				dir, unmount := mountImage(t, fsType, f.Name())
				requireFiles(t, dir)
				unmount()
				must(t, testenv.Fsck(fsType, f.Name()))
				dir, _ = mountImage(t, fsType, f.Name())
				writeSynced(t, filepath.Join(dir, "new file"), content(1))
				image = f.Name()
			}
			if want := map[string]int{"ext4": 3, "xfs": 1, "btrfs": 3}[fsType]; len(uuids) != want {
				t.Errorf("got UUIDs %v, want %d different ones", uuids, want)
			}
		})
	}
}

// TestReidentifyDevice: Reidentify works on a loop device, which can then be mounted.
func TestReidentifyDevice(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			image := newImageInUse(t, fsType, 256*mib)
			f := copyImage(t, image)
			l, err := blockdev.AttachLoop(t.Context(), f, blockdev.LoopConfig{SectorSize: 4096, AutoClear: true})
			must(t, err)
			defer l.Close()
			must(t, blockdev.Reidentify(t.Context(), l.File(), fsType))
			dir := t.TempDir()
			must(t, unix.Mount(blockdev.LoopPath(l.Number), dir, fsType, 0, ""))
			defer func() { must(t, unix.Unmount(dir, 0)) }()
			requireFiles(t, dir)
		})
	}
}

// TestReidentifyAgain: after a call was interrupted, whichever superblocks it had written, the next call
// results in a filesystem without errors.
func TestReidentifyAgain(t *testing.T) {
	testenv.RequireRoot(t)
	const attempts = 6
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			before := copyImage(t, newImageInUse(t, fsType, gib))
			if fsType == "ext4" { // e2fsck must replay the journal before the comparison
				must(t, blockdev.Reidentify(t.Context(), before, fsType))
			}
			after := copyImage(t, before.Name())
			must(t, blockdev.Reidentify(t.Context(), after, fsType))
			changed := differences(t, before, after)
			if want := map[string]int{"ext4": 5, "btrfs": 2}[fsType]; len(changed) != want {
				t.Fatalf("got %d changed blocks, want %d", len(changed), want)
			}
			for range attempts {
				interrupted := copyImage(t, before.Name())
				for at, block := range changed {
					if rand.IntN(2) == 0 {
						_, err := interrupted.WriteAt(block, at)
						must(t, err)
					}
				}
				must(t, blockdev.Reidentify(t.Context(), interrupted, fsType))
				dir, unmount := mountImage(t, fsType, interrupted.Name())
				requireFiles(t, dir)
				unmount()
				must(t, testenv.Fsck(fsType, interrupted.Name()))
			}
		})
	}
}

// differences returns the blocks of b that differ from a, by their offsets.
func differences(t *testing.T, a, b *os.File) map[int64][]byte {
	t.Helper()
	const block = 4096
	changed := map[int64][]byte{}
	one, other := make([]byte, block), make([]byte, block)
	for at := int64(0); ; at += block {
		if _, err := a.ReadAt(one, at); errors.Is(err, io.EOF) {
			return changed
		}
		_, err := b.ReadAt(other, at)
		must(t, err)
		if !bytes.Equal(one, other) {
			changed[at] = bytes.Clone(other)
		}
	}
}

// TestReidentifyBackups: each superblock has the new UUID, including those that growing an ext4 has created,
// and that of a btrfs at 256 GiB.
func TestReidentifyBackups(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("ext4", func(t *testing.T) {
		f := copyImage(t, newImageInUse(t, "ext4", 256*mib))
		must(t, blockdev.Reidentify(t.Context(), f, "ext4"))
		must(t, f.Truncate(gib))
		testenv.Run(t, "resize2fs", "-f", f.Name())
		must(t, blockdev.Reidentify(t.Context(), f, "ext4"))
		for _, group := range []int{1, 3, 5, 7} {
			info := testenv.Run(t, "dumpe2fs", "-h", "-o", "superblock="+strconv.Itoa(group*32768), "-o", "blocksize=4096", f.Name())
			if field(t, info, "Filesystem UUID:") != uuidOf(t, f.Name()) {
				t.Errorf("the superblock of group %d does not have the new UUID: %s", group, info)
			}
		}
		must(t, testenv.Fsck("ext4", f.Name()))
	})
	t.Run("btrfs", func(t *testing.T) {
		f := newFilesystem(t, "btrfs", 257*gib)
		must(t, blockdev.Reidentify(t.Context(), f, "btrfs"))
		for _, mirror := range []string{"0", "1", "2"} {
			info := testenv.Run(t, "btrfs", "inspect-internal", "dump-super", "-s", mirror, f.Name())
			if field(t, info, "\nfsid") != uuidOf(t, f.Name()) || !strings.Contains(field(t, info, "\ncsum\t"), "[match]") {
				t.Errorf("superblock %s does not have the new UUID and a valid checksum: %s", mirror, info)
			}
		}
		must(t, testenv.Fsck("btrfs", f.Name()))
	})
}

// TestReidentifyRefuses: Reidentify refuses an image without the filesystem. It does not change a filesystem that Format
// did not create, and refuses a btrfs, of which the kernel mounts only one with the same UUID.
func TestReidentifyRefuses(t *testing.T) {
	for _, tc := range []struct {
		name, fsType string
		mkfs         []string
		want         error
	}{
		{"blank image", "ext4", nil, blockdev.ErrNoFS},
		{"blank image", "btrfs", nil, blockdev.ErrNoFS},
		{"unsupported type", "zfs", nil, blockdev.ErrNoFS},
		{"checksums that depend on the UUID", "ext4", []string{"mkfs.ext4", "-q", "-O", "^metadata_csum_seed"}, nil},
		{"small blocks", "ext4", []string{"mkfs.ext4", "-q", "-b", "1024", "-O", "metadata_csum_seed"}, nil},
		{"checksums of another type", "btrfs", []string{"mkfs.btrfs", "-q", "--csum", "sha256"}, blockdev.ErrForeign},
	} {
		t.Run(tc.fsType+" "+tc.name, func(t *testing.T) {
			f := newImage(t, 256*mib)
			if tc.mkfs != nil {
				testenv.Run(t, tc.mkfs[0], append(tc.mkfs[1:], f.Name())...)
			}
			before := copyImage(t, f.Name())
			if err := blockdev.Reidentify(t.Context(), f, tc.fsType); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if changed := differences(t, before, f); len(changed) != 0 {
				t.Errorf("got %d changed blocks, want 0", len(changed))
			}
		})
	}
}
