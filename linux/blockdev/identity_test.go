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

// checkers find all errors of a filesystem that is not mounted, and change nothing.
var checkers = map[string][]string{
	"ext4":  {"e2fsck", "-fn"},
	"xfs":   {"xfs_repair", "-n"},
	"btrfs": {"btrfs", "check", "--readonly"},
}

func checkClean(t *testing.T, fsType, image string) {
	t.Helper()
	words := checkers[fsType]
	testenv.Run(t, words[0], append(words[1:], image)...)
}

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

// inUse creates an image whose filesystem is mounted. Some of its files are only in its journal: they were synced
// after the last commit.
func inUse(t *testing.T, fsType string, size int64) (image string) {
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
			t.Fatalf("no journal to replay: %s", info)
		}
	case "btrfs":
		if info := testenv.Run(t, "btrfs", "inspect-internal", "dump-super", f.Name()); field(t, info, "\nlog_root\t") == "0" {
			t.Fatalf("no log to replay: %s", info)
		}
	}
	return f.Name()
}

func content(i int) []byte { return bytes.Repeat([]byte(fmt.Sprintf("%07d\n", i)), 1000) }

func writeSynced(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	_, err = f.Write(b)
	must(t, err)
	must(t, f.Sync())
}

// twin creates a copy of an image and opens it for writing.
func twin(t *testing.T, image string) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "copy")
	testenv.Run(t, "cp", "--sparse=always", image, name)
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	t.Cleanup(func() { must(t, f.Close()) })
	return f
}

func requireFiles(t *testing.T, dir string) {
	t.Helper()
	for prefix, n := range map[string]int{"old": 500, "new": 20} {
		for i := range n {
			got, err := os.ReadFile(filepath.Join(dir, prefix+strconv.Itoa(i)))
			if err != nil || !bytes.Equal(got, content(i)) {
				t.Fatalf("%s%d: %d bytes, %v", prefix, i, len(got), err)
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
			image := inUse(t, fsType, size)
			uuids := map[string]bool{uuidOf(t, image): true}
			for range 2 {
				f := twin(t, image)
				must(t, blockdev.Reidentify(t.Context(), f, fsType))
				uuids[uuidOf(t, f.Name())] = true
				if fsType == "ext4" {
					checkClean(t, fsType, f.Name())
				}
				dir, unmount := mountImage(t, fsType, f.Name())
				requireFiles(t, dir)
				unmount()
				checkClean(t, fsType, f.Name())
				dir, _ = mountImage(t, fsType, f.Name())
				writeSynced(t, filepath.Join(dir, "mine"), content(1))
				image = f.Name()
			}
			if want := map[string]int{"ext4": 3, "xfs": 1, "btrfs": 3}[fsType]; len(uuids) != want {
				t.Errorf("UUIDs %v", uuids)
			}
		})
	}
}

// TestReidentifyDevice: Reidentify works on a loop device, which can then be mounted.
func TestReidentifyDevice(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			image := inUse(t, fsType, 256*mib)
			f := twin(t, image)
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

// TestReidentifyAgain: for any subset of the superblocks that an interrupted call has written, the next call results in
// a filesystem without errors.
func TestReidentifyAgain(t *testing.T) {
	testenv.RequireRoot(t)
	const attempts = 6
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			before := twin(t, inUse(t, fsType, gib))
			if fsType == "ext4" { // e2fsck must replay the journal before the comparison
				must(t, blockdev.Reidentify(t.Context(), before, fsType))
			}
			after := twin(t, before.Name())
			must(t, blockdev.Reidentify(t.Context(), after, fsType))
			changed := differences(t, before, after)
			if want := map[string]int{"ext4": 5, "btrfs": 2}[fsType]; len(changed) != want {
				t.Fatalf("blocks %v were changed", changed)
			}
			for range attempts {
				cut := twin(t, before.Name())
				for at, block := range changed {
					if rand.IntN(2) == 0 {
						_, err := cut.WriteAt(block, at)
						must(t, err)
					}
				}
				must(t, blockdev.Reidentify(t.Context(), cut, fsType))
				dir, unmount := mountImage(t, fsType, cut.Name())
				requireFiles(t, dir)
				unmount()
				checkClean(t, fsType, cut.Name())
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

// TestReidentifyBackups: each superblock has the new UUID, also the ones that were created by growing, and the one of a
// btrfs at 256 GiB.
func TestReidentifyBackups(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("ext4", func(t *testing.T) {
		f := twin(t, inUse(t, "ext4", 256*mib))
		must(t, blockdev.Reidentify(t.Context(), f, "ext4"))
		must(t, f.Truncate(gib))
		testenv.Run(t, "resize2fs", "-f", f.Name())
		must(t, blockdev.Reidentify(t.Context(), f, "ext4"))
		for _, group := range []int{1, 3, 5, 7} {
			info := testenv.Run(t, "dumpe2fs", "-h", "-o", "superblock="+strconv.Itoa(group*32768), "-o", "blocksize=4096", f.Name())
			if field(t, info, "Filesystem UUID:") != uuidOf(t, f.Name()) {
				t.Errorf("the superblock of group %d: %s", group, info)
			}
		}
		checkClean(t, "ext4", f.Name())
	})
	t.Run("btrfs", func(t *testing.T) {
		f := newFilesystem(t, "btrfs", 257*gib)
		must(t, blockdev.Reidentify(t.Context(), f, "btrfs"))
		for _, mirror := range []string{"0", "1", "2"} {
			info := testenv.Run(t, "btrfs", "inspect-internal", "dump-super", "-s", mirror, f.Name())
			if field(t, info, "\nfsid") != uuidOf(t, f.Name()) || !strings.Contains(field(t, info, "\ncsum\t"), "[match]") {
				t.Errorf("superblock %s: %s", mirror, info)
			}
		}
		checkClean(t, "btrfs", f.Name())
	})
}

func TestReidentifyRefuses(t *testing.T) {
	for _, tc := range []struct {
		name, fsType string
		mkfs         []string
		want         error
	}{
		{"nothing", "ext4", nil, blockdev.ErrNoFS},
		{"nothing", "btrfs", nil, blockdev.ErrNoFS},
		{"another type", "zfs", nil, blockdev.ErrNoFS},
		{"checksums with the UUID", "ext4", []string{"mkfs.ext4", "-q", "-O", "^metadata_csum_seed"}, blockdev.ErrForeign},
		{"other checksums", "btrfs", []string{"mkfs.btrfs", "-q", "--csum", "sha256"}, blockdev.ErrForeign},
	} {
		t.Run(tc.fsType+" "+tc.name, func(t *testing.T) {
			f := newImage(t, 256*mib)
			if tc.mkfs != nil {
				testenv.Run(t, tc.mkfs[0], append(tc.mkfs[1:], f.Name())...)
			}
			before := twin(t, f.Name())
			if err := blockdev.Reidentify(t.Context(), f, tc.fsType); !errors.Is(err, tc.want) {
				t.Errorf("%v", err)
			}
			if changed := differences(t, before, f); len(changed) != 0 {
				t.Errorf("%d blocks were changed", len(changed))
			}
		})
	}
}
