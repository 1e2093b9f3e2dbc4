package driver_test

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// examining returns the options of a driver that examines its volumes all the time and serves metrics.
func examining(t *testing.T, o driver.Options) driver.Options {
	t.Helper()
	o.HealthInterval, o.HTTPAddress = 20*time.Millisecond, backendtest.FreeAddress(t)
	return o
}

// healthMetrics are the lines of /metrics with conditions of volumes.
var healthMetrics = regexp.MustCompile(`(?m)^trivet_volume_health{.*$`)

// awaitHealth waits until the conditions of the volumes are exactly these, as `reason="R",severity="S"`, in the metrics, in the
// report, and in the answer to other programs of the node.
func awaitHealth(t *testing.T, o driver.Options, want ...string) {
	t.Helper()
	conn, err := grpc.NewClient(o.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	defer conn.Close()
	var metrics, reported, answered []string
	wanted := func(got []string) bool { slices.Sort(got); return slices.Equal(got, want) }
	add := func(to *[]string, health []status.Health) {
		for _, h := range health {
			*to = append(*to, `reason="`+h.Reason+`",severity="`+strings.ReplaceAll(strings.ToLower(h.Status), "_", "-")+`"`)
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("got metrics %q, report %q, answer %q; want %q", metrics, reported, answered, want)
		}
	}()
	await(t, "the conditions of the volumes", func() bool {
		metrics, reported, answered = nil, nil, nil
		_, page := get(t, o.HTTPAddress, "/metrics")
		for _, line := range healthMetrics.FindAllString(page, -1) {
			metrics = append(metrics, strings.TrimSuffix(strings.TrimPrefix(line, "trivet_volume_health{"), "} 1"))
		}
		for _, v := range report(t, o.HTTPAddress).Volumes {
			add(&reported, v.Health)
		}
		e, err := status.FetchExamination(t.Context(), conn)
		for _, v := range e.Volumes {
			add(&answered, v.Health)
		}
		return err == nil && wanted(metrics) && wanted(reported) && wanted(answered)
	})
}

// TestHealthOfFilesystem: an ext4 with a damaged directory has errors from the time at which a program reads the directory, until an
// administrator has repaired the filesystem.
func TestHealthOfFilesystem(t *testing.T) {
	o := examining(t, options(t, loop.Kind))
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	v, staging := create(t, d, kind, 64), t.TempDir()
	stage := func() {
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
			VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
		})
		must(t, err)
	}
	unstage := func() {
		_, err := d.Node.NodeUnstageVolume(context.WithoutCancel(t.Context()), &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
		must(t, err)
	}
	t.Cleanup(unstage)
	stage()
	dir := filepath.Join(staging, "dir")
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600))
	awaitHealth(t, o)
	unstage()
	images, err := filepath.Glob(filepath.Join(d.Pool(), "volumes/*", pool.ImageFile))
	if err != nil || len(images) != 1 {
		t.Fatalf("got images %q, %v; want one", images, err)
	}
	printed := strings.Fields(testenv.Run(t, "debugfs", "-R", "blocks /dir", images[0])) // its version, and the number of the block
	size := regexp.MustCompile(`Block size: +(\d+)`).FindStringSubmatch(testenv.Run(t, "dumpe2fs", "-h", images[0]))
	testenv.Run(t, "dd", "if=/dev/urandom", "of="+images[0], "bs="+size[1], "seek="+printed[len(printed)-1], "count=1", "conv=notrunc,fsync")
	stage()
	if names, err := os.ReadDir(dir); err == nil {
		t.Errorf("got names %v in the damaged directory, want an error", names)
	}
	awaitHealth(t, o, `reason="FilesystemErrors",severity="degraded"`)
	unstage()
	_, _ = testenv.Output("", "e2fsck", "-fy", images[0]) // its status is not 0 if it repairs errors
	stage()
	awaitHealth(t, o)
}

// TestHealthOfPool: a full pool, and a pool that is not there, concern its volumes.
func TestHealthOfPool(t *testing.T) {
	o := examining(t, options(t, loop.Kind))
	at := testenv.Filesystem(t, "ext4", "256M")
	o.Config.Pools[0].Directory.Path = filepath.Join(at, "pool")
	d := backendtest.StartWith(t, o)
	create(t, d, backendtest.Kind{FSType: "ext4"}, 64)
	awaitHealth(t, o)
	filler := filepath.Join(at, "filler")
	_, _ = testenv.Output("", "dd", "if=/dev/zero", "of="+filler, "bs=1M") // ends when the filesystem is full
	awaitHealth(t, o, `reason="PoolAlmostFull",severity="degraded"`)
	must(t, os.Remove(filler))
	awaitHealth(t, o)

	must(t, os.Rename(d.Pool(), d.Pool()+".away"))
	awaitHealth(t, o, `reason="PoolUnavailable",severity="inaccessible"`)
	must(t, os.Rename(d.Pool()+".away", d.Pool()))
	awaitHealth(t, o)
}

// TestHealthOfPoolDisk: a disk that cannot be read concerns the volumes of its pool, also if all of the pool is in the page cache.
func TestHealthOfPoolDisk(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			device, image, _ := testenv.Disk(t, 512<<20)
			at := t.TempDir()
			testenv.Mkfs(t, fsType, device)
			testenv.Run(t, "mount", device, at)
			t.Cleanup(func() { testenv.Run(t, "umount", at) })
			o := examining(t, options(t, loop.Kind))
			o.Config.Pools[0].Directory.Path = filepath.Join(at, "pool")
			d := backendtest.StartWith(t, o)
			create(t, d, backendtest.Kind{FSType: "ext4"}, 64)
			awaitHealth(t, o)
			testenv.Run(t, "sync", "--file-system", at)
			away := image + ".away"
			testenv.Run(t, "cp", "--sparse=always", image, away)
			testenv.Run(t, "truncate", "--size=0", image) // reads of the disk fail
			awaitHealth(t, o, `reason="DiskUnreadable",severity="inaccessible"`)
			testenv.Run(t, "dd", "if="+away, "of="+image, "bs=1M", "conv=notrunc,sparse")
			awaitHealth(t, o)
		})
	}
}

// TestHealthOfShutDownPool: a disk that cannot be read is the reason also if the filesystem of the pool has shut down because of it, so
// that the directory of the pool cannot be read either.
func TestHealthOfShutDownPool(t *testing.T) {
	at := testenv.Filesystem(t, "xfs", "512M")
	o := examining(t, options(t, loop.Kind))
	o.Config.Pools[0].Directory.Path = filepath.Join(at, "pool")
	d := backendtest.StartWith(t, o)
	create(t, d, backendtest.Kind{FSType: "ext4"}, 64)
	d.Restart(t) // the first examination finds the volume
	awaitHealth(t, o)
	testenv.Run(t, "xfs_io", "-x", "-c", "shutdown", at)
	awaitHealth(t, o, `reason="DiskUnreadable",severity="inaccessible"`)
}

// TestHealthOfDisk: a pulled disk is missing until it is inserted again.
func TestHealthOfDisk(t *testing.T) {
	device, image, pull := testenv.Disk(t, 66<<20)
	link := filepath.Join(t.TempDir(), "disk")
	must(t, os.Symlink(device, link))
	o := examining(t, options(t, disk.Kind))
	o.Config.Pools = []pool.Config{{Name: "disks", Section: &disk.Disks{Match: []string{link}}}}
	d := backendtest.StartWith(t, o)
	_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, Parameters: map[string]string{"backend": "disk"},
		VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	})
	must(t, err)
	awaitHealth(t, o)
	pull()
	awaitHealth(t, o, `reason="DiskMissing",severity="inaccessible"`)
	must(t, os.Remove(link))
	must(t, os.Symlink(testenv.PlugIn(t, image), link))
	awaitHealth(t, o)
}

// TestHealthOfNodes: the report of the controller's driver contains the conditions of volumes whose pool is not there.
func TestHealthOfNodes(t *testing.T) {
	c := backendtest.NewCluster(t)
	o := c.NodeOptions(t, "a", filepath.Join(t.TempDir(), "pool"), loop.Kind)
	o = examining(t, o)
	node := backendtest.StartWith(t, o)
	r := examining(t, c.RouterOptions(t, []driver.ForwardingNode{{Name: "a", Address: o.Config.Forwarding.Listen}}, loop.Kind))
	c.Router = backendtest.StartWith(t, r)
	var v *csi.Volume
	await(t, "the connection to node a", func() bool {
		resp, err := c.Router.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20},
			VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
		})
		v = resp.GetVolume()
		return err == nil
	})
	reasons := func() (all []string) {
		for _, listed := range report(t, r.HTTPAddress).Volumes {
			for _, h := range listed.Health {
				all = append(all, listed.Node+" "+listed.ID+" "+h.Reason)
			}
		}
		return all
	}
	awaitHealth(t, o)
	must(t, os.Rename(node.Pool(), node.Pool()+".away"))
	want := []string{"a " + v.GetVolumeId() + " PoolUnavailable"}
	await(t, "the condition", func() bool { return slices.Equal(reasons(), want) })
	must(t, os.Rename(node.Pool()+".away", node.Pool()))
	await(t, "the repair", func() bool { return len(reasons()) == 0 })
}
