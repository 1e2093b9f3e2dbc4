package loop_test

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// damages make the filesystem in an image inconsistent, by its type. ext4 and xfs can still be mounted.
var damages = map[string]func(t *testing.T, image string){
	"ext4": func(t *testing.T, image string) {
		t.Helper()
		testenv.Run(t, "debugfs", "-w", "-R", "set_inode_field file links_count 5", image)
	},
	"xfs": func(t *testing.T, image string) {
		t.Helper()
		testenv.Run(t, "xfs_db", "-x", "-c", "path /file", "-c", "write core.nlinkv2 5", image)
	},
	"btrfs": damageTree,
}

// damageTree overwrites all copies of the blocks of a btrfs's tree of files.
func damageTree(t *testing.T, image string) {
	t.Helper()
	const super, fsid, owner, filesTree = 64 << 10, 0x20, 0x58, 5 // of uapi/linux/btrfs_tree.h
	b, err := os.ReadFile(image)
	must(t, err)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	for at := super + 4096; at < len(b); at += 4096 {
		block := b[at:]
		if bytes.Equal(block[fsid:fsid+16], b[super+fsid:super+fsid+16]) && binary.LittleEndian.Uint64(block[owner:]) == filesTree {
			_, err := f.WriteAt(make([]byte, 64), int64(at+200))
			must(t, err)
		}
	}
	must(t, f.Sync())
}

// TestCheckDamaged: a check reports a damaged filesystem and changes nothing, health shows the result until a later check finds no
// errors, and the copy is removed.
func TestCheckDamaged(t *testing.T) {
	for _, fsType := range slices.Sorted(maps.Keys(damages)) {
		t.Run(fsType, func(t *testing.T) {
			s := start(t, "4G")
			s.setKind(fsType)
			must(t, s.create(t, "v", gib/2, nil))
			must(t, s.stage(t.Context()))
			must(t, os.WriteFile(filepath.Join(s.staging, "file"), []byte("content"), 0o600))
			must(t, s.unstage(t.Context()))
			healthy, err := os.ReadFile(s.image())
			must(t, err)
			testenv.Run(t, "sync", "-f", s.disk) // xfs may still hold blocks for what was written
			room := s.capacity(t)

			damages[fsType](t, s.image())
			before := sum(t, s.image())
			r := s.Check(t, s.id)
			if r.Result != driver.CheckDamaged || r.Errors == "" || r.Problem != "" {
				t.Errorf("got result %+v, want the errors of the filesystem", r)
			}
			t.Log(r.Errors)
			if sum(t, s.image()) != before {
				t.Error("the check has changed the image")
			}
			damaged := func(h *csi.VolumeHealth_VolumeHealthEntry) bool { return h.GetReason() == "FilesystemDamaged" }
			if health := s.health(t); !slices.ContainsFunc(health, damaged) {
				t.Errorf("got health %v, want FilesystemDamaged", health)
			}

			must(t, os.WriteFile(s.image(), healthy, 0o600))
			must(t, os.Truncate(s.image(), int64(len(healthy)))) // frees the blocks behind the end that xfs has allocated for later writes
			if r := s.Check(t, s.id); r.Result != driver.CheckClean || r.LastResult != driver.CheckDamaged {
				t.Errorf("got result %+v of the repaired filesystem, want clean, and before damaged", r)
			}
			if health := s.health(t); slices.ContainsFunc(health, damaged) {
				t.Errorf("got health %v of the repaired filesystem, want no FilesystemDamaged", health)
			}
			s.awaitEmptyTrash(t)  // the temporary snapshots
			const slack = 1 << 20 // the result of the check, and the extents of the image, use a few blocks of the pool
			s.awaitCapacity(t, room, slack)
			s.mustDelete(t)
			s.wantNothingLeft(t)
		})
	}
}

// sum returns the checksum of a file.
func sum(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return sha256.Sum256(b)
}

// TestCheckRoom: a check needs as much room in the pool as the volume has allocated. Without it, the check is refused, and leaves
// nothing.
func TestCheckRoom(t *testing.T) {
	s := start(t, "4G")
	s.Stop(t)
	s.Options.Config.Pools[0].Size = "700Mi"
	s.Restart(t)
	must(t, s.create(t, "v", gib/2, nil))
	must(t, s.stage(t.Context()))
	content := make([]byte, 300<<20)
	_, _ = rand.Read(content) // never fails
	must(t, os.WriteFile(filepath.Join(s.staging, "file"), content, 0o600))
	testenv.Run(t, "sync", "-f", s.staging)
	room := s.capacity(t)
	if r := s.Check(t, s.id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "the check needs a temporary copy") || !strings.Contains(r.Problem, "has room for") {
		t.Errorf("got result %+v, want a problem, because the pool has no room", r)
	}
	s.awaitCapacity(t, room, 0)
	must(t, s.unstage(t.Context()))
	s.mustDelete(t)
	s.wantNothingLeft(t)
}

// TestCheckWithoutSharing: a check of a volume whose pool cannot share blocks is refused with the remedy.
func TestCheckWithoutSharing(t *testing.T) {
	s := startOn(t, testenv.Filesystem(t, "ext4", "4G"))
	s.createFormatted(t, "v")
	if r := s.Check(t, s.id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "cannot share blocks") || !strings.Contains(r.Problem, s.image()) {
		t.Errorf("got result %+v, want that the pool cannot share blocks, and the image", r)
	}
	s.mustDelete(t)
	s.createBlank(t, "blank")
	if r := s.Check(t, s.id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "no filesystem yet") {
		t.Errorf("got result %+v of a volume that was never staged, want that it has no filesystem", r)
	}
	s.mustDelete(t)
	s.wantNothingLeft(t)
}

// TestCheckForeign: a check of a btrfs whose copy cannot get another UUID is refused with the remedy.
func TestCheckForeign(t *testing.T) {
	s := start(t, "4G")
	s.setKind("btrfs")
	s.createFormatted(t, "v")
	testenv.Run(t, "mkfs.btrfs", "-f", "-q", "--csum", "sha256", s.image())
	if r := s.Check(t, s.id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "check it with the tools of btrfs") {
		t.Errorf("got result %+v, want that the filesystem must be checked with its own tools", r)
	}
	s.mustDelete(t)
	s.wantNothingLeft(t)
}
