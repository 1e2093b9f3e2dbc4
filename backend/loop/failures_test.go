package loop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// subject is a driver with a pool on a new disk, and the volume that its methods use.
type subject struct {
	*backendtest.Driver
	disk    string // where the pool's filesystem is mounted
	id      string
	cap     *csi.VolumeCapability
	staging string
	target  string
}

// start starts a driver with a pool on a new XFS filesystem.
func start(t testing.TB, size string) *subject {
	t.Helper()
	return startOn(t, testenv.Filesystem(t, "xfs", size))
}

// startOn starts a driver with a pool on a mounted filesystem.
func startOn(t testing.TB, disk string) *subject {
	t.Helper()
	s := &subject{Driver: backendtest.Start(t, disk, loop.Kind), disk: disk, staging: t.TempDir(), target: filepath.Join(t.TempDir(), "target")}
	s.setKind("ext4")
	return s
}

// setKind sets the filesystem of the volumes. Without a filesystem ("") they are raw devices.
func (s *subject) setKind(fsType string) {
	s.cap = backendtest.Kind{FSType: fsType}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
}

// create creates a volume, which the other methods then use.
func (s *subject) create(t testing.TB, name string, size int64, parameters map[string]string) error {
	t.Helper()
	resp, err := s.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{s.cap}, Parameters: parameters,
	})
	if err == nil {
		s.id = resp.GetVolume().GetVolumeId()
	}
	return err
}

func (s *subject) stage(ctx context.Context) error {
	_, err := s.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: s.id, StagingTargetPath: s.staging, VolumeCapability: s.cap})
	return err
}

func (s *subject) unstage(ctx context.Context) error {
	_, err := s.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: s.id, StagingTargetPath: s.staging})
	return err
}

// restage stages and unstages the volume.
func (s *subject) restage(t *testing.T) {
	t.Helper()
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
}

// createBlank creates a volume that is formatted when it is staged.
func (s *subject) createBlank(t *testing.T, name string) {
	t.Helper()
	must(t, s.create(t, name, gib, map[string]string{"mkfsOptions": "-m 1"}))
}

// createFormatted creates a volume that was staged.
func (s *subject) createFormatted(t *testing.T, name string) {
	t.Helper()
	must(t, s.create(t, name, gib, nil))
	s.restage(t)
}

func (s *subject) publish(ctx context.Context, readOnly bool) error {
	return s.publishAt(ctx, s.target, readOnly)
}

// publishAt publishes the volume at target. readOnly is the argument readonly of the call.
func (s *subject) publishAt(ctx context.Context, target string, readOnly bool) error {
	_, err := s.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: s.id, StagingTargetPath: s.staging, TargetPath: target, VolumeCapability: s.cap, Readonly: readOnly,
	})
	return err
}

func (s *subject) unpublish(ctx context.Context) error { return s.unpublishAt(ctx, s.target) }

func (s *subject) unpublishAt(ctx context.Context, target string) error {
	_, err := s.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: s.id, TargetPath: target})
	return err
}

func (s *subject) expand(ctx context.Context, size int64) error {
	_, err := s.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: s.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
	})
	return err
}

func (s *subject) delete(ctx context.Context) error {
	_, err := s.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.id})
	return err
}

// mustDelete is delete, which must succeed.
func (s *subject) mustDelete(t *testing.T) {
	t.Helper()
	must(t, s.delete(t.Context()))
}

// health returns the conditions of the volume.
func (s *subject) health(t *testing.T) []*csi.VolumeHealth_VolumeHealthEntry {
	t.Helper()
	resp, err := s.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: s.id})
	must(t, err)
	return resp.GetVolumeHealth().GetHealthStatuses()
}

func (s *subject) pool() string { return filepath.Join(s.disk, "pool") }

func (s *subject) image() string {
	return filepath.Join(s.pool(), "volumes", s.id[strings.LastIndex(s.id, ":")+1:], "image")
}

func (s *subject) capacity(t *testing.T) int64 {
	t.Helper()
	resp, err := s.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	must(t, err)
	return resp.GetAvailableCapacity()
}

// wantUnattached fails the test if the image has a loop device.
func (s *subject) wantUnattached(t *testing.T) {
	t.Helper()
	if numbers := bound(s.image()); len(numbers) > 0 {
		t.Errorf("loop devices of the image: got %v, want none", numbers)
	}
}

// wantNothingLeft fails the test unless the pool has no volumes and no entries in tmp.
func (s *subject) wantNothingLeft(t *testing.T) {
	t.Helper()
	for _, dir := range []string{".trivet/tmp", "volumes"} {
		entries, err := os.ReadDir(filepath.Join(s.pool(), dir))
		must(t, err)
		if len(entries) > 0 {
			t.Errorf("%s contains %v, want nothing", dir, entries)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantCode fails the test unless err has the code and contains all texts. It needs at least one text.
func wantCode(t *testing.T, err error, code codes.Code, says ...string) {
	t.Helper()
	for _, s := range says {
		if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), s) {
			t.Errorf("got %v, want %v that contains %q", err, code, s)
		}
	}
}

const gib = 1 << 30

// TestFormattedAtCreation: a new image has a complete filesystem of its own, and staging it makes no other change to its folder.
// Thin images stay thin.
func TestFormattedAtCreation(t *testing.T) {
	s := start(t, "8G")
	uuids := map[string]bool{}
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.setKind(fsType)
		for _, allocation := range []string{"thin", "thick", "thin"} {
			must(t, s.create(t, fmt.Sprintf("%s-%s-%d", fsType, allocation, len(uuids)), gib, map[string]string{"allocation": allocation}))
			must(t, testenv.Fsck(fsType, s.image()))
			s.wantAllocated(t, allocation == "thick", gib)
			if n := s.allocated(t); allocation == "thin" && n > 5<<20 {
				t.Errorf("%s: a new thin image has %d allocated bytes, want at most 5 MiB", fsType, n)
			}
			uuids[testenv.Run(t, "blkid", "-p", "-o", "value", "-s", "UUID", s.image())] = true
			folder := filepath.Dir(s.image())
			before, err := os.Stat(folder)
			must(t, err)
			if _, err := os.Stat(filepath.Join(folder, "formatted")); err != nil {
				t.Errorf("%s: the volume is not marked as formatted: %v", fsType, err)
			}
			must(t, s.stage(t.Context()))
			if after, err := os.Stat(folder); err != nil || !after.ModTime().Equal(before.ModTime()) {
				t.Errorf("%s: stage has changed the volume's folder: %v, %v", fsType, after, err)
			}
			must(t, os.WriteFile(filepath.Join(s.staging, "file"), []byte("content"), 0o600))
			must(t, s.unstage(t.Context()))
			must(t, testenv.Fsck(fsType, s.image()))
			s.mustDelete(t)
		}
	}
	if len(uuids) != 9 {
		t.Errorf("got the UUIDs %v of nine volumes, want nine", uuids)
	}
}

// TestForeignData: an image that contains data and was never formatted is not formatted.
func TestForeignData(t *testing.T) {
	s := start(t, "8G")
	for name, offset := range map[string]int64{"begin": 0, "middle": gib/2 + 77, "end": gib - 1} {
		s.createBlank(t, "foreign-"+name)
		f, err := os.OpenFile(s.image(), os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte{1}, offset)
		must(t, err)
		wantCode(t, s.stage(t.Context()), codes.DataLoss, "never formatted", s.image())
		got := make([]byte, 1)
		if _, err := f.ReadAt(got, offset); err != nil || got[0] != 1 {
			t.Errorf("%s: foreign byte: got %d, %v; want 1 as before", name, got[0], err)
		}
		must(t, f.Close())
		s.wantUnattached(t)
		s.mustDelete(t)
	}
	// An image to which only zeros were written counts as blank.
	s.createBlank(t, "zeros")
	must(t, os.WriteFile(s.image(), make([]byte, 1<<20), 0o600))
	must(t, os.Truncate(s.image(), gib))
	s.restage(t)
	s.mustDelete(t)
}

// TestForeignImage: a file of another type at the path of the image is not attached.
func TestForeignImage(t *testing.T) {
	s := start(t, "8G")
	precious := filepath.Join(s.disk, "precious")
	must(t, os.WriteFile(precious, bytes.Repeat([]byte("precious"), gib/8/64), 0o600))
	before, err := os.ReadFile(precious)
	must(t, err)
	for name, replace := range map[string]func() error{
		"link":      func() error { return os.Symlink(precious, s.image()) },
		"directory": func() error { return os.Mkdir(s.image(), 0o700) },
		"fifo":      func() error { return unix.Mkfifo(s.image(), 0o600) },
		"device":    func() error { return unix.Mknod(s.image(), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))) },
	} {
		must(t, s.create(t, name, gib, nil))
		must(t, os.Rename(s.image(), s.image()+".own"))
		must(t, replace())
		wantCode(t, s.stage(t.Context()), codes.DataLoss, s.image())
		must(t, os.Remove(s.image()))
		wantCode(t, s.stage(t.Context()), codes.DataLoss, "missing", s.image())
		must(t, os.Rename(s.image()+".own", s.image()))
		s.restage(t)
		s.mustDelete(t)
	}
	if after, err := os.ReadFile(precious); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the target of the link was changed, or cannot be read: %v", err)
	}
}

// TestTruncatedImage: a truncated image is neither attached nor expanded.
func TestTruncatedImage(t *testing.T) {
	s := start(t, "8G")
	s.createFormatted(t, "short")
	must(t, os.Truncate(s.image(), gib/2))
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "truncated", "512 MiB")
	wantCode(t, s.expand(t.Context(), 2*gib), codes.DataLoss, "truncated")
	if info, err := os.Stat(s.image()); err != nil || info.Size() != gib/2 {
		t.Errorf("the image: got %v, %v; want a size of %d as before", info, err, gib/2)
	}
	if got := s.health(t); len(got) != 1 || got[0].GetReason() != "ImageTruncated" || got[0].GetStatus() != csi.VolumeHealthErrorType_DATA_LOSS {
		t.Errorf("health: got %v, want DATA_LOSS with reason ImageTruncated", got)
	}
	s.mustDelete(t)
}

// TestDamagedSuperblock: an image whose filesystem is not recognized is not formatted as blank.
func TestDamagedSuperblock(t *testing.T) {
	s := start(t, "8G")
	s.createFormatted(t, "damaged")
	f, err := os.OpenFile(s.image(), os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(make([]byte, 4096), 0)
	must(t, err)
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "nothing was changed", s.image())
	head := make([]byte, 4096)
	if _, err := f.ReadAt(head, 0); err != nil || !bytes.Equal(head, make([]byte, 4096)) {
		t.Errorf("the image was changed, or cannot be read: %v", err)
	}
	must(t, f.Close())
	s.wantUnattached(t)
	s.mustDelete(t)
}

// TestDirtyFilesystem: ext4 with a recorded error is checked before it is mounted. A filesystem that
// e2fsck -p cannot repair is not changed.
func TestDirtyFilesystem(t *testing.T) {
	s := start(t, "8G")
	s.createFormatted(t, "dirty")
	testenv.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", s.image())
	s.restage(t)
	if out := testenv.Run(t, "dumpe2fs", "-h", s.image()); !strings.Contains(out, "Filesystem state:         clean") {
		t.Errorf("after stage the filesystem is not clean, so it was mounted without a check:\n%s", out)
	}
	// clri clears the inode of the root directory, which e2fsck -p does not repair.
	testenv.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", s.image())
	testenv.Run(t, "debugfs", "-w", "-R", "clri <2>", s.image())
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "nothing was changed", "e2fsck")
	s.wantUnattached(t)
	s.mustDelete(t)
}

// TestDamagedRecords: a volume with a damaged record is listed, its health is reported, and its
// bytes stay reserved.
func TestDamagedRecords(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "good", gib, nil))
	must(t, s.create(t, "bad", gib, nil))
	before := s.capacity(t)
	record := filepath.Join(filepath.Dir(s.image()), "volume.json")
	saved, err := os.ReadFile(record)
	must(t, err)
	must(t, os.WriteFile(record, []byte("{"), 0o600))
	attached := filepath.Join(s.pool(), "volumes/good/attached/node")
	must(t, os.WriteFile(attached, []byte("{"), 0o600))
	s.Restart(t)
	list, err := s.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	if entries := list.GetEntries(); len(entries) != 2 || entries[0].GetVolume().GetVolumeId() != s.id || entries[1].GetVolume().GetCapacityBytes() != gib {
		t.Errorf("list: got %v, want the damaged volume %s and the good one", list, s.id)
	}
	health, err := s.Control.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	must(t, err)
	one, err := s.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: s.id})
	must(t, err)
	if h := health.GetEntries(); len(h) != 1 || h[0].String() != one.GetVolumeHealth().String() || h[0].GetHealthStatuses()[0].GetReason() != "RecordDamaged" {
		t.Errorf("health: got list %v and volume %v, want only %s with reason RecordDamaged in both", health, one, s.id)
	}
	// The restarted driver measures the foreign use again, and folders use a few blocks.
	const slack = 1 << 20
	if after := s.capacity(t); after < before-slack || after > before+slack {
		t.Errorf("capacity with a damaged record: got %d, want %d as before", after, before)
	}
	wantCode(t, s.delete(t.Context()), codes.DataLoss, "record")
	_, err = s.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: strings.Replace(s.id, ":bad", ":good", 1)})
	wantCode(t, err, codes.DataLoss, "attached/node")
	must(t, os.WriteFile(record, saved, 0o600))
	must(t, os.Remove(attached))
	s.mustDelete(t)
	s.id = strings.Replace(s.id, ":bad", ":good", 1)
	s.mustDelete(t)
	s.awaitEmptyTrash(t)
	s.awaitCapacity(t, before+2*gib, slack)
}

// awaitCapacity waits until the capacity is at most slack bytes from the wanted one. xfs frees the blocks of deleted files in the
// background.
func (s *subject) awaitCapacity(t *testing.T, want, slack int64) {
	t.Helper()
	now := int64(0)
	defer func() { t.Logf("the capacity is %d bytes", now) }()
	eventually(t, fmt.Sprintf("a capacity of %d bytes, with a slack of %d", want, slack), func() bool {
		now = s.capacity(t)
		return now >= want-slack && now <= want+slack
	})
}

// awaitEmptyTrash waits until the trash is empty and its bytes are free.
func (s *subject) awaitEmptyTrash(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		before := s.capacity(t)
		left, err := os.ReadDir(filepath.Join(s.pool(), ".trivet/trash"))
		must(t, err)
		if len(left) == 0 && s.capacity(t) == before {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("timed out: the trash contains %v", left)
		}
	}
}

// TestInterruptedGrowth: if a call was interrupted after it has grown an image, the next stage records
// the larger size. The delete frees all of it.
func TestInterruptedGrowth(t *testing.T) {
	s := start(t, "8G")
	for fsType, create := range map[string]func(){
		"ext4": func() { s.createBlank(t, "blank") }, // growth of an ext4 needs CAP_SYS_RESOURCE, which tests may lack
		"xfs":  func() { must(t, s.create(t, "formatted", gib, nil)) },
	} {
		s.setKind(fsType)
		before := s.capacity(t)
		create()
		must(t, os.Truncate(s.image(), 3*gib))
		must(t, s.stage(t.Context()))
		if after := s.capacity(t); after != before-3*gib {
			t.Errorf("%s: capacity after stage: got %d, want %d", fsType, after, before-3*gib)
		}
		s.wantFilesystemSize(t, 3*gib)
		must(t, s.unstage(t.Context()))
		s.mustDelete(t)
		s.awaitEmptyTrash(t)
		s.awaitCapacity(t, before, 0)
	}
}

// TestGrowthBeforeStage: the first stage grows the filesystem of a volume that was expanded before.
func TestGrowthBeforeStage(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			if fsType == "ext4" {
				testenv.Require(t, "ext4-growth")
			}
			s := start(t, "8G")
			s.setKind(fsType)
			must(t, s.create(t, "expanded", gib, nil))
			must(t, s.expand(t.Context(), 3*gib))
			must(t, s.stage(t.Context()))
			s.wantFilesystemSize(t, 3*gib)
			must(t, s.unstage(t.Context()))
			must(t, testenv.Fsck(fsType, s.image()))
			s.mustDelete(t)
		})
	}
}

// wantFilesystemSize fails the test unless the staged filesystem has a size, of which up to 5 % are metadata.
func (s *subject) wantFilesystemSize(t *testing.T, size uint64) {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(s.staging, &st))
	if got := st.Blocks * uint64(st.Bsize); got < size/20*19 || got > size {
		t.Errorf("got a filesystem of %d bytes, want %d", got, size)
	}
}

// TestLockedImage: a volume whose image is locked by another process is neither staged nor deleted.
func TestLockedImage(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "held", gib, nil))
	f, err := os.Open(s.image())
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	wantCode(t, s.stage(t.Context()), codes.FailedPrecondition, "locked", s.image())
	wantCode(t, s.delete(t.Context()), codes.FailedPrecondition, "locked")
	must(t, f.Close())
	s.restage(t)
	s.mustDelete(t)
}

// TestMkfsMissing: a volume that was created without mkfs is formatted when it is staged. Without mkfs that fails, and the error
// names the program.
func TestMkfsMissing(t *testing.T) {
	s := start(t, "8G")
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.setKind(fsType)
		t.Run(fsType, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir())
			must(t, s.create(t, "no-mkfs-"+fsType, gib+4096, nil))
			wantCode(t, s.stage(t.Context()), codes.FailedPrecondition, "mkfs."+fsType, "not found in PATH", "install")
		})
		s.wantUnattached(t)
		s.restage(t)
		s.mustDelete(t)
	}
}

// TestDeviceNodeMissing: publish creates the missing node of the volume's device in /dev.
func TestDeviceNodeMissing(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "node", gib, nil))
	must(t, s.stage(t.Context()))
	device := testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", s.image())
	must(t, os.Remove(device))
	must(t, s.publish(t.Context(), false))
	if info, err := os.Stat(device); err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Errorf("%s: got %v, %v; want a device node", device, info, err)
	}
	must(t, s.unpublish(t.Context()))
	must(t, s.unstage(t.Context()))
	s.mustDelete(t)
}

// TestThick: all blocks of a thick volume are allocated after create, after stage with mkfs and fstrim,
// and after an expansion. Those of a thin volume are not.
func TestThick(t *testing.T) {
	s := start(t, "8G")
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.setKind(fsType)
		for _, allocation := range []string{"thick", "thin", "thick"} {
			must(t, s.create(t, allocation+"-"+fsType, gib, map[string]string{"allocation": allocation}))
			s.wantAllocated(t, allocation == "thick", gib)
			must(t, s.stage(t.Context()))
			must(t, os.WriteFile(filepath.Join(s.staging, "file"), make([]byte, 64<<20), 0o600))
			must(t, os.Remove(filepath.Join(s.staging, "file")))
			// The kernel refuses FITRIM if the device does not support discards.
			if err := trim(t, s.staging); (err == nil) != (allocation == "thin") {
				t.Errorf("fstrim on a %s volume with %s: got %v, want an error only for thick", allocation, fsType, err)
			}
			must(t, s.unstage(t.Context()))
			s.wantAllocated(t, allocation == "thick", gib)
			must(t, s.expand(t.Context(), gib+gib/2))
			s.wantAllocated(t, allocation == "thick", gib+gib/2)
			s.mustDelete(t)
		}
	}
}

// wantAllocated fails the test unless the image has a size, and all its blocks are allocated or not.
func (s *subject) wantAllocated(t *testing.T, all bool, size int64) {
	t.Helper()
	info, err := os.Stat(s.image())
	must(t, err)
	if n := s.allocated(t); info.Size() != size || (n >= size) != all {
		t.Errorf("image: got %d bytes, %d allocated; want %d bytes, all allocated: %t", info.Size(), n, size, all)
	}
}

// allocated returns the allocated bytes of the image.
func (s *subject) allocated(t *testing.T) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(s.image(), &st))
	return st.Blocks * 512
}

// fitrim is FITRIM, _IOWR('X', 121, struct fstrim_range) (linux/fs.h).
const fitrim = 0xc0185879

// trim discards the unused blocks of a filesystem.
func trim(t *testing.T, path string) error {
	t.Helper()
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	arg := struct{ start, length, minimum uint64 }{length: math.MaxUint64}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), fitrim, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		return errno
	}
	return nil
}

// TestNoSpaceInCreate: if a foreign file fills the disk, creating or expanding a thick volume fails and
// leaves nothing. Thin volumes report the full disk in their health.
func TestNoSpaceInCreate(t *testing.T) {
	s := start(t, "4G")
	before := s.capacity(t)
	filler, err := os.Create(filepath.Join(s.disk, "filler"))
	must(t, err)
	must(t, unix.Fallocate(int(filler.Fd()), 0, 0, 3*gib+gib/2))
	must(t, filler.Close())
	wantCode(t, s.create(t, "no-space", gib, map[string]string{"allocation": "thick"}), codes.ResourceExhausted, "no space left")
	s.wantNothingLeft(t)
	if after := s.capacity(t); after != before {
		t.Errorf("capacity after the failed create: got %d, want %d as before", after, before)
	}
	must(t, s.create(t, "grow", gib/4, map[string]string{"allocation": "thick"}))
	wantCode(t, s.expand(t.Context(), 2*gib), codes.OutOfRange, "no space left")
	if info, err := os.Stat(s.image()); err != nil || info.Size() != gib/4 {
		t.Errorf("image after the failed expansion: got %v, %v; want a size of %d as before", info, err, gib/4)
	}
	// The health reports a full disk at once. The pool has less room only after the foreign use was
	// measured again, as when the driver starts.
	must(t, os.Remove(filepath.Join(s.disk, "filler")))
	s.mustDelete(t)
	must(t, s.create(t, "thin", gib, nil))
	s.fill(t)
	health, err := s.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	if got := health.GetBackendHealth(); len(got) != 1 || got[0].GetReason() != "PoolAlmostFull" || got[0].GetStatus() != csi.StorageHealthErrorType_STORAGE_DEGRADED {
		t.Errorf("NodeGetStorageHealth: got %v, want STORAGE_DEGRADED with reason PoolAlmostFull", health)
	}
	if got := s.health(t); len(got) != 1 || got[0].GetReason() != "PoolAlmostFull" {
		t.Errorf("ControllerGetVolumeHealth: got %v, want reason PoolAlmostFull", got)
	}
	s.Restart(t)
	wantCode(t, s.create(t, "more", gib, nil), codes.ResourceExhausted, "room")
	s.mustDelete(t)
}

// fill leaves 32 MiB free on the disk.
func (s *subject) fill(t *testing.T) {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(s.disk, &st))
	f, err := os.Create(filepath.Join(s.disk, "filler"))
	must(t, err)
	defer f.Close()
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bfree)*st.Bsize-32<<20))
}

// TestIOErrorInCreate: if the disk below the pool fails while volumes are created, each volume whose
// create succeeded exists after a repair and a restart.
func TestIOErrorInCreate(t *testing.T) {
	// The disk is a sparse file on a filesystem that becomes full, so that writes to its holes fail.
	below := testenv.Filesystem(t, "ext4", "80M")
	disk := filepath.Join(t.TempDir(), "disk")
	must(t, os.Mkdir(disk, 0o755))
	image := filepath.Join(below, "disk")
	testenv.Run(t, "truncate", "-s", "2G", image)
	testenv.Run(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", image)
	testenv.Run(t, "mount", "-o", "loop", image, disk)
	mounted := true
	t.Cleanup(func() {
		if mounted {
			testenv.Run(t, "umount", disk)
		}
	})
	s := startOn(t, disk)
	filler := fillWith(t, filepath.Join(below, "filler"))
	made, err := s.createUntilFailure(t)
	if status.Code(err) == codes.OK {
		t.Fatal("every create succeeded although the disk failed")
	}
	t.Logf("%d volumes were created, then: %v", len(made), err)
	s.Stop(t)
	must(t, os.Remove(filler))
	testenv.Run(t, "umount", disk)
	mounted = false
	testenv.Run(t, "sh", "-c", "e2fsck -fy "+image+" >/dev/null 2>&1 || [ $? -lt 4 ]")
	testenv.Run(t, "mount", "-o", "loop", image, disk)
	mounted = true
	s.Restart(t)
	for _, name := range made {
		must(t, s.create(t, name, 64<<20, nil))
		s.mustDelete(t)
	}
	s.wantNothingLeft(t)
	s.Stop(t)
}

// fillWith fills a filesystem with one file, and returns the path of the file.
func fillWith(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	for block := make([]byte, 64<<10); len(block) >= 4096; block = block[:len(block)/2] {
		for err == nil {
			_, err = f.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
	must(t, f.Sync())
	return path
}

// createUntilFailure creates volumes until a create fails. It returns the names of those that succeeded.
func (s *subject) createUntilFailure(t *testing.T) (made []string, err error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		name := "io-" + string(rune('a'+len(made)/26%26)) + string(rune('a'+len(made)%26))
		if err := s.create(t, name, 64<<20, nil); err != nil {
			return made, err
		}
		made = append(made, name)
		if len(made) == 26*26 {
			break
		}
	}
	return made, nil
}

// TestForeignLoopDevice: a loop device of another program that the driver cannot open affects no volume.
func TestForeignLoopDevice(t *testing.T) {
	s := start(t, "8G")
	foreign := filepath.Join(t.TempDir(), "film")
	testenv.Run(t, "truncate", "-s", "16M", foreign)
	device := testenv.Run(t, "losetup", "-f", "--show", foreign)
	t.Cleanup(func() { testenv.Run(t, "losetup", "-d", device) })
	testenv.Run(t, "mount", "--bind", "/dev/null", device)
	t.Cleanup(func() { testenv.Run(t, "umount", device) })
	s.Restart(t) // the new driver scans all devices
	must(t, s.create(t, "v", gib, nil))
	wantCode(t, s.publish(t.Context(), false), codes.FailedPrecondition, "not staged")
	must(t, s.stage(t.Context()))
	must(t, s.publish(t.Context(), false))
	must(t, s.unpublish(t.Context()))
	must(t, s.unstage(t.Context()))
	s.mustDelete(t)
}

// TestUnreadableRecord: a volume whose record cannot be read, because it is a directory, can be unpublished
// and unstaged, and is listed with the others.
func TestUnreadableRecord(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "other", gib, nil))
	other := s.id
	for _, fsType := range []string{"ext4", ""} {
		s.setKind(fsType)
		must(t, s.create(t, "v-"+backendtest.Kind{FSType: fsType}.Name(), gib, nil))
		must(t, s.stage(t.Context()))
		must(t, s.publish(t.Context(), fsType == ""))
		record := filepath.Join(filepath.Dir(s.image()), "volume.json")
		must(t, os.Rename(record, record+".saved"))
		must(t, os.Mkdir(record, 0o700))
		list, err := s.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		must(t, err)
		if len(list.GetEntries()) != 2 {
			t.Errorf("list: got %v, want two volumes", list)
		}
		must(t, s.unpublish(t.Context()))
		must(t, s.unstage(t.Context()))
		s.wantUnattached(t)
		must(t, os.Remove(record))
		must(t, os.Rename(record+".saved", record))
		s.mustDelete(t)
	}
	s.id = other
	s.mustDelete(t)
}

// TestNameInAnotherPool: only one of the pools can contain a volume with a name.
func TestNameInAnotherPool(t *testing.T) {
	disk := testenv.Filesystem(t, "xfs", "8G")
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"), NodeID: backendtest.Node, StateDir: state,
		Name: "csi.trivet.dev", Services: []string{"controller", "node"},
		Config: driver.Config{
			Pools: []pool.Config{
				{Name: "p", Directory: pool.Directory{Path: filepath.Join(disk, "p")}},
				{Name: "q", Directory: pool.Directory{Path: filepath.Join(disk, "q")}},
			},
			MaxVolumesPerNode: 10,
		},
		Kinds: backend.Kinds{loop.Kind},
	})
	s := &subject{Driver: d, cap: backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)}
	must(t, s.create(t, "v", gib, map[string]string{"pool": "q"}))
	inQ := s.id
	wantCode(t, s.create(t, "v", gib, map[string]string{"pool": "p"}), codes.AlreadyExists, `pool "q"`)
	wantCode(t, s.create(t, "v", gib, nil), codes.AlreadyExists, `pool "q"`)
	must(t, s.create(t, "w", gib, nil))
	list, err := s.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	must(t, err)
	rest, err := s.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1, StartingToken: list.GetNextToken()})
	must(t, err)
	if got := rest.GetEntries(); len(got) != 1 || got[0].GetVolume().GetVolumeId() != inQ || rest.GetNextToken() != "" {
		t.Errorf("second page: got %v after %v, want only %s", rest, list, inQ)
	}
	// A folder that was copied from another pool is not a volume.
	testenv.Run(t, "cp", "-a", filepath.Join(disk, "p/volumes/w"), filepath.Join(disk, "q/volumes/w"))
	copied := strings.Replace(inQ, ":v", ":w", 1)
	_, err = s.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: copied})
	wantCode(t, err, codes.DataLoss, "copied")
}

// TestMarkedReadOnlyDevice: if another process has detached a read-only device while it was open, which
// marks it with autoclear, publish removes the mark.
func TestMarkedReadOnlyDevice(t *testing.T) {
	s := start(t, "8G")
	s.setKind("")
	must(t, s.create(t, "v", gib, nil))
	must(t, s.stage(t.Context()))
	dir := t.TempDir()
	publish := func(name string) string {
		target := filepath.Join(dir, name)
		must(t, s.publishAt(t.Context(), target, true))
		return target
	}
	first := publish("first")
	own := testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", s.image())
	upper := testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", own)
	holder, err := os.Open(upper)
	must(t, err)
	testenv.Run(t, "losetup", "-d", upper)
	second := publish("second")
	must(t, holder.Close())
	if auto := testenv.Run(t, "losetup", "-n", "-O", "AUTOCLEAR", upper); strings.TrimSpace(auto) != "0" {
		t.Errorf("autoclear after the second publish: got %s, want 0", auto)
	}
	for _, target := range []string{first, second} {
		got := make([]byte, 4096)
		f, err := os.Open(target)
		must(t, err)
		if _, err := f.ReadAt(got, gib-4096); err != nil {
			t.Errorf("reading %s: %v", target, err)
		}
		must(t, f.Close())
		must(t, s.unpublishAt(t.Context(), target))
	}
	must(t, s.unstage(t.Context()))
	s.mustDelete(t)
}

// TestSlowCheck: a check of a filesystem that takes longer than its call continues, and the next call does
// not start another check.
func TestSlowCheck(t *testing.T) {
	s := start(t, "8G")
	s.createFormatted(t, "slow")
	testenv.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", s.image())
	bin := t.TempDir()
	began, release := filepath.Join(bin, "began"), filepath.Join(bin, "release")
	testenv.Run(t, "mkfifo", release)
	e2fsck := testenv.Run(t, "which", "e2fsck")
	script := "#!/bin/sh\necho . >>" + began + "\nread word <" + release + "\nexec " + e2fsck + ` "$@"` + "\n"
	must(t, os.WriteFile(filepath.Join(bin, "e2fsck"), []byte(script), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))

	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	wantCode(t, s.stage(short), codes.DeadlineExceeded, "")
	wantCode(t, s.stage(t.Context()), codes.Aborted, "NodeStageVolume") // the check is still running
	must(t, os.WriteFile(release, []byte("go\n"), 0))
	for deadline := time.Now().Add(30 * time.Second); ; {
		err := s.stage(t.Context())
		if err == nil {
			break
		}
		if code := status.Code(err); code != codes.Aborted || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(began); err != nil || string(b) != ".\n" {
		t.Errorf("got %q, %v; want one dot, for one start of the check", b, err)
	}
	must(t, s.unstage(t.Context()))
	s.mustDelete(t)
}
