package loop_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
)

// BenchmarkNeighbour runs each kind of background task in a pool, except trims (BenchmarkTrim). It reports the p99 of requests for another volume of the pool during
// the task divided by that after it.
func BenchmarkNeighbour(b *testing.B) {
	for name, prepare := range map[string]func(b *testing.B) (r *requests, before, task func()){
		"copy": copyTask, "send": sendTask, "receive": receiveTask, "wipe": wipeTask, "check": checkTask,
	} {
		b.Run(name, func(b *testing.B) {
			r, before, task := prepare(b)
			for b.Loop() {
				before()
				r.compare(b, task)
			}
		})
	}
}

// neighbour creates and stages another volume, and returns requests for it.
func (s *subject) neighbour(b *testing.B) *requests {
	b.Helper()
	quiet := *s
	quiet.staging = b.TempDir()
	quiet.stageNew(b, "quiet", gib)
	return newRequests(b, quiet.staging)
}

// onExt4 returns a temporary directory. The benchmark is skipped if it is not on ext4: copies could share blocks.
func onExt4(b *testing.B) (dir string) {
	b.Helper()
	dir = b.TempDir()
	var st unix.Statfs_t
	must(b, unix.Statfs(dir, &st))
	if st.Type != unix.EXT4_SUPER_MAGIC {
		b.Skip("TMPDIR is not on ext4")
	}
	return dir
}

// onDisk creates an xfs on a disk of 10 GiB and mounts it. The disk is a file whose blocks are all written, because the filesystem
// with the file would write its journal for the first write to a block. The disk has no cache.
func onDisk(b *testing.B) (dir string) {
	b.Helper()
	image := filepath.Join(b.TempDir(), "disk")
	testenv.Run(b, "dd", "if=/dev/zero", "of="+image, "bs=1M", "count=10240", "conv=fsync")
	testenv.Mkfs(b, "xfs", "-K", image)
	return mountAt(b, testenv.PlugIn(b, image, "--direct-io=on"))
}

// inMemory creates an xfs of 10 GiB in memory and mounts it.
func inMemory(b *testing.B) (dir string) {
	b.Helper()
	image := filepath.Join(mountAt(b, "none", "-t", "tmpfs"), "disk")
	testenv.Run(b, "truncate", "-s", "10G", image)
	testenv.Mkfs(b, "xfs", image)
	return mountAt(b, testenv.PlugIn(b, image))
}

// mountAt mounts a filesystem at a new directory until the benchmark ends.
func mountAt(b *testing.B, source string, options ...string) (dir string) {
	b.Helper()
	dir = b.TempDir()
	testenv.Run(b, "mount", append(options, source, dir)...)
	b.Cleanup(func() { testenv.Run(b, "umount", dir) })
	return dir
}

// copyTask copies a volume with 256 MiB in a pool that cannot share blocks.
func copyTask(b *testing.B) (r *requests, before, task func()) {
	s := startOn(b, onExt4(b))
	must(b, s.create(b, "source", 4*gib, nil))
	must(b, s.stage(b.Context()))
	writeRandom(b, s.staging, 1)
	must(b, s.unstage(b.Context()))
	source := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.id}}}
	made := subject{Driver: s.Driver}
	before = func() {
		if made.id != "" {
			must(b, made.delete(b.Context()))
		}
	}
	return s.neighbour(b), before, func() {
		resp, err := s.Control.CreateVolume(b.Context(), &csi.CreateVolumeRequest{
			Name: "copy", CapacityRange: &csi.CapacityRange{RequiredBytes: 4 * gib}, VolumeCapabilities: []*csi.VolumeCapability{s.cap}, VolumeContentSource: source,
		})
		must(b, err)
		made.id = resp.GetVolume().GetVolumeId()
	}
}

// sendTask sends a volume with 256 MiB to another node.
func sendTask(b *testing.B) (r *requests, before, task func()) { return transferTask(b, 0) }

// receiveTask receives a volume with 256 MiB from another node.
func receiveTask(b *testing.B) (r *requests, before, task func()) { return transferTask(b, 1) }

// transferTask sends a volume with 256 MiB from the first node to the second. The requests are for a volume of one of them. The pool of the
// other is in memory, because the nodes would share the disk.
func transferTask(b *testing.B, neighbour int) (r *requests, before, task func()) {
	pools := []string{inMemory(b), inMemory(b)}
	pools[neighbour] = onDisk(b)
	c := backendtest.StartCluster(b, pools, loop.Kind)
	tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.CapabilityOf("ext4")}
	source := tr.Create(b, 0, "source", 4*gib, nil)
	s := &subject{Driver: c.Nodes[0], id: source.ID, staging: b.TempDir()}
	s.setKind("ext4")
	must(b, s.stage(b.Context()))
	writeRandom(b, s.staging, 1)
	from := tr.Snapshot(b, source, "snapshot")
	must(b, s.unstage(b.Context()))
	quiet := &subject{Driver: c.Nodes[neighbour], id: tr.Create(b, neighbour, "quiet", gib, nil).ID, staging: b.TempDir(), cap: s.cap}
	must(b, quiet.stage(b.Context()))
	b.Cleanup(func() { must(b, quiet.unstage(context.Background())) })
	r = newRequests(b, quiet.staging)
	var received *backendtest.NodeVolume
	before = func() {
		if received != nil {
			received.Delete(b)
		}
	}
	return r, before, func() { received = tr.Create(b, 1, "received", 4*gib, from) }
}

// wipeTask wipes a device of 256 MiB on the disk of the pool, as a logical volume in a volume group is wiped. The device cannot zero a
// range without writing zeros.
func wipeTask(b *testing.B) (r *requests, before, task func()) {
	s := startOn(b, onExt4(b))
	path := filepath.Join(s.disk, "wiped")
	must(b, os.WriteFile(path, nil, 0o600))
	testenv.Run(b, "chattr", "-e", path) // such a file supports no FALLOC_FL_ZERO_RANGE
	testenv.Run(b, "truncate", "-s", "256M", path)
	loopDevice := testenv.PlugIn(b, path)
	testenv.Run(b, "blkdiscard", "--zeroout", "--length", "4096", loopDevice) // the kernel detects that the command fails
	device, err := os.OpenFile(loopDevice, os.O_RDWR, 0)
	must(b, err)
	b.Cleanup(func() { _ = device.Close() })
	dir, err := os.Open(s.disk)
	must(b, err)
	b.Cleanup(func() { _ = dir.Close() })
	return s.neighbour(b), func() {}, func() {
		must(b, blockdev.ZeroRange(b.Context(), device, 0, 256<<20, blockdev.ZeroOptions{
			Budget: pool.Config{}.Background(dir), Progress: func(int64) error { return nil },
		}))
	}
}

// checkTask checks a volume with 256 MiB for at least 10 s. The check of a btrfs reads all data.
func checkTask(b *testing.B) (r *requests, before, task func()) {
	s := startOn(b, onDisk(b))
	r = s.neighbour(b)
	s.setKind("btrfs")
	s.stageNew(b, "checked", 4*gib)
	writeRandom(b, s.staging, 1)
	return r, func() {}, func() {
		for began := time.Now(); time.Since(began) < 10*time.Second; {
			if result := s.Check(b, s.id); result.Result != driver.CheckClean {
				b.Error(result.Problem + result.Errors)
			}
		}
	}
}
