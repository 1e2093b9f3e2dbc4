package loop_test

import (
	"bytes"
	"context"
	"errors"
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

// subject is a driver on a disk of its own, with one volume.
type subject struct {
	*backendtest.Driver
	disk    string // where the pool's filesystem is mounted
	id      string
	cap     *csi.VolumeCapability
	staging string
}

func start(t *testing.T, size string) *subject {
	t.Helper()
	disk := testenv.Filesystem(t, "xfs", size)
	return &subject{
		Driver: backendtest.Start(t, disk, loop.Kind), disk: disk,
		cap:     backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
		staging: t.TempDir(),
	}
}

func (s *subject) create(t *testing.T, name string, size int64, parameters map[string]string) error {
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

func (s *subject) remove(t *testing.T) {
	t.Helper()
	_, err := s.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: s.id})
	must(t, err)
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
	if out := testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", s.image()); out != "" {
		t.Errorf("the image is attached to %s", out)
	}
}

// wantNothingHalfMade fails the test if something is left of a volume.
func (s *subject) wantNothingHalfMade(t *testing.T) {
	t.Helper()
	for _, dir := range []string{".trivet/tmp", "volumes"} {
		entries, err := os.ReadDir(filepath.Join(s.pool(), dir))
		must(t, err)
		if len(entries) > 0 {
			t.Errorf("%s has %v", dir, entries)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t *testing.T, err error, code codes.Code, says ...string) {
	t.Helper()
	for _, s := range says {
		if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), s) {
			t.Errorf("got %v, want %v that says %q", err, code, s)
		}
	}
}

const gib = 1 << 30

// TestForeignData: an image that has data and was never formatted is not
// formatted; a byte anywhere is enough.
func TestForeignData(t *testing.T) {
	s := start(t, "8G")
	for name, offset := range map[string]int64{"begin": 0, "middle": gib/2 + 77, "end": gib - 1} {
		must(t, s.create(t, "foreign-"+name, gib, nil))
		f, err := os.OpenFile(s.image(), os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte{1}, offset)
		must(t, err)
		wantCode(t, s.stage(t.Context()), codes.DataLoss, "never formatted", s.image())
		got := make([]byte, 1)
		if _, err := f.ReadAt(got, offset); err != nil || got[0] != 1 {
			t.Errorf("the foreign byte is now %d: %v", got[0], err)
		}
		must(t, f.Close())
		s.wantUnattached(t)
		s.remove(t)
	}
	// Zeros that were written are blank.
	must(t, s.create(t, "zeros", gib, nil))
	must(t, os.WriteFile(s.image(), make([]byte, 1<<20), 0o600))
	must(t, os.Truncate(s.image(), gib))
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	s.remove(t)
}

// TestForeignImage: something else stands where the image should be.
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
		must(t, s.stage(t.Context()))
		must(t, s.unstage(t.Context()))
		s.remove(t)
	}
	if after, err := os.ReadFile(precious); err != nil || !bytes.Equal(before, after) {
		t.Errorf("what the link pointed to was changed: %v", err)
	}
}

// TestShortenedImage: an image that was truncated is neither attached nor grown
// back as if nothing had happened.
func TestShortenedImage(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "short", gib, nil))
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	must(t, os.Truncate(s.image(), gib/2))
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "truncated", "536870912")
	_, err := s.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: s.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * gib},
	})
	wantCode(t, err, codes.DataLoss, "truncated")
	if info, err := os.Stat(s.image()); err != nil || info.Size() != gib/2 {
		t.Errorf("the image was changed: %v, %v", info, err)
	}
	health, err := s.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: s.id})
	must(t, err)
	if got := health.GetVolumeHealth().GetHealthStatuses(); len(got) != 1 || got[0].GetReason() != "ImageTruncated" || got[0].GetStatus() != csi.VolumeHealthErrorType_DATA_LOSS {
		t.Errorf("its health: %v", health)
	}
	s.remove(t)
}

// TestDamagedSuperblock: a filesystem that cannot be recognised any more is not
// taken for a blank image.
func TestDamagedSuperblock(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "damaged", gib, nil))
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	f, err := os.OpenFile(s.image(), os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(make([]byte, 4096), 0)
	must(t, err)
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "nothing was changed", s.image())
	head := make([]byte, 4096)
	if _, err := f.ReadAt(head, 0); err != nil || !bytes.Equal(head, make([]byte, 4096)) {
		t.Errorf("the image was written to: %v", err)
	}
	must(t, f.Close())
	s.wantUnattached(t)
	s.remove(t)
}

// TestDirtyFilesystem: ext4 with a recorded error is checked before it is
// mounted, and one that needs a person is left alone.
func TestDirtyFilesystem(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "dirty", gib, nil))
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	testenv.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", s.image())
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	if out := testenv.Run(t, "dumpe2fs", "-h", s.image()); !strings.Contains(out, "Filesystem state:         clean") {
		t.Errorf("it was mounted unchecked:\n%s", out)
	}
	// Two files that share a block: e2fsck -p will not choose between them.
	testenv.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", s.image())
	testenv.Run(t, "debugfs", "-w", "-R", "clri <2>", s.image())
	wantCode(t, s.stage(t.Context()), codes.DataLoss, "nothing was changed", "e2fsck")
	s.wantUnattached(t)
	s.remove(t)
}

// TestDamagedRecords: a volume whose records cannot be read is listed and reported
// all the same, does not keep others from being listed, and counts in the ledger.
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
		t.Errorf("listed: %v", list)
	}
	health, err := s.Control.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	must(t, err)
	one, err := s.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: s.id})
	must(t, err)
	if h := health.GetEntries(); len(h) != 1 || h[0].String() != one.GetVolumeHealth().String() || h[0].GetHealthStatuses()[0].GetReason() != "RecordDamaged" {
		t.Errorf("health: %v, %v", health, one)
	}
	// A restart measures anew what others use, and folders take a few blocks.
	const slack = 1 << 20
	if after := s.capacity(t); after < before-slack || after > before+slack {
		t.Errorf("a damaged record changed the capacity from %d to %d", before, after)
	}
	_, err = s.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: s.id})
	wantCode(t, err, codes.DataLoss, "record")
	_, err = s.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: strings.Replace(s.id, ":bad", ":good", 1)})
	wantCode(t, err, codes.DataLoss, "attached/node")
	must(t, os.WriteFile(record, saved, 0o600))
	must(t, os.Remove(attached))
	s.remove(t)
	s.id = strings.Replace(s.id, ":bad", ":good", 1)
	s.remove(t)
	s.awaitEmptyTrash(t)
	if after := s.capacity(t); after < before+2*gib-slack || after > before+2*gib+slack {
		t.Errorf("with both gone the capacity is %d, it was %d with both", after, before)
	}
}

func (s *subject) awaitEmptyTrash(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		page := s.capacity(t)
		left, err := os.ReadDir(filepath.Join(s.pool(), ".trivet/trash"))
		must(t, err)
		if len(left) == 0 && s.capacity(t) == page {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the trash still has %v", left)
		}
	}
}

// TestGrownBehindTheRecord: an image that an interrupted call has grown is adopted,
// counted, and removed completely.
func TestGrownBehindTheRecord(t *testing.T) {
	s := start(t, "8G")
	before := s.capacity(t)
	must(t, s.create(t, "grown", gib, nil))
	must(t, os.Truncate(s.image(), 3*gib))
	must(t, s.stage(t.Context()))
	if after := s.capacity(t); after != before-3*gib {
		t.Errorf("the capacity is %d, want %d", after, before-3*gib)
	}
	must(t, s.unstage(t.Context()))
	s.remove(t)
	s.awaitEmptyTrash(t)
	if after := s.capacity(t); after != before {
		t.Errorf("with the volume gone the capacity is %d, it was %d", after, before)
	}
}

// TestHeldImage: an image that another process has locked is not changed.
func TestHeldImage(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "held", gib, nil))
	f, err := os.Open(s.image())
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	wantCode(t, s.stage(t.Context()), codes.FailedPrecondition, "locked", s.image())
	_, err = s.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: s.id})
	wantCode(t, err, codes.FailedPrecondition, "locked")
	must(t, f.Close())
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
	s.remove(t)
}

// TestMkfsMissing: without mkfs a volume cannot be staged, and says why; with
// mkfs it can.
func TestMkfsMissing(t *testing.T) {
	s := start(t, "8G")
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.cap = backendtest.Kind{FSType: fsType}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
		must(t, s.create(t, "no-mkfs-"+fsType, gib+4096, nil))
		t.Run(fsType, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir())
			wantCode(t, s.stage(t.Context()), codes.FailedPrecondition, "mkfs."+fsType, "not found in PATH", "install")
		})
		s.wantUnattached(t)
		must(t, s.stage(t.Context()))
		must(t, s.unstage(t.Context()))
		s.remove(t)
	}
}

// TestDeviceNodeMissing: a device node that is not there is made.
func TestDeviceNodeMissing(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "node", gib, nil))
	must(t, s.stage(t.Context()))
	device := testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", s.image())
	must(t, os.Remove(device))
	target := filepath.Join(t.TempDir(), "target")
	_, err := s.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: s.id, StagingTargetPath: s.staging, TargetPath: target, VolumeCapability: s.cap,
	})
	must(t, err)
	if info, err := os.Stat(device); err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Errorf("%s: %v, %v", device, info, err)
	}
	_, err = s.Node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: s.id, TargetPath: target})
	must(t, err)
	must(t, s.unstage(t.Context()))
	s.remove(t)
}

// TestThick: a thick volume has all its blocks, from the first moment, through
// mkfs and fstrim, growth and another attach; a thin one has not.
func TestThick(t *testing.T) {
	s := start(t, "8G")
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		s.cap = backendtest.Kind{FSType: fsType}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
		for _, allocation := range []string{"thick", "thin", "thick"} {
			must(t, s.create(t, allocation+"-"+fsType, gib, map[string]string{"allocation": allocation}))
			s.wantAllocated(t, allocation == "thick", gib)
			must(t, s.stage(t.Context()))
			must(t, os.WriteFile(filepath.Join(s.staging, "file"), make([]byte, 64<<20), 0o600))
			must(t, os.Remove(filepath.Join(s.staging, "file")))
			// FITRIM is refused where the device takes no discards.
			if err := trim(t, s.staging); (err == nil) != (allocation == "thin") {
				t.Errorf("fstrim on a %s volume: %v", allocation, err)
			}
			must(t, s.unstage(t.Context()))
			s.wantAllocated(t, allocation == "thick", gib)
			_, err := s.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: s.id, CapacityRange: &csi.CapacityRange{RequiredBytes: gib + gib/2},
			})
			must(t, err)
			s.wantAllocated(t, allocation == "thick", gib+gib/2)
			s.remove(t)
		}
	}
}

func (s *subject) wantAllocated(t *testing.T, all bool, size int64) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(s.image(), &st))
	if st.Size != size || (st.Blocks*512 >= size) != all {
		t.Errorf("the image has %d bytes, %d of them allocated; want %d, all allocated: %t", st.Size, st.Blocks*512, size, all)
	}
}

// fitrim is FITRIM, _IOWR('X', 121, struct fstrim_range) (linux/fs.h).
const fitrim = 0xc0185879

// trim asks a filesystem to discard all that it does not use.
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

// TestNoSpaceInCreate fills the disk behind the ledger's back: a thick volume
// fails in the middle, and nothing of it is left.
func TestNoSpaceInCreate(t *testing.T) {
	s := start(t, "4G")
	before := s.capacity(t)
	filler, err := os.Create(filepath.Join(s.disk, "filler"))
	must(t, err)
	must(t, unix.Fallocate(int(filler.Fd()), 0, 0, 3*gib+gib/2))
	must(t, filler.Close())
	wantCode(t, s.create(t, "no-space", gib, map[string]string{"allocation": "thick"}), codes.ResourceExhausted, "no space left")
	s.wantNothingHalfMade(t)
	if after := s.capacity(t); after != before {
		t.Errorf("the failed create changed the capacity from %d to %d", before, after)
	}
	must(t, s.create(t, "grow", gib/4, map[string]string{"allocation": "thick"}))
	_, err = s.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: s.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * gib},
	})
	wantCode(t, err, codes.OutOfRange, "no space left")
	if info, err := os.Stat(s.image()); err != nil || info.Size() != gib/4 {
		t.Errorf("after a failed growth the image has %v: %v", info, err)
	}
	// What others use counts as soon as it is measured, and a thin volume's
	// health says that the disk is full.
	must(t, os.Remove(filepath.Join(s.disk, "filler")))
	s.remove(t)
	must(t, s.create(t, "thin", gib, nil))
	s.fill(t)
	health, err := s.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	if got := health.GetBackendHealth(); len(got) != 1 || got[0].GetReason() != "PoolAlmostFull" || got[0].GetStatus() != csi.StorageHealthErrorType_STORAGE_DEGRADED {
		t.Errorf("NodeGetStorageHealth: %v", health)
	}
	volume, err := s.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: s.id})
	must(t, err)
	if got := volume.GetVolumeHealth().GetHealthStatuses(); len(got) != 1 || got[0].GetReason() != "PoolAlmostFull" {
		t.Errorf("ControllerGetVolumeHealth: %v", volume)
	}
	s.Restart(t)
	wantCode(t, s.create(t, "more", gib, nil), codes.ResourceExhausted, "room")
	s.remove(t)
}

// fill leaves the disk with next to nothing.
func (s *subject) fill(t *testing.T) {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(s.disk, &st))
	f, err := os.Create(filepath.Join(s.disk, "filler"))
	must(t, err)
	defer f.Close()
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bfree)*st.Bsize-32<<20))
}

// TestIOErrorInCreate: the disk below the pool fails while volumes are made.
// Each create says so or is true, and a restart on the mended disk serves what
// was promised.
func TestIOErrorInCreate(t *testing.T) {
	// The disk is sparse on a filesystem that is full: writes to its holes fail.
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
	s := &subject{
		Driver: backendtest.Start(t, disk, loop.Kind), disk: disk,
		cap: backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
	}
	filler := fillWith(t, filepath.Join(below, "filler"))
	made, err := s.createUntilFailure(t)
	if status.Code(err) == codes.OK {
		t.Fatal("the disk failed, and every create succeeded")
	}
	t.Logf("%d volumes were made, then: %v", len(made), err)
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
		s.remove(t)
	}
	s.wantNothingHalfMade(t)
	s.Stop(t)
}

// fillWith fills a filesystem with one file.
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

// TestForeignLoopDevice: a loop device of another program that does not answer
// concerns no volume.
func TestForeignLoopDevice(t *testing.T) {
	s := start(t, "8G")
	foreign := filepath.Join(t.TempDir(), "film")
	testenv.Run(t, "truncate", "-s", "16M", foreign)
	device := testenv.Run(t, "losetup", "-f", "--show", foreign)
	t.Cleanup(func() { testenv.Run(t, "losetup", "-d", device) })
	testenv.Run(t, "mount", "--bind", "/dev/null", device)
	t.Cleanup(func() { testenv.Run(t, "umount", device) })
	s.Restart(t) // it must scan the devices
	must(t, s.create(t, "v", gib, nil))
	target := filepath.Join(t.TempDir(), "target")
	publish := func() error {
		_, err := s.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: s.id, StagingTargetPath: s.staging, TargetPath: target, VolumeCapability: s.cap,
		})
		return err
	}
	wantCode(t, publish(), codes.FailedPrecondition, "not staged")
	must(t, s.stage(t.Context()))
	must(t, publish())
	_, err := s.Node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: s.id, TargetPath: target})
	must(t, err)
	must(t, s.unstage(t.Context()))
	s.remove(t)
}

// TestUnreadableRecord: a pod can go, and the others are listed, whatever stands
// where the volume's record should be.
func TestUnreadableRecord(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "other", gib, nil))
	other := s.id
	for _, block := range []bool{false, true} {
		kind := backendtest.Kind{FSType: "ext4"}
		if block {
			kind = backendtest.Kind{}
		}
		s.cap = kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
		must(t, s.create(t, "v-"+kind.Name(), gib, nil))
		must(t, s.stage(t.Context()))
		target := filepath.Join(t.TempDir(), "target")
		_, err := s.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: s.id, StagingTargetPath: s.staging, TargetPath: target, VolumeCapability: s.cap, Readonly: block,
		})
		must(t, err)
		record := filepath.Join(filepath.Dir(s.image()), "volume.json")
		must(t, os.Rename(record, record+".saved"))
		must(t, os.Mkdir(record, 0o700))
		list, err := s.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		must(t, err)
		if len(list.GetEntries()) != 2 {
			t.Errorf("listed: %v", list)
		}
		_, err = s.Node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: s.id, TargetPath: target})
		must(t, err)
		must(t, s.unstage(t.Context()))
		s.wantUnattached(t)
		must(t, os.Remove(record))
		must(t, os.Rename(record+".saved", record))
		s.remove(t)
	}
	s.id = other
	s.remove(t)
}

// TestNameInAnotherPool: one name is one volume, whatever the pool.
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
		t.Errorf("over two pools: %v, then %v", list, rest)
	}
	// A folder copied from another pool is not that pool's volume.
	testenv.Run(t, "cp", "-a", filepath.Join(disk, "p/volumes/w"), filepath.Join(disk, "q/volumes/w"))
	copied := strings.Replace(inQ, ":v", ":w", 1)
	_, err = s.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: copied})
	wantCode(t, err, codes.DataLoss, "copied")
}

// TestMarkedReadOnlyDevice: autoclear, which another process has set on a read-only device,
// is cleared before the device is published again.
func TestMarkedReadOnlyDevice(t *testing.T) {
	s := start(t, "8G")
	s.cap = backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
	must(t, s.create(t, "v", gib, nil))
	must(t, s.stage(t.Context()))
	dir := t.TempDir()
	publish := func(name string) string {
		target := filepath.Join(dir, name)
		_, err := s.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: s.id, StagingTargetPath: s.staging, TargetPath: target, VolumeCapability: s.cap, Readonly: true,
		})
		must(t, err)
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
		t.Errorf("published again, the device still goes when it is closed: %s", auto)
	}
	for _, target := range []string{first, second} {
		got := make([]byte, 4096)
		f, err := os.Open(target)
		must(t, err)
		if _, err := f.ReadAt(got, gib-4096); err != nil {
			t.Errorf("reading %s: %v", target, err)
		}
		must(t, f.Close())
		_, err = s.Node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: s.id, TargetPath: target})
		must(t, err)
	}
	must(t, s.unstage(t.Context()))
	s.remove(t)
}

// TestSlowCheck: a check that takes longer than its caller waits goes on, and is
// not begun again for ever; the next try finds the image clean.
func TestSlowCheck(t *testing.T) {
	s := start(t, "8G")
	must(t, s.create(t, "slow", gib, nil))
	must(t, s.stage(t.Context()))
	must(t, s.unstage(t.Context()))
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
	wantCode(t, s.stage(t.Context()), codes.Aborted, "NodeStageVolume") // it is still being checked
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
		t.Errorf("the check was begun %q: %v", b, err)
	}
	must(t, s.unstage(t.Context()))
	s.remove(t)
}
